"""Gathers whole weights from the shards of all ranks, and scatters whole gradients to their owners.

A rank's homes hold its shard of every unit. Compute needs units whole, and makes whole gradients. So the queue `ranks`
stands between the two:

- It gathers. A rank's own shard comes to its GPU like any weights, and from there to the GPUs of all ranks, into slots
  for whole weights.
- It scatters. Each rank has computed another group of the step. Every rank gets of all these gradients what belongs to
  its shard, and adds them in fp32 in the order of the groups. The sum has the same bits however many ranks
  there are, because one rank alone adds the same groups in the same order.

All ranks have the same timeline, and the queue works on its loads and scatters in their order, one after the other. So
no rank waits for ever, as `player` proves.

Threads: compute hands gradients over (autograd's thread, in a backward). Everything else runs on the queue's thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from megatier import _native
from megatier.errors import StepAbandonedError, TimelineError
from megatier.play.gate import GIVEN_UP, Gate
from megatier.play.gradients import UnitGradients
from megatier.play.optimizer_protocol import Optimizer
from megatier.play.passes import Pass
from megatier.play.unit_blocks import UnitBlocks, gathered_key, group_grad_key, received_key
from megatier.ranks.ranks import Ranks
from megatier.schedule.timeline import Load, ReduceScatter
from megatier.store.lease import Lease
from megatier.store.queue import Queue
from megatier.store.transfer import Transfer, compute_point
from megatier.tier import Kind, Tier
from megatier.trace.recorder import Recorder

FP32_BYTES = 4
"""Bytes of an element of a gradient that the compute dtype would round."""


class Handover:
    """A group's gradient of a unit, on its way from compute to the queue `ranks`."""

    def __init__(self, planned: ReduceScatter) -> None:
        """Begin before compute has made it."""
        self.planned = planned
        """The scatter that takes it."""
        self.scattered: Transfer | None = None
        """The queue's item that does so, once it was submitted."""
        self._latch = _native.Latch()
        self._made: Transfer | None = None
        self._is_abandoned = False

    def give(self, made: Transfer | None) -> None:
        """Hand the gradient over.

        Args:
            made: the point of compute that made it; None if compute is synchronous.
        """
        self._made = made
        self._latch.set()

    def abandon(self) -> None:
        """Say that it will not come, unless it has. It may be said again."""
        if not self._latch.is_set():
            self._is_abandoned = True
        self._latch.set()

    @property
    def is_given(self) -> bool:
        """Whether it was handed over."""
        return self._latch.is_set() and not self._is_abandoned

    def wait(self) -> None:
        """Wait until it is there.

        Raises:
            StepAbandonedError: it will not come.
        """
        self._latch.wait()
        if self._is_abandoned:
            raise StepAbandonedError(GIVEN_UP)
        if self._made is not None:
            self._made.wait_on_stream()


class Collectives:
    """The gathers and scatters of one rank. A `GradSink`, as `UnitGradients` is for a rank that is alone."""

    def __init__(
        self,
        ranks: Ranks,
        blocks: UnitBlocks,
        optimizer: Optimizer,
        gradients: UnitGradients,
        gate: Gate,
        recorder: Recorder,
    ) -> None:
        """Start the queue `ranks`.

        Args:
            ranks: the ranks of the run.
            blocks: the run's blocks.
            optimizer: adds gradients.
            gradients: takes those of this rank's shards.
            gate: counts the accesses of the pass that are over.
            recorder: knows what the queue is at.
        """
        self._ranks = ranks
        self._blocks = blocks
        self._store = blocks.store
        self._optimizer = optimizer
        self._gradients = gradients
        self._gate = gate
        self._recorder = recorder
        self._pass = Pass("")
        self._handovers: dict[tuple[str, int], Handover] = {}
        """The gradients that this pass hands over, by unit and group."""
        self._last_scatters: dict[str, Transfer] = {}
        """The scatter of the gradient that each unit handed over last."""
        self._units_with_grads: set[str] = set()
        """The units of which compute has made a gradient in this step."""
        self._buffers: dict[str, tuple[Lease, int]] = {}
        """The GPU buffers in which compute makes gradients now, by unit, and the bytes of an element in each."""
        self._last: Transfer | None = None
        """The collective that was submitted last."""
        self._failure: Exception | None = None
        """Why the queue comes to no collective any more."""
        self.queue = Queue("ranks", blocks.store.clock)
        """The queue `ranks`."""
        recorder.busy["ranks"] = "ranks"

    # ------------------------------------------------------------------ the player's side

    def begin(self, played: Pass) -> None:
        """Begin a pass."""
        self._pass = played
        self._clear()
        if played.trains:
            self._units_with_grads.clear()

    def submit(self, planned: Load | ReduceScatter, own: Sequence[Transfer] = ()) -> Transfer:
        """Append a planned collective to the queue.

        Args:
            planned: a load to gather for, or a scatter.
            own: for a load, the items that bring this rank's own shard and, if it is streamed, update it.
        """
        unit = planned.unit
        if isinstance(planned, Load):
            gather = partial(self._gather, unit, planned, own)
            return self._append(unit, gather, own)

        handover = Handover(planned)
        self._handovers[unit, planned.group] = handover
        scatter = partial(self._scatter, handover)
        handover.scattered = self._append(unit, scatter)
        return handover.scattered

    def wait(self) -> None:
        """Wait until every collective is over.

        Raises:
            MegatierError: what stopped one of them.
        """
        if self._last is not None:
            self._recorder.wait_until_done(self._last)

    def drop_left_out(self) -> None:
        """Forget the gradients of units that every rank has left out of the step: they are not updated."""
        with self._recorder.waiting("ranks"):
            units_by_rank = self._ranks.all_gather_object(self._units_with_grads)
        units_of_any = set[str]().union(*units_by_rank)
        self._gradients.final &= units_of_any

    def pass_over(self) -> None:
        """Hand over zeros for what this rank left out of a group, as far as the pass has come: others may use it."""
        played = self._pass
        if played.timeline is None or not played.left_out or not played.trains:
            return

        # An earlier call may have handed some of them over.
        handed_over = {(scatter.unit, scatter.group) for scatter in played.scatters}
        missing = played.left_out - handed_over
        num_over = len(played.accesses)
        for item in played.timeline.items:
            if not isinstance(item, ReduceScatter) or item.after_access >= num_over:
                continue
            if (item.unit, item.group) in missing:
                self._take_buffer(item.unit, item.width).zero_()
                self._hand_over(item.unit, item.group)

    def abandon(self) -> None:
        """Give up what waits for compute, or for other ranks."""
        # If the queue is at none, this rank can come to the next one with the others, and need not give up.
        for handover in self._handovers.values():
            handover.abandon()

        is_at_one = self._last is not None and not self._last.done()
        if is_at_one:
            self._ranks.give_up()

    def wait_for_end(self) -> None:
        """Wait until every collective has ended, well or not."""
        if self._last is not None:
            self._last.wait_for_end()

    def release_all(self) -> None:
        """Give back the buffers of a backward that was left half-way, and drop what was not scattered."""
        while self._buffers:
            with self._store.consistency.change:
                # An interrupt between these two would leave a lease that nobody ends, so it tears the state.
                _, (lease, _) = self._buffers.popitem()
                lease.release()

    def drop(self) -> None:
        """Drop all gradients of groups. No queue may use them any more."""
        for unit in self._blocks.placement.grad_homes:
            self._store.evict(group_grad_key(unit), Tier.GPU)
            self._store.evict(received_key(unit), Tier.GPU)

    def forget(self) -> None:
        """Forget the pass and all buffers, because the store takes all slots back."""
        self._pass = Pass("")
        self._clear()
        self._buffers.clear()
        self._last = None

    # ------------------------------------------------------------------ compute's side

    def gather(self, unit: str) -> Transfer:
        """Gather a unit's weights on demand, because no timeline says when."""
        self._check_order(f"gather {unit}")
        gather = partial(self._gather, unit, None, ())
        return self._append(unit, gather)

    def take_grad(self, unit: str, *, fits: bool = False) -> torch.Tensor:
        """Return a GPU buffer for the whole unit's gradient of one group: uint8, contents unspecified.

        Args:
            unit: the unit.
            fits: whether the buffer is for elements of the compute dtype, which lose nothing; else it is for fp32.
        """
        schema = self._blocks.units[unit].schema
        width = schema.grad_width if fits else FP32_BYTES
        return self._take_buffer(unit, width)

    def ship_grad(self, unit: str, *, group: int) -> None:
        """Hand over the gradient of a group, of which every rank gets its shard."""
        self._units_with_grads.add(unit)
        self._hand_over(unit, group)

    def sums_here(self, unit: str) -> bool:
        """Return False: groups are added up when the shards of all ranks are there."""
        return False

    def _take_buffer(self, unit: str, width: int) -> torch.Tensor:
        """Lease a buffer for a unit's gradient of one group, once the one before was scattered from it."""
        if self._failure is not None:
            raise self._failure

        # Other ranks may be a whole group behind, and then the queue waits for them with that gradient.
        with self._recorder.waiting(self._recorder.busy["ranks"]):
            last_scatter = self._last_scatters.pop(unit, None)
            if last_scatter is not None:
                last_scatter.wait_on_stream()

            # An interrupt between the lease and its entry would leave a lease that nobody gives back.
            with self._store.consistency.call:
                lease = self._store.lease(group_grad_key(unit), Tier.GPU, fresh=True, wait=True)
                self._buffers[unit] = lease, width
        num_bytes = self._grad_bytes(unit, width)
        return lease.bytes[:num_bytes]

    def _hand_over(self, unit: str, group: int) -> None:
        """Give the queue a gradient that is made."""
        with self._store.consistency.change:
            lease, width = self._buffers.pop(unit)
            lease.release()
        made = compute_point(self._store.clock, unit)

        last_access = len(self._pass.accesses) - 1
        scatter = ReduceScatter(unit=unit, group=group, after_access=last_access, width=width)
        self._pass.scatters.append(scatter)
        if self._pass.timeline is None:
            self._check_order(f"scatter {unit} {group} {width}")
            self.submit(scatter)

        handover = self._handovers.get((unit, group))
        if handover is None or handover.planned.width != width:
            raise TimelineError(
                f"{unit} has a gradient in group {group}, and had none in step 1, or one that was made of fewer parts. "
                "Ranks scatter what the first step has: put an image into each batch of the first step."
            )
        handover.give(made)
        if handover.scattered is not None:
            self._last_scatters[unit] = handover.scattered

    def _clear(self) -> None:
        """Forget the gradients of a pass."""
        self._handovers.clear()
        self._last_scatters.clear()

    def _grad_bytes(self, unit: str, width: int) -> int:
        """Return the bytes of a whole unit's gradient, with so many bytes for each element."""
        return self._ranks.size * self._blocks.units[unit].num_trained * width

    def _check_order(self, what: str) -> None:
        """Compare what this rank does next with the others, while the order is recorded.

        Raises:
            TimelineError: another rank does something else.
        """
        with self._recorder.waiting("ranks"):
            by_rank = self._ranks.all_gather_object(what)
        for rank, other in enumerate(by_rank):
            if other != what:
                raise TimelineError(
                    f"rank {self._ranks.rank} comes to {what!r}, and rank {rank} to {other!r}. Ranks need the same "
                    "order of units: give the first step rows of the same kinds on all ranks, such as an image each."
                )

    # ------------------------------------------------------------------ the queue's side

    def _append(self, unit: str, work: partial[None], own: Sequence[Transfer] = ()) -> Transfer:
        """Append an item to the queue, behind what brings and updates this rank's own shard, if anything does."""
        # `_gather` waits for them itself, because their errors are to close the queue to all that come after.
        collective = self.queue.submit(unit, 0, work, follows=own)
        self._last = collective
        self._recorder.watch(collective)
        return collective

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        """Surround one collective. If it fails, none after it begins: ranks would be at different ones.

        Raises:
            Exception: why one before it failed.
        """
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except Exception as error:
            self._failure = error
            raise

    def _gather(self, unit: str, load: Load | None, own: Sequence[Transfer]) -> None:
        """Bring a unit's whole weights to a GPU slot."""
        busy = self._recorder.busy
        blocks = self._blocks
        try:
            with self._in_order():
                # AdamW on the GPU is waited for as well: NCCL's kernel would spin on processors that AdamW needs.
                for transfer in own:
                    transfer.wait()
                if load is not None:
                    busy["ranks"] = "slot"
                    blocks.make_room(load, self._gate)

                busy["ranks"] = "ranks"
                self._gather_now(unit)
        finally:
            # The next load may need the slot of the shard, also if it fails for the same reason.
            blocks.drop_shard(unit)

    def _gather_now(self, unit: str) -> None:
        """Gather a unit's weights, of which this rank's shard has come."""
        # Leased for the collective alone: the shard's slot goes to the next unit, and the whole stays until compute has
        # used it.
        key = self._blocks.key(unit, Kind.WEIGHT)
        with (
            self._store.lease(key, Tier.GPU, wait=True) as own,
            self._store.lease(gathered_key(unit), Tier.GPU, fresh=True, wait=True) as whole,
        ):
            # Frozen weights lie behind the trained ones in each shard, and behind all trained ones in the whole.
            num_ranks = self._ranks.size
            for start, stop in self._blocks.gathered_spans(unit):
                gathered = whole.bytes[num_ranks * start : num_ranks * stop]
                shard = own.bytes[start:stop]
                self._ranks.all_gather(gathered, shard)

    def _scatter(self, handover: Handover) -> None:
        """Send a group's gradient to the owners of its shards, and add what comes of this rank's shard to its sum."""
        scatter = handover.planned
        unit = scatter.unit
        try:
            with self._in_order():
                self._recorder.busy["ranks"] = "compute"
                self._gradients.fetch_sum(unit)
                handover.wait()

                self._recorder.busy["ranks"] = "ranks"
                num_bytes = self._grad_bytes(unit, scatter.width)
                with self._store.lease(received_key(unit), Tier.GPU, fresh=True, wait=True) as received:
                    shards = received.bytes[:num_bytes]
                    with self._store.lease(group_grad_key(unit), Tier.GPU) as made:
                        self._ranks.all_to_all(shards, made.bytes[:num_bytes])

                    # At once, so that compute can make the next gradient while the shards are added up.
                    self._store.evict(group_grad_key(unit), Tier.GPU)
                    spare = received.bytes[num_bytes:]
                    self._add(scatter, shards, spare)
                self._store.evict(received_key(unit), Tier.GPU)
        except Exception:
            # Compute may wait for the slot. If it has not made this gradient yet, it makes none after it.
            if handover.is_given:
                self._store.evict(group_grad_key(unit), Tier.GPU)
            raise

    def _add(self, scatter: ReduceScatter, received: torch.Tensor, spare: torch.Tensor) -> None:
        """Add what came from all ranks to the sum of this rank's shard."""
        unit = scatter.unit
        gradients = self._gradients
        last_group = self._blocks.policy.groups - 1

        # Each rank sent its part at the place of its number, so the rows are in the order of the groups.
        shards = received.view(self._ranks.size, -1)

        # Asked before the buffer is taken and handed over, after which a group's gradient is there.
        has_sum = not gradients.is_first(unit)
        total = gradients.take_grad(unit)
        self._optimizer.sums.sum_groups(
            unit,
            total,
            shards,
            spare,
            adds=has_sum,
            is_last=scatter.group == last_group,
        )

        # If this rank left the unit out, it does not know yet whether any rank has a gradient of it.
        has_gradient = unit in self._units_with_grads
        gradients.ship_grad(unit, group=scatter.group, speculates=has_gradient)
