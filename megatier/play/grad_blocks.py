"""Moves gradients from the GPU to the tier where they wait for their update, and leases them.

A unit that is trained has one block for its gradient of a group. If gradients of several groups are added up in RAM,
the sum has a block of its own. The sum then has the home, and gradients merely pass through slots.

Threads: the thread that computes sends gradients. The queues that update lease and read them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from megatier.errors import TransferError
from megatier.planes import Elements
from megatier.schedule.placement import Placement
from megatier.schedule.policy import Policy
from megatier.schedule.sizes import final_grad_bytes, grad_bytes, updated_at_once
from megatier.schedule.unit_spec import UnitSpec
from megatier.store.store import TieredStore
from megatier.tier import BlockSpec, Kind, Tier


class GradBlocks:
    """The gradient blocks of all units that are trained."""

    def __init__(self, store: TieredStore, units: Mapping[str, UnitSpec], placement: Placement, policy: Policy) -> None:
        """Begin with nothing registered.

        Args:
            store: holds the blocks.
            units: sizes of every unit, by name.
            placement: the homes of gradients, and where sums are taken.
            policy: groups.
        """
        self._store = store
        self._units = units
        self._placement = placement
        self._policy = policy

    def register(self, unit: str) -> None:
        """Register the blocks of a unit's gradient and, if it is taken in RAM, of its sum over groups."""
        home = self._placement.grad_homes[unit]
        spec = self._units[unit]
        size = grad_bytes(spec, self._policy)
        if self.sums_in_ram(unit):
            # The sum takes the home, and the gradient of each group merely passes through slots.
            total = BlockSpec(sum_key(unit), size, home, Kind.GRAD)
            self._store.register(total)
            home = None

        gradient = BlockSpec(grad_key(unit), size, home, Kind.GRAD)
        self._store.register(gradient)

    def sums_in_ram(self, unit: str) -> bool:
        """Return whether the gradients of several groups are added up in RAM; else that is done on the GPU."""
        return self._policy.groups > 1 and self._placement.sum_tier(unit) is Tier.RAM

    def send(self, unit: str, *, final: bool) -> None:
        """Start taking a gradient from its GPU slot to its home or slot in RAM, or to NVMe; waits for RAM slots.

        A final gradient that was added up on the GPU, and rounded there, is only the front of its block.
        """
        key = grad_key(unit)
        spec = self._units[unit]
        is_front = final and self._placement.sum_tier(unit) is Tier.GPU
        bytes_of = final_grad_bytes if is_front else grad_bytes
        num_bytes = bytes_of(spec, self._policy)
        whole = 0, num_bytes
        self._store.mark_dirty(key, Tier.GPU, whole)

        if self._placement.grad_homes[unit] is not Tier.NVME:
            self._store.write_back(key, Tier.GPU, whole, wait=True)
        else:
            # Chunk by chunk, and each one leaves for NVMe before the next comes: all of them may have to share one slot
            # in RAM. Evicting now means that a slot is free as soon as its bytes are written.
            chunk = self._placement.chunk_elements
            num_elements = max(chunk, updated_at_once(spec, chunk))
            step_bytes = num_elements * spec.schema.grad_width
            for start in range(0, num_bytes, step_bytes):
                span = start, min(start + step_bytes, num_bytes)
                self._store.write_back(key, Tier.GPU, span, wait=True)
                self._store.write_back(key, Tier.RAM, span)
                self._store.evict(key, Tier.RAM, span)

        # The slot is free at once: the next gradient comes behind the copies from it.
        self._store.evict(key, Tier.GPU)

    @contextlib.contextmanager
    def open(self, unit: str, elements: Elements) -> Iterator[torch.Tensor]:
        """Lease a run of the final gradient, uint8 in the dtype of the unit's weights.

        A sum over groups was rounded into the front of its block.
        """
        home = self._placement.grad_homes[unit]
        span = self.span(unit, elements)
        key = sum_key(unit) if self.sums_in_ram(unit) else grad_key(unit)

        # Without a home the gradient lies in one slot, whole.
        if home is None:
            start, stop = span
            with self._store.lease(key, Tier.RAM) as lease:
                yield lease.bytes[start:stop]
            return

        # The span may have padding at its end.
        first, end = elements
        width = self._units[unit].schema.grad_width
        num_bytes = (end - first) * width
        tier = Tier.GPU if home is Tier.GPU else Tier.RAM
        with self._store.lease(key, tier, span, wait=True) as lease:
            yield lease.bytes[:num_bytes]

        # A final gradient is read once, so nobody needs its slot any more.
        if home is Tier.NVME:
            self._store.evict(key, Tier.RAM, span)

    def free(self, unit: str) -> None:
        """Drop a gradient that lies in a slot alone, after its update, so that the next one finds room."""
        if self._policy.groups == 1 and self._placement.grad_homes[unit] is None:
            self._store.evict(grad_key(unit), Tier.RAM)

    def drop(self, unit: str) -> None:
        """Drop a gradient of a step that was given up from all slots. No update and no sum of it is under way."""
        key = grad_key(unit)
        home = None if self.sums_in_ram(unit) else self._placement.grad_homes[unit]
        for tier in (Tier.GPU, Tier.RAM):
            if home is tier:
                continue

            # If a write of it failed, it stays, and its next write raises the error.
            with contextlib.suppress(TransferError):
                self._store.discard(key, tier)

    def span(self, unit: str, elements: Elements) -> tuple[int, int]:
        """Return the bytes of a run of elements in the final gradient."""
        spec = self._units[unit]
        first, end = elements
        width = spec.schema.grad_width
        start = first * width

        # On NVMe a block is padded to whole granules, and the last run has the padding as well.
        is_last = end == spec.num_trained
        if is_last and self._placement.grad_homes[unit] is Tier.NVME:
            return start, final_grad_bytes(spec, self._policy)
        return start, end * width


def grad_key(unit: str) -> str:
    """Return the name of a unit's gradient, of one group or whole."""
    return f"{unit}/{Kind.GRAD}"


def sum_key(unit: str) -> str:
    """Return the name of the fp32 sum of a unit's gradients over groups in RAM."""
    return f"{unit}/{Kind.GRAD}_sum"
