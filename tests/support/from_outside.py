"""What tests see of a process, a store and its bytes without asking the store."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from megatier import _native
from megatier.store.residency import overlap
from megatier.store.store import TieredStore
from megatier.tier import Tier

FAULTS = Path(__file__).parents[1] / "faults"
"""Programs that run in processes of their own, and the shim that makes their drives misbehave."""
GRANULE_BYTES = 4096


def open_files() -> list[str]:
    """What every descriptor of this process points to."""
    targets = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            targets.append(str(entry.readlink()))
        except OSError:  # the descriptor of the listing itself
            continue
    return sorted(targets)


def threads() -> set[str]:
    """Every thread of this process, native ones too."""
    return {entry.name for entry in Path("/proc/self/task").iterdir()}


def pattern(seed: int, num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] that depends on the seed alone."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8))


def granule_checksums(region: torch.Tensor, granule_bytes: int) -> npt.NDArray[np.uint32]:
    """The C code's, of each granule of uint8 [n] on the CPU; the last may be shorter."""
    sizes = [(start, min(granule_bytes, region.numel() - start)) for start in range(0, region.numel(), granule_bytes)]
    return np.array([_native.checksum(region.data_ptr() + start, size) for start, size in sizes], dtype=np.uint32)


def probe(store: TieredStore, key: str) -> torch.Tensor:
    """The bytes at a block's home, read around the store: from its file, or by address."""
    block = store._blocks.find(key)
    if block.extent is None:
        copy = next(copy for copy in block.copies if copy.slot is None)
        view = store._copies.view(copy, copy.span)
        if view.is_cuda:
            return view.cpu()
        return torch.frombuffer(bytearray(ctypes.string_at(view.data_ptr(), view.numel())), dtype=torch.uint8)
    assert store.files is not None
    found = bytearray()
    for stripe in block.extent.stripes:
        file = os.open(store.files.paths[stripe.mount], os.O_RDONLY)
        found += os.pread(file, stripe.num_bytes, stripe.file_offset)
        os.close(file)
    return torch.frombuffer(found, dtype=torch.uint8)[: block.spec.num_bytes]


def check_invariants(store: TieredStore) -> None:
    """What holds at any moment of any store, whatever was done to it."""
    with store._copies.lock:
        copies = [copy for block in store._blocks.by_key.values() for copy in block.copies]
        slotted = [copy for copy in copies if copy.slot is not None]
        assert set(slotted) == set(store._copies._slotted)
        assert len({id(copy.slot) for copy in slotted}) == len(slotted), "a slot has two occupants"
        for pool in store._reservation._pools.values():
            taken = [copy.slot for copy in slotted if copy.slot is not None and copy.slot.pool is pool]
            assert len(taken) + pool.num_free == pool.num_slots, "a slot was lost, or given back twice"
            assert not set(taken) & set(pool._free)
        for copy in copies:
            assert copy.num_leases >= 0
            assert not (copy.num_leases and copy.is_evicted)
            assert copy.slot is None or copy.span[1] - copy.span[0] <= copy.slot.num_bytes
            for marks in (copy.fills, copy.unwritten):
                assert all(copy.holds(span) for span in marks)
                assert disjoint(list(marks))
        for block in store._blocks.by_key.values():
            for tier in (Tier.GPU, Tier.RAM):
                assert disjoint([copy.span for copy in block.on(tier)])
            unsafe = [span for copy in block.copies for span in copy.unwritten if copy.unsafe(span)]
            assert disjoint(unsafe), "two tiers claim the newest bytes"
            if block.spec.home is not None:
                valid = [span for spans in block.residency().values() for span in spans]
                arriving = [span for copy in block.copies for span in copy.fills]
                assert not missing(block.whole, valid + arriving), "bytes are nowhere"
    for tier in (Tier.GPU, Tier.RAM):
        usage = store.usage(tier)
        assert sum(size for name, size in usage.items() if name != "budget") <= usage["budget"]


def disjoint(spans: list[tuple[int, int]]) -> bool:
    """True when no two spans share a byte."""
    return not any(overlap(a, b) for i, a in enumerate(spans) for b in spans[i + 1 :])


def missing(whole: tuple[int, int], spans: list[tuple[int, int]]) -> int:
    """Bytes of `whole` in none of the spans."""
    covered = np.zeros(whole[1], dtype=bool)
    for start, stop in spans:
        covered[start:stop] = True
    return int((~covered).sum())
