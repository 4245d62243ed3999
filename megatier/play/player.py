"""The player: runs a timeline over the store's queues, hands weights to compute, and records what happened.

Compute asks for a unit (`enter`), gets its bytes on the GPU, and gives them back (`leave`). Ahead of it the lane `load`
brings weights into GPU slots in the timeline's order, each as soon as the access it displaces is over. Without a
timeline (the first step, the first evaluation) every load happens on demand and the order is recorded.

Gradients leave by `ship_grad`; what becomes of them is the business of `Updates`, on lanes of its own.

No deadlock: an access waits for its load and for its unit's update; a load waits only for accesses before its own and
for its unit's update, which waits for no later access either (`updates` says why).

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
from megatier.play.trace import Recorder, TraceEvent
from megatier.play.updates import Updates
from megatier.schedule.demand import Demand
from megatier.schedule.moves import Moves
from megatier.schedule.order import passed_over
from megatier.schedule.placement import Placement
from megatier.schedule.sizes import Policy, UnitSpec
from megatier.schedule.timeline import Access, Load, Timeline, Update, build
from megatier.store.lease import Lease
from megatier.store.store import TieredStore
from megatier.store.transfer import Instant, Queue, Transfer, mark
from megatier.tier import Kind, Phase, Tier

WAIT_SLICE_S = 0.001
"""How often a waiting access looks again at what it waits for, to name the cause."""


class Use:
    """A unit's weights in compute's hands, from `enter` to `leave`.

    Attributes:
        bytes: uint8 [weight block] on the GPU.
    """

    def __init__(self, player: Player, access: Access, lease: Lease, asked: Instant, cause: str) -> None:
        """Made by Player.enter."""
        self._player, self._access, self._lease = player, access, lease
        self._asked, self._cause, self._entered = asked, cause, Instant(player.store.clock)
        self.bytes = lease.bytes

    def leave(self) -> None:
        """Give the weights back; their slot may be filled again once compute enqueued so far is over."""
        left = Instant(self._player.store.clock)
        with self._player.tear.change:
            self._lease.release()
            self._player.held.remove(self._lease)
        self._player.recorder.access(self._access, self._cause, self._asked, self._entered, left)
        self._player.gate.open_to(len(self._player.accesses))
        if self._player.timeline is None:  # nothing is known of the next use: make room
            self._player.blocks.drop_weights(self._access.unit)


class Player:
    """Plays timelines. One per run; `close` stops its lanes.

    Attributes:
        tear: the store's. What breaks off a change shows there; `begin` and `drain` refuse it until `reset`.
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
        self.store, self.placement, self.policy, self.tear = store, placement, policy, store.tear
        self.units = {unit.name: unit for unit in units}
        self._trained = frozenset(placement.grad_homes)
        self._orders: dict[str, tuple[Access, ...]] = {}
        self._timelines: dict[tuple[str, frozenset[str]], Timeline] = {}
        """By pass, and the units that it updates."""
        self.timeline: Timeline | None = None
        """What is being played; None while recording."""
        self._grad_makers: frozenset[int] = frozenset()
        """Accesses of this pass for whose gradient the sum of the groups before comes to the GPU, ahead."""
        self.accesses: list[Access] = []
        """Uses of this pass so far, in order."""
        self._pass = ""
        self._is_open = False
        """A pass has begun, and neither ended nor been cancelled."""
        self._loads: dict[int, Transfer] = {}
        self._grads: dict[str, Lease] = {}
        self.held: list[Lease] = []
        """Weights in compute's hands."""
        self._demand = Demand(Moves(self.units, placement, policy), placement, policy)
        self._offload = Offload(store, self.units, self._demand)
        self._summed: set[str] = set()
        """Units of which this step has handed over a group's gradient."""
        self._final: set[str] = set()
        """Units whose gradient of this step is final."""
        self._left_out: set[tuple[str, int]] = set()
        """Units that this pass did not use, though its record has them, with their group."""
        self._updates_due: frozenset[str] = frozenset()
        """The last step's updates wait for a pass, or for `drain`, to submit them."""
        self.busy = {"load": "ram_to_gpu"}
        """What each lane is at: the cause of a stall behind it."""
        self.gate = Gate()
        self.recorder = Recorder()
        self.blocks = UnitBlocks(store, self.units, placement, policy)
        self.updates = Updates(self.blocks, optimizer, self.gate, self.recorder, self.busy, self._demand)
        self._lane = Queue("load")  # it only decides and waits: no stream
        self._checkpoints = Queue("checkpoint")
        self.is_closed = False
        """It is closing: what has not begun, or may stop half-way, shall not go on."""

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
        self._leave_open_pass()
        self._pass, self.accesses, self._loads = name, [], {}
        self._offload.clear()
        self._left_out.clear()
        self.gate.reset()
        if (exchange := self.updates.exchange) is not None and exchange.failed():
            exchange.wait()
        if name not in self._orders:
            self.drain()
        self.timeline, self._is_open = self._planned(name, self._updates_due), True
        self._grad_makers = self._awaiting_sums()
        with self.tear.change:  # some of the updates are no step; and what was speculative is due no more
            if name == "train":
                self._summed.clear()
                self._final.clear()
                self.updates.speculation.begin()
            if self.timeline is not None:
                self._submit(self.timeline)
            self._updates_due = frozenset()

    def _submit(self, timeline: Timeline) -> None:
        """All loads and updates of a pass."""
        self._demand.begin_pass(timeline, trains=self._pass == "train")
        streamed = [update for update in timeline.updates if update.unit in self.placement.streamed]
        gradients = mark(self.store.clock, "gradients")
        for update in timeline.updates:
            if update.unit not in self.placement.streamed:
                self.updates.submit(update, gradients)
        first_loads: dict[str, Transfer] = {}
        for load in timeline.loads:
            transfer = self._lane.submit(load.unit, 0, partial(self._load, load))
            self._loads[load.access] = transfer
            first_loads.setdefault(load.unit, transfer)
        for update in streamed:  # in the slot that its weights are loaded into
            self.updates.submit(update, gradients, first_loads[update.unit])
        if self._pass == "train":
            self.updates.submit_exchange(goes_home=bool(self._updates_due), comes_again=True)

    def _planned(self, name: str, due: frozenset[str]) -> Timeline | None:
        """The pass's timeline; None before its order is known."""
        if name not in self._orders:
            return None
        due -= self.updates.speculation.updated
        if (name, due) not in self._timelines:
            others = self.units.keys() - due
            planned = build(self._orders[name], self.placement, updates=bool(due), updated=others)
            self._timelines[name, due] = planned
        return self._timelines[name, due]

    def _awaiting_sums(self) -> frozenset[int]:
        if self.timeline is None or self._pass != "train" or not self.placement.sums_on_gpu:
            return frozenset()
        shipped = {unit for unit, home in self.placement.grad_homes.items() if home is not Tier.GPU}
        uses = self.timeline.last_uses().items()
        return frozenset(index for (unit, group), index in uses if group and unit in shipped)

    def end(self) -> None:
        """End a pass: its order is known from now on, and no weights stay in GPU slots.

        Raises:
            TimelineError: units were used in a forward, and not in the backward that the recorded order has.
        """
        played = self.timeline
        if played is not None:
            try:
                self._pass_over(None)
            except TimelineError:
                self.cancel()
                raise
        else:
            on_demand = [
                Load(access.unit, index, 0, None, -1)
                for index, access in enumerate(self.accesses)
                if self.placement.homes[access.unit, Kind.WEIGHT] is not Tier.GPU
            ]
            played = Timeline(tuple(self.accesses), tuple(on_demand), ())
            self._demand.begin_pass(played, trains=self._pass == "train")
        self._demand.end_pass(played, self._final, trains=self._pass == "train")
        self._orders.setdefault(self._pass, tuple(self.accesses))
        self._evict_weights()
        self._is_open = False

    def cancel(self) -> None:
        """Leave a pass half-way: loads that wait for compute are given up, updates that are due still run."""
        self.gate.abandon()
        if self.tear.is_torn:  # nobody may ever come to what is waited for here; `reset` does without
            return
        while self.held or self._grads:  # by a forward or backward that failed
            with self.tear.change:
                lease = self.held.pop() if self.held else self._grads.popitem()[1]
                lease.release()
        self.updates.speculation.abandon()
        for transfer in self._loads.values():
            transfer.over()
        self.updates.over()
        for unit in self._trained:  # no update and no sum of this step will take it
            self.blocks.drop_grad(unit)
        self._evict_weights()
        self._is_open = False

    def _leave_open_pass(self) -> None:
        """Where an interrupt came before anybody could cancel it."""
        self.tear.check()
        if self._is_open:
            self.cancel()

    def reset(self) -> None:
        """After something broke off: wait for all that moves, and forget it. Overwrite all state then."""
        self.tear.is_torn = True
        self.gate.abandon()
        self.updates.speculation.abandon()
        with self.tear.change:
            for lane in (self._lane, *self.updates.queues, self._checkpoints):
                self.store.wake()
                lane.settle()
            self._updates_due, self._is_open = frozenset(), False
            for kept in (self._loads, self.held, self._grads):
                kept.clear()
            self.updates.forget()
            self.store.reset()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Inside, all state is overwritten, which mends what something broke off. If that fails, it is torn still."""
        if self.tear.is_torn:
            self.reset()
            region = self.tear.change  # nothing that holds is left, whatever happens
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
            with self.tear.change:  # some of them are no step
                self.updates.submit_all(self._updates_due)
                self._updates_due = frozenset()
        self.updates.drain()

    def planned(self, name: str, *, updates: bool) -> Timeline:
        """The timeline of a recorded pass, in which no unit or every unit is updated."""
        return build(self._orders[name], self.placement, updates=updates)

    def take_events(self) -> list[TraceEvent]:
        """Everything that ended since the last call; does not wait for moves in flight, which may outlast a step."""
        return self.recorder.take(self.store.take_log())

    def read_state(
        self, name: str, work: Callable[[], None], before: Transfer | None = None, unit: str | None = None
    ) -> Transfer:
        """Work on the lane `checkpoint`, beside the passes. Call `drain` first.

        Args:
            name: of the work, for the trace.
            work: reads state where it is home, and gives up soon when `is_closed`.
            before: work of this lane; if it failed, this one fails with the same error, undone.
            unit: whose state it reads; no update changes that before the work is over.
        """
        transfer = self._checkpoints.submit(name, 0, work, [before] if before is not None else [])
        self.recorder.watch(transfer)
        if unit is not None:
            self.blocks.hold(unit, transfer)
        return transfer

    def close(self) -> None:
        """Abandon what waits for compute, or has not begun, and stop the lanes. `drain` first to finish a step."""
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
        done = len(self.accesses)
        if self.timeline is not None and self.timeline.accesses[done : done + 1] != (access,):
            self._pass_over(access)
        if len(self.accesses) in self._grad_makers and unit in self._summed:
            self.updates.submit_fetch(unit)
        return self._use(access)

    def _pass_over(self, access: Access | None) -> None:
        """Use and leave what this pass leaves out before an access (None: before its end), so that its loads go on."""
        assert self.timeline is not None
        skipped = passed_over(self.timeline.accesses, self.accesses, access, self._left_out, self._trained)
        self._left_out.update((recorded.unit, recorded.group) for recorded in skipped)
        for recorded in skipped:
            self._use(recorded).leave()

    def _use(self, access: Access) -> Use:
        asked, unit, index = Instant(self.store.clock), access.unit, len(self.accesses)
        self.accesses.append(access)
        causes: Counter[str] = Counter()
        for transfer in (self.updates.of(unit), self._loads.get(index)):
            if transfer is not None:
                self._wait(transfer, causes)
        key = self.blocks.key(unit, Kind.WEIGHT)
        for transfer in self.store.prefetch(key, Tier.GPU, wait=True):
            self._wait(transfer, causes)
        with self.tear.call:  # else nobody would give the lease back
            lease = self.store.lease(key, Tier.GPU)
            self.held.append(lease)
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
        with self.tear.change:
            self._grads.pop(unit).release()
        if group and (summed := self.updates.of(unit)) is not None:
            summed.wait()  # this gradient takes the place of the last group's
        if self.placement.grad_homes[unit] is not Tier.GPU:
            self.blocks.send_grad(unit, final=last)
            if self.blocks.sums_in_ram(unit):
                self.updates.submit_sum(unit, group)
        if last and self.policy.deferred:
            self.updates.submit_speculative(unit, mark(self.store.clock, unit))
        elif last:
            self.updates.submit(Update(unit, None), mark(self.store.clock, unit))

    def sums_here(self, unit: str) -> bool:
        """True where the gradient's groups are added up on the GPU: at home there, or RAM is too short for it."""
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
        while not transfer.issued(WAIT_SLICE_S):
            before = (*transfer.after, *transfer.behind)
            waits_for = next((other.queue for other in before if not other.done()), transfer.queue)
            causes[self.busy.get(waits_for, waits_for)] += 1
        if not transfer.done():
            causes[transfer.queue] += 1
        transfer.order()

    # ------------------------------------------------------------------ the lane's side

    def _load(self, load: Load) -> None:
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
