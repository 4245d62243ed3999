"""The player: runs a timeline over the store's queues, hands weights to compute, and records what happened.

Compute asks for a unit (`enter`), gets its bytes on the GPU, and gives them back (`leave`). Ahead of it the lane `load`
brings weights into GPU slots in the timeline's order, each as soon as the access it displaces is over. Without a
timeline (the first step, the first evaluation) every load happens on demand and the order is recorded.

Gradients leave by `ship_grad`. From there on they belong to `Updates`, which has lanes of its own.

Why nothing deadlocks: the comments of `Player.begin` and `Player._submit` prove it step by step.

Threads: `enter`, `leave` and the gradient calls come from the thread that computes (autograd's, in a backward).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from megatier.errors import TimelineError
from megatier.play.blocks import UnitBlocks, grad_key
from megatier.play.gate import Gate
from megatier.play.offload import Offload
from megatier.play.optimizer import Optimizer
from megatier.play.passes import Orders, Pass
from megatier.play.trace import Recorder, TraceEvent
from megatier.play.updates import Updates
from megatier.schedule.demand import Demand
from megatier.schedule.moves import Moves
from megatier.schedule.placement import Placement
from megatier.schedule.sizes import Policy, UnitSpec
from megatier.schedule.timeline import Access, Load, Timeline, Update
from megatier.store.lease import Lease
from megatier.store.queue import Queue
from megatier.store.store import TieredStore
from megatier.store.stream_clock import Instant
from megatier.store.transfer import Transfer, mark
from megatier.tier import Kind, Phase, Tier

WAIT_SLICE_S = 0.001
"""How often a waiting access looks again at what it waits for, to name the cause."""


class Use:
    """A unit's weights in compute's hands, from `enter` to `leave`.

    Attributes:
        bytes: uint8 [weight block] on the GPU.
        access: the use of the pass that this is.
        lease: holds the weights.
        asked: when compute asked for them.
        entered: when it got them.
        cause: the lane that it waited for longest in between.
    """

    def __init__(self, player: Player, access: Access, lease: Lease, asked: Instant, cause: str) -> None:
        """Only Player.enter makes one."""
        self._player = player
        self.access = access
        self.lease = lease
        self.asked = asked
        self.cause = cause
        self.entered = Instant(player.store.clock)
        self.bytes = lease.bytes

    def leave(self) -> None:
        """Give the weights back; their slot may be filled again once compute enqueued so far is over."""
        self._player.leave(self)


class Player:
    """Plays timelines. There is one per run; `close` stops its lanes.

    Attributes:
        store: holds all blocks of the run.
        units: sizes of every unit, by name.
        placement: homes and slots.
        policy: dtype, groups, clip.
        tear: the store's. If something breaks off a change it is torn; `begin` and `drain` refuse it until `reset`.
        busy: per lane, the queue or wait that it is at: the cause of a stall that waits for this lane.
        gate: counts the accesses of this pass that are over.
        recorder: collects the events of the trace.
        blocks: names and leases of the units' blocks.
        updates: the lanes that update.
        is_closed: the run ends: work that has not begun, or may stop half-way, shall not go on.
    """

    def __init__(
        self,
        store: TieredStore,
        units: Sequence[UnitSpec],
        placement: Placement,
        policy: Policy,
        optimizer: Optimizer,
    ) -> None:
        """Register all blocks and slots with the store, which must be fresh, and start the lanes."""
        self.store = store
        self.placement = placement
        self.policy = policy
        self.tear = store.tear
        self.units = {unit.name: unit for unit in units}
        self._trained = frozenset(placement.grad_homes)

        # The present pass.
        self._orders = Orders(self.units.keys(), placement)
        self._pass = Pass("")
        self._sums_ahead: frozenset[int] = frozenset()
        """Accesses of this pass for whose gradient the sum of the groups before comes to the GPU, ahead."""
        self._held: list[Lease] = []
        """Weights that compute has in its hands."""
        self._grads: dict[str, Lease] = {}
        """GPU buffers in which compute makes gradients now, by unit."""
        self._demand = Demand(Moves(self.units, placement, policy), placement, policy)
        self._offload = Offload(store, self.units, self._demand)

        # The present step.
        self._summed: set[str] = set()
        """Units that have handed over a group's gradient in this step."""
        self._final: set[str] = set()
        """Units whose gradient of this step is final."""
        self._updates_due: frozenset[str] = frozenset()
        """The last step's updates wait for a pass, or for `drain`, to submit them."""

        self.busy = {"load": "ram_to_gpu"}
        self.gate = Gate()
        self.recorder = Recorder()
        self.blocks = UnitBlocks(store, self.units, placement, policy)
        self.updates = Updates(self.blocks, optimizer, self.gate, self.recorder, self.busy, self._demand)
        self._lane = Queue("load")  # it only decides and waits: no stream
        self._checkpoints = Queue("checkpoint")
        self.is_closed = False

    @property
    def timeline(self) -> Timeline | None:
        """The pass that is being played; None while a pass is recorded."""
        return self._pass.timeline

    @property
    def accesses(self) -> list[Access]:
        """Uses of units in this pass so far, in order."""
        return self._pass.accesses

    @property
    def queues(self) -> tuple[Queue, ...]:
        """Every lane that works for the run: the store's, and those of the player and its updates."""
        return (*self.store.queues, self._lane, *self.updates.queues, self._checkpoints)

    # ------------------------------------------------------------------ passes

    def begin(self, name: str) -> None:
        """Start a pass, `train` or one of evaluations: play its timeline, or record its order the first time.

        Raises:
            TornStateError: something was interrupted while state was changed.
        """
        # Why nothing deadlocks. Number the accesses of a pass, and look at what each thread waits for:
        #
        # 1. Before the pass begins, nobody waits at the gate: each access of the last pass waited for its load and its
        #    unit's update, and a pass that did not come to its end is cancelled here first. So the gate may be reset.
        # 2. Without a recorded order every update that is due is finished first. From then on an access loads by
        #    itself; it waits for slots and queues alone.
        # 3. With one, `_submit` hands everything to the lanes before the first access: access k can only wait for work
        #    that some lane has already.
        # 4. Access k waits for its load and for its unit's update. `_submit` shows that these wait only for accesses
        #    before k. The earliest access that waits therefore always gets what it waits for.
        # 5. Slots close no circle. GPU slots for weights: a load evicts the unit that the timeline names, after that
        #    unit's access. RAM slots: they are leased while bytes move or AdamW runs, and bytes that were merely read
        #    ahead give way. GPU slots for gradients: they are free as soon as the copy to RAM is submitted, and a RAM
        #    slot for that copy waits for update lanes alone, which in the backward wait for no access any more.
        # 6. What breaks the order off (`cancel`, `close`) abandons the gate, so that no load waits for ever.
        self._leave_open_pass()
        self._pass = Pass(name)
        self._offload.clear()
        self.gate.reset()

        # Nobody waits for the exchange, so its error would be lost.
        if (exchange := self.updates.exchange) is not None and exchange.failed():
            exchange.wait()

        if not self._orders.knows(name):
            self.drain()
        self._pass.timeline = self._orders.timeline(name, self._updates_due - self.updates.speculation.updated)
        self._pass.is_open = True  # before anything is submitted: an interrupt from here on is followed by `cancel`
        self._sums_ahead = self._orders.sums_ahead(self._pass)

        # An interrupt in here leaves some of the updates submitted and others not, and nothing says which.
        with self.tear.change:
            if self._pass.trains:
                self._summed.clear()
                self._final.clear()
                self.updates.speculation.begin()
            if self._pass.timeline is not None:
                self._submit(self._pass.timeline)
            self._updates_due = frozenset()

    def _submit(self, timeline: Timeline) -> None:
        """Hand all loads and updates of a pass to their lanes, which begin at once."""
        # The second half of the proof in `begin`. A lane works in the order of submission, and both updates and loads
        # come in the order of the accesses that they serve. So whatever is ahead of an item in its lane serves an
        # earlier access, and waits for less.
        self._demand.begin_pass(timeline, trains=self._pass.trains)
        streamed = [update for update in timeline.updates if update.unit in self.placement.streamed]
        gradients = mark(self.store.clock, "gradients")

        # a. Updates of units that are not streamed wait for gradients of the last step, which are made, and for readers
        #    on the lane `checkpoint`, which waits for drives alone. One that feeds a load for access k waits for
        #    accesses before k too. On the lane `update_gpu`, units at home there so come before all streamed ones.
        for update in timeline.updates:
            if update.unit not in self.placement.streamed:
                self.updates.submit(update, gradients)

        # b. A load for access k waits for accesses before k and for its unit's update. It looks for that update as soon
        #    as the lane comes to it. So the updates were submitted first: else it would find that of the last step, and
        #    bring weights that are about to change.
        first_loads: dict[str, Transfer] = {}
        for load in timeline.loads:
            transfer = self._lane.submit(load.unit, 0, partial(self._load, load))
            self._pass.loads[load.access] = transfer
            first_loads.setdefault(load.unit, transfer)

        # c. A streamed unit is updated in the slot into which its weights are loaded: its update waits for that load,
        #    and no load waits for the update.
        for update in streamed:
            self.updates.submit(update, gradients, first_loads[update.unit])

        # d. The exchange comes last in its lane and waits for the CPU's update lanes, which never wait for it.
        if self._pass.trains:
            self.updates.submit_exchange(goes_home=bool(self._updates_due), comes_again=True)

    def end(self) -> None:
        """End a pass: its order is known from now on, and no weights stay in GPU slots.

        Raises:
            TimelineError: units were used in a forward, and not in the backward that the recorded order has.
        """
        played = self._pass.timeline
        if played is not None:
            try:
                self._pass_over(None)
            except TimelineError:
                self.cancel()
                raise
        else:
            on_demand = [
                Load(unit=access.unit, access=index, slot=0, evicts=None, after_access=-1)
                for index, access in enumerate(self._pass.accesses)
                if self.placement.homes[access.unit, Kind.WEIGHT] is not Tier.GPU
            ]
            played = Timeline(tuple(self._pass.accesses), tuple(on_demand), ())
            self._demand.begin_pass(played, trains=self._pass.trains)

        self._demand.end_pass(played, self._final, trains=self._pass.trains)
        self._orders.record(self._pass.name, self._pass.accesses)
        self._evict_weights()
        self._pass.is_open = False

    def cancel(self) -> None:
        """Leave a pass half-way: loads that wait for compute are given up, updates that are due still run."""
        self.gate.abandon()
        if self.tear.is_torn:  # the waits below might never end; `reset` does without them
            return

        # Leases of a forward or backward that failed go back before anything is waited for: a lane may need their slot.
        while self._held or self._grads:
            with self.tear.change:
                lease = self._held.pop() if self._held else self._grads.popitem()[1]
                lease.release()
        self.updates.speculation.abandon()
        for transfer in self._pass.loads.values():
            transfer.over()
        self.updates.over()

        # Only now does no lane use the gradients: no update and no sum of this step will take them any more.
        for unit in self._trained:
            self.blocks.drop_grad(unit)
        self._evict_weights()
        self._pass.is_open = False

    def _leave_open_pass(self) -> None:
        """Cancel a pass that an interrupt left before anybody could."""
        self.tear.check()
        if self._pass.is_open:
            self.cancel()

    def reset(self) -> None:
        """After something broke off: wait for all that moves, and forget it. Overwrite all state then."""
        # First of all it is torn: then whoever waits for a slot fails once it is woken, instead of waiting again for
        # a slot that perhaps nobody knows of.
        self.tear.is_torn = True
        self.gate.abandon()
        self.updates.speculation.abandon()
        with self.tear.change:
            for lane in (self._lane, *self.updates.queues, self._checkpoints):
                self.store.wake()
                lane.settle()
            self._updates_due = frozenset()
            self._pass = Pass("")
            self._held.clear()
            self._grads.clear()
            self.updates.forget()
            self.store.reset()  # last, as it takes slots back: no lane may work in one any more

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Inside, all state is overwritten, which mends what something broke off. If that fails, it is torn still."""
        if self.tear.is_torn:
            self.reset()
            region = self.tear.change  # no error is a refusal here: there is no state left to fall back on
        else:
            self.drain()
            region = self.tear.call
        with region:
            yield

    def defer_updates(self, *, clipped: bool) -> None:
        """All gradients are final: the next pass, or `drain`, updates every unit that was not updated already.

        Args:
            clipped: the gradients are to be scaled, so speculative updates are void.
        """
        with self.tear.change:
            self.updates.speculation.decide(clipped=clipped)
            self._updates_due = frozenset(self._final)

    def drop_updates(self) -> None:
        """The gradients are not to be applied: no update is due, and speculative ones are void, as if clipped."""
        with self.tear.change:
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
            with self.tear.change:  # as in `begin`: some of the updates are no whole step
                self.updates.submit_all(self._updates_due)
                self._updates_due = frozenset()
        self.updates.drain()

    def planned(self, name: str, *, updates: bool) -> Timeline:
        """The timeline of a recorded pass, in which no unit or every unit is updated."""
        return self._orders.planned(name, updates=updates)

    def take_events(self) -> list[TraceEvent]:
        """Everything that ended since the last call; does not wait for moves in flight, which may outlast a step."""
        return self.recorder.take(self.store.take_log())

    def read_state(
        self, name: str, work: Callable[[], None], before: Transfer | None = None, unit: str | None = None
    ) -> Transfer:
        """Work on the lane `checkpoint`, while passes go on. Call `drain` first.

        Args:
            name: names the work in the trace.
            work: reads state where it is home, and gives up soon when `is_closed`.
            before: work of this lane; if it failed, this one fails with the same error, undone.
            unit: the unit that it reads, if it reads one; no update changes that unit's state before the work is over.
        """
        transfer = self._checkpoints.submit(name, 0, work, [before] if before is not None else [])
        self.recorder.watch(transfer)
        if unit is not None:
            self.blocks.hold(unit, transfer)
        return transfer

    def close(self) -> None:
        """Abandon what waits for compute, or has not begun, and stop the lanes. `drain` first to finish a step."""
        # Each close joins a thread, which first ends what was submitted. The gate is abandoned before that: loads and
        # updates may wait there for compute, which comes no more. The other lanes still work, so whatever else is
        # waited for comes to its end.
        self.is_closed = True
        self.gate.abandon()
        self._checkpoints.close()  # first: updates wait for it
        self.updates.close()
        self._lane.close()

    # ------------------------------------------------------------------ compute's side

    def enter(self, unit: str, phase: Phase, group: int) -> Use:
        """The unit's weights on the GPU; waits for them and notes the stall.

        Raises:
            TimelineError: the order is not the recorded one.
            TransferError, IntegrityError: the weights could not be brought.
        """
        access = Access(unit, phase, group)
        if not self._pass.expects(access):
            self._pass_over(access)
        if len(self._pass.accesses) in self._sums_ahead and unit in self._summed:
            self.updates.submit_fetch(unit)
        return self._use(access)

    def leave(self, use: Use) -> None:
        """See `Use.leave`."""
        left = Instant(self.store.clock)
        with self.tear.change:
            use.lease.release()
            self._held.remove(use.lease)

        self.recorder.access(use.access, use.cause, use.asked, use.entered, left)
        # The gate opens after the release: a load that it lets through evicts these weights, and a lease forbids that.
        self.gate.open_to(len(self._pass.accesses))
        if self._pass.timeline is None:  # nothing is known of the next use: make room
            self.blocks.drop_weights(use.access.unit)

    def _pass_over(self, access: Access | None) -> None:
        """Use and leave the accesses that this pass leaves out before one (None: before its end).

        They have loads and updates like any other, and later loads wait until they are over.
        """
        for recorded in self._pass.leave_out(access, self._trained):
            self._use(recorded).leave()

    def _use(self, access: Access) -> Use:
        """Wait for the unit's update and the access's load, then lease the weights."""
        asked = Instant(self.store.clock)
        unit = access.unit
        index = len(self._pass.accesses)
        self._pass.accesses.append(access)

        # An access that an update feeds has no load of its own: its weights are there after the update.
        causes: Counter[str] = Counter()
        for transfer in (self.updates.of(unit), self._pass.loads.get(index)):
            if transfer is not None:
                self._wait(transfer, causes)

        # Without a timeline, or where an update did not feed its load, this brings the weights on demand.
        key = self.blocks.key(unit, Kind.WEIGHT)
        for transfer in self.store.prefetch(key, Tier.GPU, wait=True):
            self._wait(transfer, causes)
        with self.tear.call:  # else nobody would give the lease back
            lease = self.store.lease(key, Tier.GPU)
            self._held.append(lease)

        cause = causes.most_common(1)[0][0] if causes else "ram_to_gpu"
        return Use(self, access, lease, asked, cause)

    def take_grad(self, unit: str) -> torch.Tensor:
        """A GPU buffer for the unit's gradient of this group: uint8, contents unspecified unless `sums_here`."""
        if (fetched := self.updates.fetched(unit)) is not None:
            fetched.over()
        fresh = unit not in self._summed or not self.sums_here(unit)
        with self.tear.call:  # else nobody would give the lease back
            lease = self._grads[unit] = self.store.lease(grad_key(unit), Tier.GPU, fresh=fresh, wait=True)
        return lease.bytes

    def ship_grad(self, unit: str, *, group: int) -> None:
        """Hand a group's gradient over; after the last group the unit's gradient is final.

        In the immediate mode its update starts at once.
        """
        last = group == self.policy.groups - 1
        self._summed.add(unit)
        if last:
            self._final.add(unit)

        # The lease ends before the gradient is sent: sending evicts the GPU slot, and a lease forbids that.
        with self.tear.change:
            self._grads.pop(unit).release()
        if group and (summed := self.updates.of(unit)) is not None:
            summed.wait()  # this gradient takes the place of the last group's
        if self.placement.grad_homes[unit] is not Tier.GPU:
            self.blocks.send_grad(unit, final=last)
            if self.blocks.sums_in_ram(unit):
                self.updates.submit_sum(unit, group)

        # After the sum: an update comes behind the sum of its unit that was submitted last.
        if last and self.policy.deferred:
            self.updates.submit_speculative(unit, mark(self.store.clock, unit))
        elif last:
            self.updates.submit(Update(unit, None), mark(self.store.clock, unit))

    def sums_here(self, unit: str) -> bool:
        """True if the gradient's groups are added up on the GPU: it is at home there, or RAM is too short for it."""
        return self.placement.sums_at(unit) is Tier.GPU

    def drain_gradients(self) -> None:
        """Wait until every gradient of the step is summed and measured (and, in the immediate mode, applied)."""
        self.recorder.collect(self.store.take_log())  # while the device is still at work
        self.updates.wait()

    def stash(self, unit: str, tensor: torch.Tensor) -> None:
        """Take an activation to RAM; see `Offload.stash`."""
        self._offload.stash(unit, tensor)

    def fetch(self, unit: str) -> torch.Tensor:
        """Bring it back; see `Offload.fetch`."""
        return self._offload.fetch(unit)

    def _wait(self, transfer: Transfer, causes: Counter[str]) -> None:
        """Order compute behind a transfer, and count per time slice which lane it waited for."""
        while not transfer.issued(WAIT_SLICE_S):
            # The transfer forgets both when it starts, on another thread: then its own queue is the cause.
            before = (*transfer.after, *transfer.behind)
            waits_for = next((other.queue for other in before if not other.done()), transfer.queue)
            causes[self.busy.get(waits_for, waits_for)] += 1
        if not transfer.done():
            causes[transfer.queue] += 1
        transfer.order()

    # ------------------------------------------------------------------ the lane's side

    def _load(self, load: Load) -> None:
        """Bring weights into a GPU slot, on the lane `load`."""
        self.busy["load"] = "slot"
        self.blocks.make_room(load, self.gate)

        # A streamed unit is updated in its slot, so there the update comes behind the load.
        if load.unit not in self.placement.streamed and (update := self.updates.of(load.unit)) is not None:
            self.busy["load"] = "update"
            update.wait()
        self.busy["load"] = "ram_to_gpu"
        self.store.prefetch(self.blocks.key(load.unit, Kind.WEIGHT), Tier.GPU, wait=True)

    # ------------------------------------------------------------------ bookkeeping

    @property
    def demanded(self) -> Counter[str]:
        """Bytes per queue that the placement demanded of the passes and updates so far."""
        return self._demand.moved

    def _evict_weights(self) -> None:
        for name in self.units:
            self.blocks.drop_weights(name)
