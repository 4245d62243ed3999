"""The gradients of units, on their way from compute to the updates.

From `acquire_grad_buffer` to `submit_grad` compute has a buffer on the GPU for a unit's gradient. Then the gradient
belongs to `Updates`. It goes to RAM or NVMe or stays on the GPU, is added to the gradients of other groups, and is
applied.

Threads: only the thread that computes calls these methods; in a backward that is autograd's.
"""

from __future__ import annotations

import torch

from megatier.play.grad_blocks import grad_key
from megatier.play.unit_blocks import UnitBlocks
from megatier.play.updates import Updates
from megatier.schedule.demand import Demand
from megatier.schedule.moves import Moves
from megatier.store.lease import Lease
from megatier.store.transfer import compute_point
from megatier.tier import Tier
from megatier.trace.recorder import Recorder


class UnitGradients:
    """The gradients of the current step."""

    def __init__(self, blocks: UnitBlocks, updates: Updates, moves: Moves, demand: Demand, recorder: Recorder) -> None:
        """Begin before the first step.

        Args:
            blocks: the run's blocks.
            updates: takes the gradients.
            moves: says what follows a gradient.
            demand: adds up the bytes that move.
            recorder: records what compute waits for.
        """
        self._blocks = blocks
        self._updates = updates
        self._moves = moves
        self._demand = demand
        self._recorder = recorder
        self.final: set[str] = set()
        """The units whose gradient of this step is final."""
        self._summed: set[str] = set()
        """The units with at least one group's gradient in this step."""
        self._buffers: dict[str, Lease] = {}
        """By unit, the GPU buffer in which compute makes its gradient."""

    def begin(self) -> None:
        """Begin a training pass, in which no unit has a gradient yet."""
        self._summed.clear()
        self.final.clear()

    def is_first(self, unit: str) -> bool:
        """Return whether the unit has no group's gradient yet in this step."""
        return unit not in self._summed

    def acquire_grad_buffer(self, unit: str, *, fits: bool = False) -> torch.Tensor:
        """Return a GPU buffer, uint8, for the unit's gradient of this group.

        Its contents are unspecified unless `sums_in_buffer`.
        """
        # The sum was requested at the use of the unit. If that failed, the lease below requests it again, and raises.
        fresh = unit not in self._summed or not self.sums_in_buffer(unit)
        store = self._blocks.store
        with self._recorder.waiting("gpu_to_ram" if fresh else "ram_to_gpu"):
            fetch = self._updates.take_fetch(unit)
            if fetch is not None:
                fetch.wait_for_end()

            # An interrupt between the two would leave a lease that nobody releases.
            with store.consistency.call:
                lease = store.lease(grad_key(unit), Tier.GPU, fresh=fresh, wait=True)
                self._buffers[unit] = lease
        return lease.bytes

    def submit_grad(self, unit: str, *, group: int, speculates: bool = True) -> None:
        """Hand over a group's gradient. After the last group the unit's gradient is final.

        In the immediate mode its update starts then.

        Args:
            unit: the unit.
            group: the group.
            speculates: whether the unit may be updated before the norm is known, if this pass speculates.
        """
        gradient = self._moves.gradient(unit, group)
        self._demand.add((*gradient.fetched, *gradient.shipped))
        self._summed.add(unit)
        if gradient.is_final:
            self.final.add(unit)

        # Released before the gradient is sent, because sending evicts the GPU slot.
        with self._blocks.store.consistency.change:
            self._buffers.pop(unit).release()

        # The last group's gradient, which this one replaces, has to be added up before.
        last_sum = self._updates.latest(unit) if group else None
        if last_sum is not None:
            self._recorder.wait_until_done(last_sum)

        # Sending may wait for a slot in RAM, until drives or an update have taken an earlier gradient.
        if gradient.shipped:
            spills = self._blocks.placement.grad_homes[unit] is Tier.NVME
            cause = "ram_to_nvme" if spills else self._updates.wait_cause
            with self._recorder.waiting(cause):
                self._blocks.grads.send(unit, final=gradient.is_final)
        if gradient.sums_in_ram:
            self._updates.submit_sum(unit, group)

        # The sum is submitted before the update, which follows the unit's last sum.
        if gradient.update is not None:
            computed = compute_point(self._blocks.store.clock, unit)
            if not self._blocks.policy.deferred:
                self._demand.add(self._moves.of(gradient.update))
                self._updates.submit(gradient.update, computed)
            elif speculates:
                self._updates.submit_speculative(unit, computed)

    def sums_in_buffer(self, unit: str) -> bool:
        """Return whether groups are added up on the GPU, because of the gradient's home or for want of RAM."""
        return self._blocks.placement.sum_tier(unit) is Tier.GPU

    def fetch_sum(self, unit: str) -> None:
        """Start to bring the sum of the groups before to the GPU, if there is one, for a backward that adds to it."""
        if unit in self._summed:
            self._updates.submit_fetch(unit)

    def release_all(self) -> None:
        """Release the buffers of a backward that failed."""
        while self._buffers:
            with self._blocks.store.consistency.change:
                _, lease = self._buffers.popitem()
                lease.release()

    def drop(self) -> None:
        """Drop all gradients of a step that was given up, which no queue may use any more."""
        for unit in self._blocks.placement.grad_homes:
            self._blocks.grads.drop(unit)

    def forget(self) -> None:
        """Forget all buffers, because the store takes all slots back."""
        self._buffers.clear()
