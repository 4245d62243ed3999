"""Blocks of a store under test: their sizes, and how their bytes are changed, read and sent home."""

from __future__ import annotations

import torch
from from_outside import GRANULE_BYTES

from megatier.store.store import TieredStore
from megatier.tier import Tier

NUM_BYTES = 6 * GRANULE_BYTES + 1000
"""Ragged: the last granule and the last page are not whole."""
NUM_GRANULES = 7
KEYS = ("a", "b", "c", "d")
MIB = 1 << 20
SPAN = (GRANULE_BYTES, 3 * GRANULE_BYTES)
ZERO = torch.zeros(NUM_BYTES, dtype=torch.uint8)


def write(store: TieredStore, key: str, tier: Tier, values: torch.Tensor, start: int = 0) -> None:
    """Change bytes of a block in a tier; they are dirty there, unless it is home."""
    span = (start, start + values.numel())
    with store.lease(key, tier, span, wait=True) as block:
        block.bytes.copy_(values)
        store.mark_dirty(key, tier, span)


def read(store: TieredStore, key: str, tier: Tier, span: tuple[int, int] | None = None) -> torch.Tensor:
    with store.lease(key, tier, span, wait=True) as block:
        return block.bytes.clone().cpu()


def has_copy(store: TieredStore, key: str, tier: Tier) -> bool:
    """True when a copy is there, or on its way."""
    return bool(store._blocks.find(key).on(tier))


def send_home(store: TieredStore, key: str, span: tuple[int, int] | None = None) -> None:
    """Write back step by step, from whichever tier is dirty, and wait."""
    for tier in (Tier.GPU, Tier.RAM):
        if has_copy(store, key, tier) and store.is_dirty(key):
            store.write_back(key, tier, span, wait=True)
            store.settle(key)
