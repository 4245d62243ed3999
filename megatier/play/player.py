"""The player: it plays the timeline of each pass on the queues, and records what happened.

The engine begins and ends passes. `UnitWeights` loads weights ahead of compute and lends them to it. `UnitGradients`
takes gradients from compute, and hands them to `Updates`, which has queues of its own.

Nothing deadlocks. To see this, number the accesses of a pass, and look at what each thread waits for. The order of a
timeline's items keeps four rules, and each queue does its items in that order. The points below call them rule 1 to
rule 4, as the docstring of `Timeline` does.

1. When a pass begins, no thread waits at the gate, because each access of the pass before has waited for its load and
   its unit's update, and a pass that did not end is cancelled. So the gate may be reset.
2. If no order is recorded, all due updates are finished first. Then each access loads its own weights, and waits only
   for slots and queues.
3. If an order is recorded, all items are handed to the queues before the first access, or before the first access that
   is planned anew (`UnitWeights.begin_leg`). So access k only waits for work that a queue already has.
4. Access k waits for the items that serve it or an earlier access. By rules 1 and 2 all items before these wait only
   for accesses before k. So the earliest waiting access always gets what it waits for. By rule 3 no access waits for an
   exchange. Updates also wait for gradients of the last step, which are there, and for readers on the queue
   `checkpoint`, which waits only for drives.
5. Slots cause no cycle. For weights on the GPU, a load evicts the unit that the timeline names, after that unit's
   access. RAM slots are leased only while bytes move or AdamW runs, and bytes that were read ahead give way. For
   gradients on the GPU, a slot is free when the copy to RAM is submitted. A RAM slot for that copy waits only for
   update queues, which wait for no access during the backward.
6. By rule 4 all ranks take part in collectives in one order. The first that is not over waits only for compute, and
   compute waits for no later one.
7. `cancel` and `close` abandon the gate, so that no load waits for ever.

Threads: the training thread begins and ends passes. In a backward autograd's thread calls `UnitWeights` and
`UnitGradients`, while the training thread waits. The watchdog may read the state at any time.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from megatier.errors import TimelineError
from megatier.play.collectives import Collectives
from megatier.play.gate import Gate
from megatier.play.gradients import UnitGradients
from megatier.play.offload import Offload
from megatier.play.optimizer_protocol import Optimizer
from megatier.play.orders import Orders
from megatier.play.passes import Pass
from megatier.play.state_reader import StateReader
from megatier.play.unit_blocks import UnitBlocks
from megatier.play.unit_weights import UnitWeights
from megatier.play.updates import Updates
from megatier.ranks.ranks import Ranks
from megatier.schedule.demand import Demand
from megatier.schedule.moves import Moves
from megatier.schedule.placement import Placement
from megatier.schedule.policy import Policy
from megatier.schedule.timeline import Access, Exchange, Item, Load, ReduceScatter, Timeline, Update, drain_items
from megatier.schedule.unit_spec import UnitSpec
from megatier.store.queue import Queue
from megatier.store.store import TieredStore
from megatier.store.transfer import compute_point
from megatier.trace.events import TraceEvent
from megatier.trace.recorder import Recorder


class Player:
    """The player of a run. `close` stops its queues."""

    def __init__(
        self,
        store: TieredStore,
        units: Sequence[UnitSpec],
        placement: Placement,
        policy: Policy,
        optimizer: Optimizer,
        ranks: Ranks | None = None,
    ) -> None:
        """Register all blocks and slots with the store, which must be fresh, and start the queues.

        Args:
            store: holds all blocks of the run. If a change of state is interrupted, the state is torn, and `begin` and
                `drain` refuse it until `reset`.
            units: the sizes of every unit.
            placement: the units' homes and slots.
            policy: the groups of a step, and whether updates wait for the norm.
            optimizer: does the arithmetic of updates.
            ranks: the ranks that share the state, so that the store holds only this rank's shards; None: a single rank.
        """
        by_name = {spec.name: spec for spec in units}
        self._store = store
        self._placement = placement
        self._orders = Orders(placement, {spec.name for spec in units if spec.is_layer})
        self._pass = Pass("")
        """The current pass, or the last one."""
        self._updates_due: frozenset[str] = frozenset()
        """The units whose updates of the last step the next pass, or `drain`, will submit."""
        self._moves = Moves(by_name, placement, policy)
        self._demand = Demand()

        self.gate = Gate()
        """The number of accesses of this pass that are over."""
        self.recorder = Recorder(store.clock)
        """The events of the trace, and what each queue is doing."""
        self.blocks = UnitBlocks(store, by_name, placement, policy)
        """The keys of the units' blocks, and leases on them."""
        self.updates = Updates(self.blocks, optimizer, self.gate, self.recorder, self._demand)
        """The queues that update."""
        self._own_gradients = UnitGradients(self.blocks, self.updates, self._moves, self._demand, self.recorder)
        """Takes the gradients of this rank's own state."""
        self._collectives: Collectives | None = None
        """The all-gathers of weights and reduce-scatters of gradients; None for a single rank."""
        if ranks is not None:
            self._collectives = Collectives(
                ranks, self.blocks, optimizer, self._own_gradients, self.gate, self.recorder
            )
        self.grad_sink: Collectives | UnitGradients = self._collectives or self._own_gradients
        """Takes gradients from compute."""
        offload = Offload(store, by_name, self._moves, self._demand)
        self.weights = UnitWeights(
            blocks=self.blocks,
            updates=self.updates,
            gradients=self._own_gradients,
            gate=self.gate,
            recorder=self.recorder,
            offload=offload,
            orders=self._orders,
            moves=self._moves,
            demand=self._demand,
            collectives=self._collectives,
        )
        """Lends weights to compute, and takes activations from it."""
        self.reader = StateReader(self.blocks.generations, self.recorder)
        """The queue that reads state for checkpoints."""

    @property
    def timeline(self) -> Timeline | None:
        """The timeline of the current pass, or of the last one; None while the pass is recorded."""
        return self._pass.timeline

    @property
    def accesses(self) -> list[Access]:
        """The uses of units in this pass so far, in order."""
        return self._pass.accesses

    @property
    def queues(self) -> tuple[Queue, ...]:
        """All queues of the run: those of the store, of the player and of its updates."""
        return (*self._store.queues, *self._own_queues, self.reader.queue)

    @property
    def _own_queues(self) -> tuple[Queue, ...]:
        """The queues of passes and updates."""
        collectives = (self._collectives.queue,) if self._collectives is not None else ()
        return (self.weights.queue, *collectives, *self.updates.queues)

    @property
    def busy(self) -> Mapping[str, str]:
        """For each queue, what it waits for: the queue of a transfer, or a cause such as `slot`."""
        return self.recorder.busy

    @property
    def demanded(self) -> Counter[str]:
        """Bytes that passes and updates so far had to move by the placement, by queue."""
        return self._demand.moved

    def take_events(self) -> list[TraceEvent]:
        """Return the events that have ended since the last call. Moves under way come later."""
        return self.recorder.take(self._store.take_log())

    def own_seconds(self) -> float:
        """Return the seconds since the last `take_events` in which this rank computed or waited for its own queues.

        Call it only when the device is idle.
        """
        return self.recorder.own_seconds()

    def waiting(self, cause: str) -> contextlib.AbstractContextManager[object]:
        """Note that compute waits for something other than a queue of this player, such as other ranks."""
        return self.recorder.waiting(cause)

    # ------------------------------------------------------------------ passes

    def begin(self, name: str, text_groups: Collection[int] = ()) -> None:
        """Begin a pass: play its timeline, or record its order the first time.

        Args:
            name: `train`, or the name of an evaluation.
            text_groups: the groups that have no pixels. Units that such groups have left out before are not loaded for
                them.

        Raises:
            TornStateError: a change of state was interrupted before.
        """
        # These steps follow the proof at the head of this file, from its point 1.
        self._leave_open_pass()
        self._pass = Pass(name)
        self.weights.begin(self._pass)
        if self._collectives is not None:
            self._collectives.begin(self._pass)
        self.gate.reset()

        # Point 2.
        self.updates.check_exchange()
        if not self._orders.knows(name) or self._orders.lacks(name, self._updates_due):
            with self.recorder.waiting(self.updates.wait_cause):
                self.drain()

        timeline = self._plan(name, text_groups)

        # An interrupt from here on is followed by `cancel`.
        self._pass.is_open = True

        # After an interrupt in here nobody would know which updates were submitted.
        with self._store.consistency.change:
            if self._pass.trains:
                self._own_gradients.begin()
                self.updates.begin()
            # Point 3.
            if timeline is not None:
                self._submit(timeline.items)
            self._updates_due = frozenset()

    def _plan(self, name: str, text_groups: Collection[int]) -> Timeline | None:
        """Plan the pass that begins. Return its timeline; None if its order is not known."""
        # Units whose speculative update was confirmed are not updated again.
        due = self._updates_due - self.updates.speculation.updated
        absent: frozenset[tuple[str, int]] = frozenset()

        # With several ranks, another rank may use a unit that this one leaves out.
        if self._collectives is None and self._orders.knows(name):
            self._pass.text_groups = frozenset(text_groups)
            absent = self._pass.absent = self._orders.absent(name, text_groups)
        timeline = self._orders.timeline(name, due, self.updates.ahead, absent)
        self._pass.timeline = timeline
        self._pass.planned = self._orders.expected(name)

        # With several ranks the queue `ranks` asks for the sums.
        if timeline is not None and self._pass.trains and self._collectives is None:
            self._pass.sums_ahead = self._moves.sums_ahead(timeline)
        return timeline

    def _submit(self, items: Iterable[Item]) -> None:
        """Hand each item to its queue, which may begin at once, and count the bytes that it moves."""
        gradients = compute_point(self._store.clock, "gradients")
        for item in items:
            self._demand.add(self._moves.of(item))
            match item:
                case Update():
                    self.updates.submit(item, gradients)
                case Load():
                    # A load waits for its unit's update, which the timeline has before it.
                    load = self.weights.submit(item)
                    if item.updates:
                        update = Update(unit=item.unit)
                        self.updates.submit(update, gradients, load)
                    self.weights.submit_all_gather(item, load)
                case ReduceScatter():
                    assert self._collectives is not None, "a single rank has no reduce-scatters"
                    self._collectives.submit(item)
                case Exchange():
                    self.updates.submit_exchange(item)

    def end(self) -> None:
        """End a pass. Its order is known from now on, and its weights leave the GPU slots.

        Raises:
            TimelineError: the backward has left out units that the forward used and the recorded backward has.
        """
        if self._pass.timeline is not None:
            # Accesses that the end of the pass leaves out still have loads on the queue.
            try:
                self.weights.pass_over(None)
            except TimelineError:
                self.cancel()
                raise
        else:
            # A recorded pass had no plan, so its moves are counted afterwards.
            recorded = self._pass.accesses[self._pass.recorded_from :]
            for access in recorded:
                loaded = self._moves.load(access.unit)
                self._demand.add(loaded)
            for scatter in self._pass.scatters:
                scattered = self._moves.reduce_scatter(scatter)
                self._demand.add(scattered)

        # The queue `ranks` completes gradients, so it has to finish this pass.
        if self._collectives is not None:
            self._collectives.wait()
            if self._pass.trains:
                self._collectives.drop_left_out()

        self._orders.record(self._pass)
        self.weights.evict()
        self._pass.is_open = False

    def cancel(self) -> None:
        """Leave a pass before its end. Loads that wait for compute are given up, and due updates still run."""
        self.gate.abandon()
        self._orders.forget_absent()
        if self._collectives is not None:
            self._collectives.abandon()

        # With torn state the waits below might never end. `reset` does not need them.
        if self._store.consistency.is_torn:
            return

        # Release the leases of the failed forward or backward first, because a queue may wait for their slots.
        self.weights.release_all()
        self.grad_sink.release_all()
        if self._collectives is not None:
            self._collectives.wait_for_end()
            self._own_gradients.release_all()

        # Work of the pass must not outlast it. Speculative updates that are void end sooner.
        self.updates.speculation.abandon()
        for transfer in self._pass.loads.values():
            transfer.wait_for_end()
        self.updates.wait_for_end()

        # In the immediate mode some units may be a step ahead of the others by now, and nothing takes that back.
        if self._pass.trains and self.updates.is_partial:
            self._store.consistency.is_torn = True

        # Only now does no queue use the gradients: no update and no sum of this step will take them any more.
        self.grad_sink.drop()
        if self._collectives is not None:
            self._own_gradients.drop()
        self.weights.evict()

        # Nobody asks for what happened in it, and a loop may give up any number of passes.
        self.recorder.drop(self._store.take_log())
        self._pass.is_open = False

    @property
    def can_sit_out(self) -> bool:
        """Whether `sit_out` is possible: not while the order is recorded, nor once the pass has ended."""
        return self._pass.is_open and self._pass.timeline is not None and not self._store.consistency.is_torn

    def sit_out(self, group: int) -> None:
        """Leave out what is left of a training pass, up to the end of a group, as one of several ranks.

        `end` follows the last group, and `drop_updates`: what the other ranks add up is no gradient of theirs alone.

        Args:
            group: the last group that is left out.
        """
        self.weights.release_all()
        self.grad_sink.release_all()
        self.weights.sit_out(group)

    def _leave_open_pass(self) -> None:
        """Cancel a pass that an interrupt left open. Raise in a forked child."""
        self._store.check_process()
        self._store.consistency.check()
        if self._pass.is_open:
            self.cancel()
            self._store.consistency.check()

    def reset(self) -> None:
        """Wait for all that moves after something broke off, and forget it. All state has to be overwritten then."""
        # First of all the state is torn: then a thread that waits for a slot fails once it is woken, instead of waiting
        # again for a slot that perhaps nobody knows of.
        self._store.consistency.is_torn = True
        self.gate.abandon()
        if self._collectives is not None:
            self._collectives.abandon()
        self.updates.speculation.abandon()
        with self._store.consistency.change:
            for queue in (*self._own_queues, self.reader.queue):
                self._store.wake()
                queue.settle()
            self._updates_due = frozenset()
            self._pass = Pass("")
            self.weights.forget()
            self.grad_sink.forget()
            self._own_gradients.forget()
            self.updates.forget()

            # Last, as it takes all slots back: no queue may work in one any more.
            self._store.reset()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Surround what overwrites all state, which is at home after that. This mends torn state.

        Whatever ends it early leaves torn state. So what can be refused is refused before.
        """
        consistency = self._store.consistency
        if consistency.is_torn or consistency.is_overwritten:
            self.reset()
        else:
            self.drain()
        with consistency.overwriting():
            yield
            self.updates.drain()

    def defer_updates(self, *, clipped: bool) -> None:
        """Make the updates of the step due: the next pass, or `drain`, makes those that were not made already.

        All gradients are final.

        Args:
            clipped: the gradients are to be scaled, so speculative updates are void.
        """
        # The two belong together: with one alone, a unit would be updated twice, or not at all.
        with self._store.consistency.change:
            self.updates.speculation.decide(clipped=clipped)
            self._updates_due = frozenset(self._own_gradients.final)

    def drop_updates(self) -> None:
        """Never apply the gradients of the step: no update is due, and speculative ones are void, as if clipped."""
        with self._store.consistency.change:
            self.updates.speculation.decide(clipped=True)

    def drain(self) -> None:
        """Finish every update that is due and every write-back: the step is complete.

        Raises:
            TornStateError: something was interrupted while state was changed.
            TransferError, NonFiniteError: what stopped an update.
        """
        self._leave_open_pass()
        self.updates.speculation.abandon()
        if self._updates_due:
            due = self._updates_due - self.updates.speculation.updated
            ordered = [unit for unit in self.blocks.units if unit in due]
            items = drain_items(ordered, self._placement, self.updates.ahead)

            # As in `begin`, nobody would know which updates were submitted.
            with self._store.consistency.change:
                self._submit(items)
                self._updates_due = frozenset()
        self.updates.drain()

    def drain_gradients(self) -> None:
        """Wait until every gradient of the step is summed and measured (and, in the immediate mode, applied)."""
        # The device is still busy, so recording costs no time.
        self.recorder.collect(self._store.take_log())
        self.updates.wait()

    def close(self) -> None:
        """Abandon work that waits for compute or has not begun, and stop the queues. `drain` first to finish a step."""
        # Closing a queue joins its thread, which first does its submitted work. Work at the gate would wait for ever,
        # so it is woken before. The reader closes first, because updates wait for it.
        self.gate.abandon()
        if self._collectives is not None:
            self._collectives.abandon()
        self.reader.close()
        self.updates.close()
        if self._collectives is not None:
            self._collectives.queue.close()
        self.weights.queue.close()
