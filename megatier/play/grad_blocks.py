"""The blocks of gradients: how they move from the GPU to the tier where they wait for the update, and are leased there.

A trained unit has one block for its gradient of a group. If groups are summed in RAM, the sum has a block of its own.
Then the sum has the home, and gradients pass through slots.

Threads: the thread that computes sends gradients. The update queues lease and read them.
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
    """The gradient blocks of all trained units."""

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
        """Register the block of a unit's gradient, and that of its sum if groups are summed in RAM."""
        home = self._placement.grad_homes[unit]
        spec = self._units[unit]
        size = grad_bytes(spec, self._policy)
        if self.sums_in_ram(unit):
            # The sum has the home, and gradients of groups pass through slots.
            total = BlockSpec(sum_key(unit), size, home, Kind.GRAD)
            self._store.register(total)
            home = None

        gradient = BlockSpec(grad_key(unit), size, home, Kind.GRAD)
        self._store.register(gradient)

    def sums_in_ram(self, unit: str) -> bool:
        """Return whether several groups are summed in RAM, and not on the GPU."""
        return self._policy.groups > 1 and self._placement.sum_tier(unit) is Tier.RAM

    def send(self, unit: str, *, final: bool) -> None:
        """Start to move a gradient from its GPU slot to its home or slot in RAM, or to NVMe. It may wait for RAM slots.

        A final gradient that was summed and rounded on the GPU fills only the front of its block.
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
            # Each chunk goes on to NVMe before the next one comes, because all may have to share one slot in RAM. The
            # evicted slot is free as soon as its bytes are written.
            chunk = self._placement.chunk_elements
            num_elements = max(chunk, updated_at_once(spec, chunk))
            step_bytes = num_elements * spec.schema.grad_width
            for start in range(0, num_bytes, step_bytes):
                span = start, min(start + step_bytes, num_bytes)
                self._store.write_back(key, Tier.GPU, span, wait=True)
                self._store.write_back(key, Tier.RAM, span)
                self._store.evict(key, Tier.RAM, span)

        # The slot is free at once, because the next gradient is ordered behind the copies from it.
        self._store.evict(key, Tier.GPU)

    @contextlib.contextmanager
    def open(self, unit: str, elements: Elements) -> Iterator[torch.Tensor]:
        """Lease a run of the final gradient, uint8 in the dtype of the unit's weights.

        A sum over groups was rounded into the front of its block.
        """
        home = self._placement.grad_homes[unit]
        span = self.span(unit, elements)
        key = sum_key(unit) if self.sums_in_ram(unit) else grad_key(unit)

        # Without a home the whole gradient is in one slot.
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

        # A final gradient is read once, so its slot can be freed.
        if home is Tier.NVME:
            self._store.evict(key, Tier.RAM, span)

    def free(self, unit: str) -> None:
        """Drop a gradient without a home after its update, to make room for the next one."""
        if self._policy.groups == 1 and self._placement.grad_homes[unit] is None:
            self._store.evict(grad_key(unit), Tier.RAM)

    def drop(self, unit: str) -> None:
        """Drop a gradient of a step that was given up from all slots. No update or sum of it may be under way."""
        key = grad_key(unit)
        home = None if self.sums_in_ram(unit) else self._placement.grad_homes[unit]
        for tier in (Tier.GPU, Tier.RAM):
            if home is tier:
                continue

            # If a write failed, the copy stays, and its next write raises the error.
            with contextlib.suppress(TransferError):
                self._store.discard(key, tier)

    def span(self, unit: str, elements: Elements) -> tuple[int, int]:
        """Return the bytes of a run of elements in the final gradient."""
        spec = self._units[unit]
        first, end = elements
        width = spec.schema.grad_width
        start = first * width

        # On NVMe a block is padded to whole granules, and the last run includes the padding.
        is_last = end == spec.num_trained
        if is_last and self._placement.grad_homes[unit] is Tier.NVME:
            return start, final_grad_bytes(spec, self._policy)
        return start, end * width


def grad_key(unit: str) -> str:
    """Return the key of a unit's gradient."""
    return f"{unit}/{Kind.GRAD}"


def sum_key(unit: str) -> str:
    """Return the key of the fp32 sum of a unit's gradients in RAM."""
    return f"{unit}/{Kind.GRAD}_sum"
