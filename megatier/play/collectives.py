"""The collectives of the queue `ranks`: all-gathers of weights, and reduce-scatters of gradients.

The homes of a rank have its shard of every unit, but compute needs whole weights and makes whole gradients:

- An all-gather takes each rank's shard, which comes to its GPU like any weights, and fills a slot for whole weights.
- A reduce-scatter takes the gradients of the groups that the ranks have computed. An all-to-all brings each rank the
  pieces of its own shard, which it adds in fp32 in the order of the groups. A single rank adds the same groups in the
  same order, so the sum has the same bits for any number of ranks.

All ranks have the same timeline, and the queue does its collectives in that order, one after the other. So no rank
waits for ever, as `player` proves.

Threads: the thread that computes hands gradients over; in a backward that is autograd's. All else runs on the queue's
thread.
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
"""Bytes of an element of a gradient that the compute dtype cannot hold without rounding."""


class Handover:
    """The handover of a group's gradient of a unit from compute to the queue `ranks`."""

    def __init__(self, planned: ReduceScatter) -> None:
        """Begin before compute has made the gradient."""
        self.planned = planned
        """The reduce-scatter that takes the gradient."""
        self.scattered: Transfer | None = None
        """The transfer of that reduce-scatter, once it is submitted."""
        self._latch = _native.Latch()
        self._computed: Transfer | None = None
        self._is_abandoned = False

    def give(self, computed: Transfer | None) -> None:
        """Hand the gradient over.

        Args:
            computed: the point in compute's stream after which it is there; None if compute is synchronous.
        """
        self._computed = computed
        self._latch.set()

    def abandon(self) -> None:
        """Say that the gradient will not come, unless it has. A second call does nothing."""
        if not self._latch.is_set():
            self._is_abandoned = True
        self._latch.set()

    @property
    def is_given(self) -> bool:
        """Whether the gradient was handed over."""
        return self._latch.is_set() and not self._is_abandoned

    def wait(self) -> None:
        """Wait for the gradient.

        Raises:
            StepAbandonedError: it will not come.
        """
        self._latch.wait()
        if self._is_abandoned:
            raise StepAbandonedError(GIVEN_UP)
        if self._computed is not None:
            self._computed.wait_on_stream()


class Collectives:
    """The collectives of one rank. It is a `GradSink`, as `UnitGradients` is for a single rank."""

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
            gradients: takes the gradients of this rank's shards.
            gate: counts the accesses of the pass that are over.
            recorder: records what the queue does.
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
        """The last reduce-scatter of each unit."""
        self._units_with_grads: set[str] = set()
        """The units for which compute has made a gradient in this step."""
        self._buffers: dict[str, tuple[Lease, int]] = {}
        """By unit, the GPU buffer in which compute makes its gradient, and the bytes of an element in it."""
        self._last: Transfer | None = None
        """The collective that was submitted last."""
        self._failure: Exception | None = None
        """The error after which the queue begins no collective."""
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

    def submit(self, planned: Load | ReduceScatter, shard_moves: Sequence[Transfer] = ()) -> Transfer:
        """Append a planned collective to the queue.

        Args:
            planned: a load, for which weights are gathered, or a reduce-scatter.
            shard_moves: for a load, the transfers that bring this rank's own shard and, if it is streamed, update it.
        """
        unit = planned.unit
        if isinstance(planned, Load):
            gather = partial(self._gather, unit, planned, shard_moves)
            return self._append(unit, gather, shard_moves)

        handover = Handover(planned)
        self._handovers[unit, planned.group] = handover
        scatter = partial(self._reduce_scatter, handover)
        handover.scattered = self._append(unit, scatter)
        return handover.scattered

    def wait(self) -> None:
        """Wait until every collective is over.

        Raises:
            MegatierError: one of them failed.
        """
        if self._last is not None:
            self._recorder.wait_until_done(self._last)

    def drop_left_out(self) -> None:
        """Drop the gradients of units that all ranks have left out of the step, so that they are not updated."""
        with self._recorder.waiting("ranks"):
            units_by_rank = self._ranks.all_gather_object(self._units_with_grads)
        units_of_any = set[str]().union(*units_by_rank)
        self._gradients.final &= units_of_any

    def pass_over(self) -> None:
        """Hand over zeros for the units that this rank has left out so far, because other ranks may use them."""
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
        """Give up collectives that wait for compute or for other ranks."""
        for handover in self._handovers.values():
            handover.abandon()

        # If none is under way, this rank can still join the next one, and need not give up.
        is_one_under_way = self._last is not None and not self._last.done()
        if is_one_under_way:
            self._ranks.give_up()

    def wait_for_end(self) -> None:
        """Wait until every collective has ended or failed."""
        if self._last is not None:
            self._last.wait_for_end()

    def release_all(self) -> None:
        """Release the buffers of a backward that failed, and drop their gradients."""
        while self._buffers:
            with self._store.consistency.change:
                # An interrupt between the two would leave a lease that nobody releases.
                _, (lease, _) = self._buffers.popitem()
                lease.release()

    def drop(self) -> None:
        """Drop all gradients of groups, which no queue may use any more."""
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

    def all_gather(self, unit: str) -> Transfer:
        """Gather a unit's weights on demand, while no timeline is known."""
        self._check_order(f"gather {unit}")
        gather = partial(self._gather, unit, None, ())
        return self._append(unit, gather)

    def acquire_grad_buffer(self, unit: str, *, fits: bool = False) -> torch.Tensor:
        """Return a GPU buffer for the whole unit's gradient of one group: uint8, contents unspecified.

        Args:
            unit: the unit.
            fits: whether the compute dtype holds the gradient without rounding; otherwise the buffer is for fp32.
        """
        schema = self._blocks.units[unit].schema
        width = schema.grad_width if fits else FP32_BYTES
        return self._take_buffer(unit, width)

    def submit_grad(self, unit: str, *, group: int) -> None:
        """Hand over a group's gradient for the reduce-scatter."""
        self._units_with_grads.add(unit)
        self._hand_over(unit, group)

    def sums_in_buffer(self, unit: str) -> bool:
        """Return False, because groups are added up after the all-to-all."""
        return False

    def _take_buffer(self, unit: str, width: int) -> torch.Tensor:
        """Lease a buffer for a unit's gradient of one group, after the unit's last reduce-scatter."""
        if self._failure is not None:
            raise self._failure

        # Other ranks may be a whole group behind, so that the queue still waits for them.
        with self._recorder.waiting(self._recorder.busy["ranks"]):
            last_scatter = self._last_scatters.pop(unit, None)
            if last_scatter is not None:
                last_scatter.wait_on_stream()

            # An interrupt between the two would leave a lease that nobody releases.
            with self._store.consistency.call:
                lease = self._store.lease(group_grad_key(unit), Tier.GPU, fresh=True, wait=True)
                self._buffers[unit] = lease, width
        num_bytes = self._grad_bytes(unit, width)
        return lease.bytes[:num_bytes]

    def _hand_over(self, unit: str, group: int) -> None:
        """Give the queue a finished gradient."""
        with self._store.consistency.change:
            lease, width = self._buffers.pop(unit)
            lease.release()
        computed = compute_point(self._store.clock, unit)

        last_access = len(self._pass.accesses) - 1
        scatter = ReduceScatter(unit=unit, group=group, after_access=last_access, width=width)
        self._pass.scatters.append(scatter)
        if self._pass.timeline is None:
            self._check_order(f"scatter {unit} {group} {width}")
            self.submit(scatter)

        handover = self._handovers.get((unit, group))
        if handover is None or handover.planned.width != width:
            raise TimelineError(
                f"{unit} has a gradient in group {group}, and step 1 had none there, or one made of fewer parts. "
                "Ranks exchange only the gradients that step 1 had: put an image into each batch of the first step."
            )
        handover.give(computed)
        if handover.scattered is not None:
            self._last_scatters[unit] = handover.scattered

    def _clear(self) -> None:
        """Forget the gradients of a pass."""
        self._handovers.clear()
        self._last_scatters.clear()

    def _grad_bytes(self, unit: str, width: int) -> int:
        """Return the bytes of a whole unit's gradient, with so many bytes for each element."""
        return self._ranks.size * self._blocks.units[unit].num_trained * width

    def _check_order(self, collective: str) -> None:
        """Check that all ranks come to the same collective, while the order is recorded.

        Raises:
            TimelineError: another rank does something else.
        """
        with self._recorder.waiting("ranks"):
            by_rank = self._ranks.all_gather_object(collective)
        for rank, other in enumerate(by_rank):
            if other != collective:
                raise TimelineError(
                    f"rank {self._ranks.rank} comes to {collective!r}, and rank {rank} to {other!r}. Ranks need the "
                    "same order of units: give the first step rows of the same kinds on all ranks, such as an image "
                    "each."
                )

    # ------------------------------------------------------------------ the queue's side

    def _append(self, unit: str, work: partial[None], shard_moves: Sequence[Transfer] = ()) -> Transfer:
        """Append an item to the queue, behind the transfers of this rank's own shard."""
        # `_gather` waits for these itself, because their errors stop all later collectives.
        collective = self.queue.submit(unit, 0, work, follows=shard_moves)
        self._last = collective
        self._recorder.watch(collective)
        return collective

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        """Run one collective. If it fails, no later one begins, because ranks would be at different ones.

        Raises:
            Exception: the error of an earlier collective.
        """
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except Exception as error:
            self._failure = error
            raise

    def _gather(self, unit: str, load: Load | None, shard_moves: Sequence[Transfer]) -> None:
        """All-gather a unit's weights into a GPU slot, when the shard and the slot are there."""
        busy = self._recorder.busy
        blocks = self._blocks
        try:
            with self._in_order():
                # The host waits for AdamW on the GPU too, because NCCL's kernel would occupy processors that it needs.
                for transfer in shard_moves:
                    transfer.wait()
                if load is not None:
                    busy["ranks"] = "slot"
                    blocks.make_room(load, self._gate)

                busy["ranks"] = "ranks"
                self._gather_now(unit)
        finally:
            # The next load may wait for the slot of the shard, even after an error.
            blocks.drop_shard(unit)

    def _gather_now(self, unit: str) -> None:
        """All-gather a unit's weights."""
        # The leases are for the collective alone. The whole weights stay in their slot until compute has used them.
        key = self._blocks.key(unit, Kind.WEIGHT)
        with (
            self._store.lease(key, Tier.GPU, wait=True) as shard_lease,
            self._store.lease(gathered_key(unit), Tier.GPU, fresh=True, wait=True) as whole,
        ):
            # Frozen weights lie behind the trained ones, in each shard and in the whole.
            num_ranks = self._ranks.size
            for start, stop in self._blocks.gathered_spans(unit):
                gathered = whole.bytes[num_ranks * start : num_ranks * stop]
                shard = shard_lease.bytes[start:stop]
                self._ranks.all_gather(gathered, shard)

    def _reduce_scatter(self, handover: Handover) -> None:
        """Reduce-scatter a group's gradient: an all-to-all, and then the sum of this rank's shard."""
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
                    with self._store.lease(group_grad_key(unit), Tier.GPU) as lease:
                        self._ranks.all_to_all(shards, lease.bytes[:num_bytes])

                    # Compute can make the next gradient in this slot while the shards are added up.
                    self._store.evict(group_grad_key(unit), Tier.GPU)
                    spare = received.bytes[num_bytes:]
                    self._add(scatter, shards, spare)
                self._store.evict(received_key(unit), Tier.GPU)
        except Exception:
            # Compute may wait for the slot. If it has not made this gradient, it makes no later one either.
            if handover.is_given:
                self._store.evict(group_grad_key(unit), Tier.GPU)
            raise

    def _add(self, scatter: ReduceScatter, received: torch.Tensor, spare: torch.Tensor) -> None:
        """Add the received pieces to the sum of this rank's shard."""
        unit = scatter.unit
        gradients = self._gradients
        last_group = self._blocks.policy.groups - 1

        # Row r comes from rank r, so the rows are in the order of the groups.
        shards = received.view(self._ranks.size, -1)

        # Asked first, because the unit has a gradient once the buffer is handed over.
        has_sum = not gradients.is_first(unit)
        total = gradients.acquire_grad_buffer(unit)
        self._optimizer.sums.sum_groups(
            unit,
            total,
            shards,
            spare,
            adds=has_sum,
            is_last=scatter.group == last_group,
        )

        # If this rank has left the unit out, it does not know yet whether another rank has a gradient.
        has_gradient = unit in self._units_with_grads
        gradients.submit_grad(unit, group=scatter.group, speculates=has_gradient)
