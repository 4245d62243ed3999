"""Hands gradients to the updates, from the buffers in which compute makes them.

From `take_grad` to `ship_grad`, compute has a buffer on the GPU for a unit's gradient. After that the gradient belongs
to `Updates`: it goes to RAM or NVMe, or stays, is added to those of other groups, and is applied.

Threads: all calls come from the thread that computes (autograd's, in a backward).
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
    """The gradients of the present step, as compute makes them."""

    def __init__(self, blocks: UnitBlocks, updates: Updates, moves: Moves, demand: Demand, recorder: Recorder) -> None:
        """Begin before the first step.

        Args:
            blocks: the run's blocks.
            updates: takes the gradients.
            moves: says what follows a gradient.
            demand: counts the bytes that move.
            recorder: notes what compute waits for.
        """
        self._blocks = blocks
        self._updates = updates
        self._moves = moves
        self._demand = demand
        self._recorder = recorder
        self.final: set[str] = set()
        """The units whose gradient of this step is final."""
        self._summed: set[str] = set()
        """Units that have handed over a group's gradient in this step."""
        self._buffers: dict[str, Lease] = {}
        """The GPU buffers in which compute makes gradients now, by unit."""

    def begin(self) -> None:
        """Forget the last step: a training pass begins, and no unit has a gradient yet."""
        self._summed.clear()
        self.final.clear()

    def is_first(self, unit: str) -> bool:
        """Return whether no group's gradient of this unit was handed over in this step."""
        return unit not in self._summed

    def take_grad(self, unit: str, *, fits: bool = False) -> torch.Tensor:
        """Return a GPU buffer for the unit's gradient of this group: uint8, contents unspecified unless `sums_here`."""
        # The sum was asked for when the unit was used. If that failed, the lease below asks again, and has the error.
        fresh = unit not in self._summed or not self.sums_here(unit)
        store = self._blocks.store
        with self._recorder.waiting("gpu_to_ram" if fresh else "ram_to_gpu"):
            fetch = self._updates.take_fetch(unit)
            if fetch is not None:
                fetch.wait_for_end()

            # An interrupt between the lease and its entry would leave a lease that nobody gives back.
            with store.consistency.call:
                lease = store.lease(grad_key(unit), Tier.GPU, fresh=fresh, wait=True)
                self._buffers[unit] = lease
        return lease.bytes

    def ship_grad(self, unit: str, *, group: int, speculates: bool = True) -> None:
        """Hand a group's gradient over; after the last group the unit's gradient is final.

        In the immediate mode its update starts at once.

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

        # The lease ends before the gradient is sent: sending evicts the GPU slot, and a lease forbids that.
        with self._blocks.store.consistency.change:
            self._buffers.pop(unit).release()

        # This gradient takes the place of the last group's, which has to be added up before.
        last_sum = self._updates.latest(unit) if group else None
        if last_sum is not None:
            self._recorder.wait_until_done(last_sum)

        # Sending may wait for a slot in RAM: until drives have taken the gradient before, or an update has used it.
        if gradient.shipped:
            spills = self._blocks.placement.grad_homes[unit] is Tier.NVME
            cause = "ram_to_nvme" if spills else self._updates.wait_cause
            with self._recorder.waiting(cause):
                self._blocks.grads.send(unit, final=gradient.is_final)
        if gradient.sums_in_ram:
            self._updates.submit_sum(unit, group)

        # After the sum: an update comes behind the sum of its unit that was submitted last.
        if gradient.update is not None:
            made = compute_point(self._blocks.store.clock, unit)
            if not self._blocks.policy.deferred:
                self._demand.add(self._moves.of(gradient.update))
                self._updates.submit(gradient.update, made)
            elif speculates:
                self._updates.submit_speculative(unit, made)

    def sums_here(self, unit: str) -> bool:
        """Return whether groups are added up on the GPU: the gradient is at home there, or RAM is too short for it."""
        return self._blocks.placement.sum_tier(unit) is Tier.GPU

    def fetch_sum(self, unit: str) -> None:
        """Start bringing the sum of the groups before to the GPU, if there is one: a backward will add to it."""
        if unit in self._summed:
            self._updates.submit_fetch(unit)

    def release_all(self) -> None:
        """Give back the buffers of a backward that was left half-way."""
        while self._buffers:
            with self._blocks.store.consistency.change:
                _, lease = self._buffers.popitem()
                lease.release()

    def drop(self) -> None:
        """Drop all gradients of a step that was given up. No queue may use them any more."""
        for unit in self._blocks.placement.grad_homes:
            self._blocks.grads.drop(unit)

    def forget(self) -> None:
        """Forget all buffers, because the store takes all slots back."""
        self._buffers.clear()
