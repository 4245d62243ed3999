"""Plays the timeline of each pass over the store's queues, and records what happened.

`UnitWeights` gives weights to compute, and loads them ahead of it. `UnitGradients` takes gradients from compute. They
belong to `Updates` from then on, which has queues of its own. The player begins and ends passes, and says what all of
them do.

Why nothing deadlocks. Number the accesses of a pass, and look at what each thread waits for. `Timeline` promises four
rules of the order of its items, and each queue does its items in that order.

1. Before a pass begins, nobody waits at the gate: each access of the last pass waited for its load and its unit's
   update, and a pass that did not come to its end is cancelled first. So the gate may be reset.
2. Without a recorded order every update that is due is finished first. From then on an access loads by itself; it waits
   for slots and queues alone.
3. With one, everything is handed to the queues before the first access, or before the first one that is planned anew
   (`UnitWeights.begin_leg`). So access k can only wait for work that some queue has already.
4. Access k waits for what serves it, or an earlier access. By rules 1 and 2, all that stands before that waits for
   accesses before k, too. So the earliest access that waits always gets what it waits for. By rule 3 an exchange holds
   up no access. Updates also wait for gradients of the last step, which are made, and for readers on the queue
   `checkpoint`, which waits for drives alone.
5. Slots close no circle. GPU slots for weights: a load evicts the unit that the timeline names, after that unit's
   access. RAM slots: they are leased while bytes move or AdamW runs, and bytes that were merely read ahead give way.
   GPU slots for gradients: they are free as soon as the copy to RAM is submitted, and a RAM slot for that copy waits
   for update queues alone, which in the backward wait for no access any more.
6. Ranks: by rule 4 all of them take part in the same loads and scatters, one after the other. Number these: the one
   with the least number that is not over waits for compute alone, on each rank, and compute waits for none that comes
   later.
7. What breaks the order off (`cancel`, `close`) abandons the gate, so that no load waits for ever.

Threads: the training thread begins and ends passes. In a backward, autograd's thread calls `UnitWeights` and
`UnitGradients`, while the training thread waits. The watchdog looks at any time.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from megatier.errors import TimelineError
from megatier.play.collectives import Collectives
from megatier.play.gate import Gate
from megatier.play.gradients import UnitGradients
from megatier.play.offload import Offload
from megatier.play.optimizer_protocol import Optimizer
from megatier.play.passes import Orders, Pass
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
    """Plays timelines. There is one for each run; `close` stops its queues."""

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
            store: holds all blocks of the run. If something breaks off a change of state, the state is torn: `begin`
                and `drain` refuse it until `reset`.
            units: the sizes of every unit.
            placement: the units' homes and slots.
            policy: the groups of a step, and whether updates wait for the norm.
            optimizer: does the arithmetic of updates.
            ranks: the ranks that share the state, of which the store holds this one's shards; None: all is here.
        """
        by_name = {spec.name: spec for spec in units}
        self._store = store
        self._placement = placement
        self._orders = Orders(placement, {spec.name for spec in units if spec.is_layer})
        self._pass = Pass("")
        """The present pass, or the last one."""
        self._updates_due: frozenset[str] = frozenset()
        """The last step's updates wait for a pass, or for `drain`, to submit them."""
        self._moves = Moves(by_name, placement, policy)
        self._demand = Demand()

        self.gate = Gate()
        """Counts the accesses of this pass that are over."""
        self.recorder = Recorder(store.clock)
        """Collects the events of the trace, and knows what each queue is at."""
        self.blocks = UnitBlocks(store, by_name, placement, policy)
        """The names of the units' blocks, and leases on them."""
        self.updates = Updates(self.blocks, optimizer, self.gate, self.recorder, self._demand)
        """The queues that update."""
        self._own_gradients = UnitGradients(self.blocks, self.updates, self._moves, self._demand, self.recorder)
        """Takes the gradients of what this rank has."""
        self._collectives: Collectives | None = None
        """Gathers weights and scatters gradients, if there are other ranks."""
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
        """Gives weights to compute, and takes activations."""
        self.reader = StateReader(self.blocks.generations, self.recorder)
        """The queue that reads state for checkpoints."""

    @property
    def timeline(self) -> Timeline | None:
        """The timeline of the present pass, or of the last one; None if the pass is recorded."""
        return self._pass.timeline

    @property
    def accesses(self) -> list[Access]:
        """The uses of units in this pass so far, in order."""
        return self._pass.accesses

    @property
    def queues(self) -> tuple[Queue, ...]:
        """Every queue that works for the run: the store's, and those of the player and its updates."""
        return (*self._store.queues, *self._own_queues, self.reader.queue)

    @property
    def _own_queues(self) -> tuple[Queue, ...]:
        """The queues of passes and updates."""
        collectives = (self._collectives.queue,) if self._collectives is not None else ()
        return (self.weights.queue, *collectives, *self.updates.queues)

    @property
    def busy(self) -> Mapping[str, str]:
        """Per queue, the queue or wait that it is at."""
        return self.recorder.busy

    @property
    def demanded(self) -> Counter[str]:
        """Bytes per queue that the placement demanded of the passes and updates so far."""
        return self._demand.moved

    def take_events(self) -> list[TraceEvent]:
        """Return the events that ended since the last call. Moves in flight are not waited for: some outlast a step."""
        return self.recorder.take(self._store.take_log())

    def own_seconds(self) -> float:
        """Return the seconds since the last `take_events` in which this rank computed or waited for its own queues.

        Call it when the device is idle.
        """
        return self.recorder.own_seconds()

    def waiting(self, cause: str) -> AbstractContextManager[object]:
        """Note a wait of the thread that computes for what is no queue of this player, such as other ranks."""
        return self.recorder.waiting(cause)

    # ------------------------------------------------------------------ passes

    def begin(self, name: str, text_groups: Collection[int] = ()) -> None:
        """Start a pass, `train` or one of evaluations: play its timeline, or record its order the first time.

        Args:
            name: the name of the pass.
            text_groups: the groups of which it is known that they have no pixels. What such groups have left out before
                is not loaded for them.

        Raises:
            TornStateError: something was interrupted while state was changed.
        """
        # The order of these steps is that of the proof at the head of this file: first its point 1.
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

        # What was updated ahead of the norm, and confirmed, is not updated again.
        due = self._updates_due - self.updates.speculation.updated
        absent: frozenset[tuple[str, int]] = frozenset()

        # Several ranks gather the weights together, and what one leaves out another may use.
        if self._collectives is None and self._orders.knows(name):
            self._pass.text_groups = frozenset(text_groups)
            absent = self._pass.absent = self._orders.absent(name, text_groups)
        timeline = self._orders.timeline(name, due, self.updates.ahead, absent)
        self._pass.timeline = timeline
        self._pass.planned = self._orders.expected(name)

        # If ranks scatter gradients, the queue that does so asks for the sums.
        if timeline is not None and self._pass.trains and self._collectives is None:
            self._pass.sums_ahead = self._moves.sums_ahead(timeline)

        # Before anything is submitted: an interrupt from here on is followed by `cancel`.
        self._pass.is_open = True

        # An interrupt in here leaves some of the updates submitted and others not, and nothing says which.
        with self._store.consistency.change:
            if self._pass.trains:
                self._own_gradients.begin()
                self.updates.begin()
            # Point 3.
            if timeline is not None:
                self._submit(timeline.items)
            self._updates_due = frozenset()

    def _submit(self, items: Iterable[Item]) -> None:
        """Hand everything that is planned to its queue, which begins at once, and count what it moves."""
        gradients = compute_point(self._store.clock, "gradients")
        for item in items:
            self._demand.add(self._moves.of(item))
            match item:
                case Update():
                    self.updates.submit(item, gradients)
                case Load():
                    # A load looks for its unit's update as soon as its queue comes to it. The timeline has the update
                    # before it, else the load would bring weights that are about to change.
                    load = self.weights.submit(item)
                    if item.updates:
                        update = Update(unit=item.unit)
                        self.updates.submit(update, gradients, load)
                    self.weights.gather(item, load)
                case ReduceScatter():
                    assert self._collectives is not None, "one rank alone scatters nothing"
                    self._collectives.submit(item)
                case Exchange():
                    self.updates.submit_exchange(item)

    def end(self) -> None:
        """End a pass: its order is known from now on, and no weights stay in GPU slots.

        Raises:
            TimelineError: units were used in a forward, and not in the backward that the recorded order has.
        """
        if self._pass.timeline is not None:
            # What the end of the pass leaves out still has loads on the queue.
            try:
                self.weights.pass_over(None)
            except TimelineError:
                self.cancel()
                raise
        else:
            # A pass that was recorded is counted as what it was.
            recorded = self._pass.accesses[self._pass.recorded_from :]
            for access in recorded:
                loaded = self._moves.load(access.unit)
                self._demand.add(loaded)
            for scatter in self._pass.scatters:
                scattered = self._moves.reduce_scatter(scatter)
                self._demand.add(scattered)

        # The queue `ranks` makes gradients final, so it has to be through with this pass.
        if self._collectives is not None:
            self._collectives.wait()
            if self._pass.trains:
                self._collectives.drop_left_out()

        self._orders.record(self._pass)
        self.weights.evict()
        self._pass.is_open = False

    def cancel(self) -> None:
        """Leave a pass half-way: loads that wait for compute are given up, updates that are due still run."""
        self.gate.abandon()
        self._orders.forget_absent()
        if self._collectives is not None:
            self._collectives.abandon()

        # The waits below might never end then; `reset` does without them.
        if self._store.consistency.is_torn:
            return

        # Leases of a forward or backward that failed go back before anything is waited for: a queue may need their
        # slot.
        self.weights.release_all()
        self.grad_sink.release_all()
        if self._collectives is not None:
            self._collectives.wait_for_end()
            self._own_gradients.release_all()

        # An attempt that is void ends sooner, and nothing that was submitted may outlast the pass.
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
        """Cancel a pass that an interrupt left before anybody could. Refuse to touch one of a parent's process."""
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

            # As in `begin`: some of the updates are no whole step.
            with self._store.consistency.change:
                self._submit(items)
                self._updates_due = frozenset()
        self.updates.drain()

    def drain_gradients(self) -> None:
        """Wait until every gradient of the step is summed and measured (and, in the immediate mode, applied)."""
        # While the device is still at work, so that recording costs no time of its own.
        self.recorder.collect(self._store.take_log())
        self.updates.wait()

    def close(self) -> None:
        """Abandon what waits for compute, or has not begun, and stop the queues. `drain` first to finish a step."""
        # Each close joins a thread, which first ends what was submitted. What waits at the gate for compute, which
        # comes no more, is woken before that. Whatever else is waited for comes to its end. The reader gives up first:
        # updates wait for it.
        self.gate.abandon()
        if self._collectives is not None:
            self._collectives.abandon()
        self.reader.close()
        self.updates.close()
        if self._collectives is not None:
            self._collectives.queue.close()
        self.weights.queue.close()
