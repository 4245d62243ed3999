"""Train models larger than RAM on one GPU, or on several, at full precision, over three tiers: GPU, RAM and NVMe.

The public names are loaded when they are first used, because planning and `megatier --help` must not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatier.config.file import load
    from megatier.config.schema import RunConfig, TiersConfig, TrainConfig
    from megatier.errors import MegatierError
    from megatier.integrations.stream import stream
    from megatier.integrations.streamed import Streamed
    from megatier.store.lease import Lease
    from megatier.store.store import TieredStore
    from megatier.tier import BlockSpec, Kind, Tier
    from megatier.tiered_adamw.torch_optimizer import TieredAdamW, TieredMuon

__all__ = [
    "BlockSpec",
    "Kind",
    "Lease",
    "MegatierError",
    "RunConfig",
    "Streamed",
    "Tier",
    "TieredAdamW",
    "TieredMuon",
    "TieredStore",
    "TiersConfig",
    "TrainConfig",
    "load",
    "stream",
]

_HOMES = {
    "BlockSpec": "megatier.tier",
    "Kind": "megatier.tier",
    "Lease": "megatier.store.lease",
    "MegatierError": "megatier.errors",
    "RunConfig": "megatier.config.schema",
    "Streamed": "megatier.integrations.streamed",
    "Tier": "megatier.tier",
    "TieredAdamW": "megatier.tiered_adamw.torch_optimizer",
    "TieredMuon": "megatier.tiered_adamw.torch_optimizer",
    "TieredStore": "megatier.store.store",
    "TiersConfig": "megatier.config.schema",
    "TrainConfig": "megatier.config.schema",
    "load": "megatier.config.file",
    "stream": "megatier.integrations.stream",
}


def __getattr__(name: str) -> object:
    """Load a public name from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module 'megatier' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
