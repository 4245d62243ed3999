"""The player: runs a timeline over the store's queues, hands weights to compute, and records what happened.

Compute asks for a unit (`enter`), gets its bytes on the GPU, and gives them back (`leave`). Two lanes work ahead of it:
`load` brings weights into GPU slots in the timeline's order, each as soon as the access it displaces is over; `update`
runs AdamW unit by unit on the CPU and writes state back, `update_gpu` where AdamW runs on the GPU. Without a timeline
(the first step, the first evaluation) every load happens on demand and the order is recorded.

A streamed unit's state comes to GPU slots during the backward, when links and memory have time. It is updated there as
soon as the norm is known, and goes home when the CPU is through with its own updates, which need all that memory gives.

Where a unit's weights come from NVMe and its update is due, the update feeds the load: state is read once, and the new
weight plane goes from the RAM slot to the GPU on its way home.

No deadlock: a load waits only for accesses before its own and for its unit's update; an update that feeds a load waits
only for accesses before that load's; RAM slots are held only while bytes move or AdamW runs.

Threads: `enter`, `leave` and the gradient calls come from the thread that computes (autograd's, in a backward).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch

from megatier.errors import StepAbandonedError, TimelineError
from megatier.schedule.blocks import Elements, UnitBlocks, activation_key, block_key, grad_key, sum_key
from megatier.schedule.placement import UPDATE_DEPTH, Placement, Policy, UnitSpec
from megatier.schedule.timeline import Access, Load, Timeline, Update, build, demanded_bytes, update_bytes
from megatier.schedule.trace import Recorder, TraceEvent
from megatier.store.store import Lease, TieredStore
from megatier.store.tier import Kind, Phase, Tier
from megatier.store.transfer import Gate, Instant, Queue, Transfer, mark

WAIT_SLICE_S = 0.001
"""How often a waiting access looks again at what it waits for, to name the cause."""
CHUNK_DEPTH = UPDATE_DEPTH - 1
"""Update chunks that arrive or are worked on; one more leaves."""


class Work(Protocol):
    """Something that native threads do."""

    def wait(self) -> bool:
        """Block until it is done."""

    def done(self) -> bool:
        """True when wait() would not block."""

    def span_ns(self) -> tuple[int, int]:
        """Start and end, in time.perf_counter_ns."""


class Optimizer(Protocol):
    """What the update lane needs of the optimizer, which knows no tier."""

    def apply(
        self, unit: str, elements: Elements, planes: Mapping[Kind, torch.Tensor], grad: torch.Tensor
    ) -> Work | None:
        """Begin AdamW in place on a run of a unit's elements. None: done, or enqueued on the GPU."""

    def accumulate(self, unit: str, total: torch.Tensor, part: torch.Tensor, *, group: int) -> None:
        """Add one group's fp32 gradient in RAM; after the last, round to the compute dtype in place and measure."""

    def check(self, unit: str) -> None:
        """Raise NonFiniteError when the unit's measured gradient is not finite."""


class Applied:
    """AdamW under way on a unit in RAM. Its leases end when somebody has waited for it."""

    def __init__(self, work: Work, leases: contextlib.ExitStack) -> None:
        """Made by the update lane, which goes on to the next unit meanwhile, so that the threads never run dry."""
        self._work, self._leases, self._lock = work, leases, threading.Lock()

    def wait(self) -> None:
        """Block until it is done; any thread, any number of times."""
        self._work.wait()
        with self._lock:
            self._leases.close()

    def done(self) -> bool:
        """True when wait() would not block."""
        return self._work.done()

    def span_ns(self) -> tuple[int, int]:
        """Start and end, in time.perf_counter_ns."""
        return self._work.span_ns()


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
        self._lease.release()
        self._player.recorder.access(self._access, self._cause, self._asked, self._entered, left)
        self._player.gate.open_to(len(self._player.accesses))
        if self._player.timeline is None:  # nothing is known of the next use: make room
            self._player.forget_weights(self._access.unit)


class Player:
    """Plays timelines. One per run; `close` stops its lanes."""

    def __init__(
        self,
        store: TieredStore,
        units: Sequence[UnitSpec],
        placement: Placement,
        policy: Policy,
        optimizer: Optimizer,
    ) -> None:
        """Register all blocks and slots with the store, which must be fresh, and start the lanes."""
        self.store, self.placement, self.policy = store, placement, policy
        self.units = {unit.name: unit for unit in units}
        self._optimizer = optimizer
        self._orders: dict[str, tuple[Access, ...]] = {}
        self._timelines: dict[tuple[str, bool], Timeline] = {}
        self.timeline: Timeline | None = None
        """What is being played; None while recording."""
        self.accesses: list[Access] = []
        """Uses of this pass so far, in order."""
        self._pass = ""
        self._loads: dict[int, Transfer] = {}
        self._updates: dict[str, Transfer] = {}
        self._grads: dict[str, Lease] = {}
        self._stashed: list[tuple[str, torch.Size, torch.dtype]] = []
        self._fetched: dict[str, tuple[torch.Tensor, Transfer]] = {}
        self._ahead: deque[tuple[str, Elements]] = deque()
        self._pending = False
        self._is_closed = False
        self._exchange: Transfer | None = None
        """The job that takes streamed state home and brings it again."""
        self._is_ahead = False
        """Streamed state is on the GPU, or on its way there, for the next update."""
        self._busy = {"load": "ram_to_gpu", "update": "update", "update_gpu": "state_to_gpu"}
        self.demanded: Counter[str] = Counter()
        """Bytes per queue that the placement demanded of the passes and updates so far."""
        self.gate = Gate()
        self.recorder = Recorder()
        self.blocks = UnitBlocks(store, self.units, placement, policy)
        # What only decides and waits has no stream. The immediate mode looks at sums of squares on the GPU.
        clocks = {"load": None, "update": None if policy.deferred else store.clock, "update_gpu": store.clock}
        self._lanes = {name: Queue(name, clock) for name, clock in clocks.items()}

    # ------------------------------------------------------------------ passes

    def begin(self, name: str) -> None:
        """Start a pass, `train` or `evaluate`: play its timeline, or record its order the first time."""
        self._pass, self.accesses, self._loads = name, [], {}
        self._stashed.clear()
        self._fetched.clear()
        self.gate.reset()
        for exchange in self._exchanges():
            if exchange.failed():
                exchange.wait()
        if name not in self._orders:
            self.drain()
            self.timeline = None
            return
        updates, self._pending = self._pending, False
        if (name, updates) not in self._timelines:
            self._timelines[name, updates] = build(self._orders[name], self.placement, updates=updates)
        self.timeline = self._timelines[name, updates]
        self._demand(self.timeline, updates=updates)
        streamed = [update for update in self.timeline.updates if update.unit in self.placement.streamed]
        gradients = mark(self.store.clock, "gradients")
        for update in self.timeline.updates:
            if update.unit not in self.placement.streamed:
                self._submit_update(update, gradients)
        first_loads: dict[str, Transfer] = {}
        for load in self.timeline.loads:
            transfer = self._lanes["load"].submit(load.unit, 0, partial(self._load, load))
            self._loads[load.access] = transfer
            first_loads.setdefault(load.unit, transfer)
        for update in streamed:  # in the slot that its weights are loaded into
            self._submit_update(update, gradients, first_loads[update.unit])
        if name == "train":
            self._submit_exchange(goes_home=updates, comes_again=True)

    def end(self) -> None:
        """End a pass: its order is known from now on, and no weights stay in GPU slots.

        Raises:
            TimelineError: units of the recorded order were not used.
        """
        if self.timeline is not None and len(self.accesses) < len(self.timeline.accesses):
            left = self.timeline.accesses[len(self.accesses)]
            self.cancel()
            raise TimelineError(
                f"the pass ended before {left.unit} ({left.phase}, group {left.group}), which step 1 used. megatier "
                "needs the same order of units in every step."
            )
        if self.timeline is None:
            on_demand = [
                Load(access.unit, index, 0, None, -1)
                for index, access in enumerate(self.accesses)
                if self.placement.homes[access.unit, Kind.WEIGHT] is not Tier.GPU
            ]
            self._demand(Timeline(tuple(self.accesses), tuple(on_demand), ()), updates=False)
        self._orders.setdefault(self._pass, tuple(self.accesses))
        self._evict_weights()

    def cancel(self) -> None:
        """Leave a pass half-way: loads that wait for compute are given up, updates that are due still run."""
        self.gate.abandon()
        for transfer in (*self._loads.values(), *self._updates.values(), *self._exchanges()):
            transfer.over()
        self._evict_weights()

    def defer_updates(self) -> None:
        """All gradients are final: the next pass, or `drain`, updates every unit."""
        self._pending = True

    def drain(self) -> None:
        """Finish every update that is due and every write-back: the step is complete.

        Raises:
            TransferError, NonFiniteError: what stopped an update.
        """
        if self._pending:
            self._pending = False
            gradients = mark(self.store.clock, "gradients")
            for name, unit in self.units.items():
                self._submit_update(Update(name, None), gradients)
                for queue in ("nvme_to_ram", "ram_to_nvme"):
                    self.demanded[queue] += update_bytes(unit, self.placement, self.policy)
                if name in self.placement.streamed:
                    self.demanded["ram_to_gpu"] += self.blocks.weight_bytes(name)
            self._submit_exchange(goes_home=True, comes_again=False)
        for transfer in (*self._updates.values(), *self._exchanges()):
            transfer.wait()
        for name in self.units:
            for kind in self.blocks.kinds:
                self.store.settle(block_key(name, kind))
        for name in self.placement.streamed:
            self.forget_weights(name)

    def planned(self, name: str, *, updates: bool) -> Timeline:
        """The timeline of a recorded pass."""
        return build(self._orders[name], self.placement, updates=updates)

    def take_events(self) -> list[TraceEvent]:
        """Everything that ended since the last call; waits for moves in flight."""
        return self.recorder.take(self.store.take_log())

    def close(self) -> None:
        """Abandon what waits for compute, or has not begun, and stop the lanes. `drain` first to finish a step."""
        self._is_closed = True
        self.gate.abandon()
        for lane in self._lanes.values():
            lane.close()

    # ------------------------------------------------------------------ compute's side

    def enter(self, unit: str, phase: Phase, group: int) -> Use:
        """The unit's weights on the GPU; waits for them and notes the stall.

        Raises:
            TimelineError: the order is not the recorded one.
            TransferError, IntegrityError: the weights could not be brought.
        """
        asked = Instant(self.store.clock)
        access, index = Access(unit, phase, group), len(self.accesses)
        if self.timeline is not None and (
            index >= len(self.timeline.accesses) or self.timeline.accesses[index] != access
        ):
            raise TimelineError(
                f"use {index} of this pass is {unit} ({phase}, group {group}), not what step 1 recorded. megatier "
                "needs the same order of units in every step; layer drop and data-dependent depth are not supported."
            )
        self.accesses.append(access)
        causes: Counter[str] = Counter()
        for transfer in (self._updates.get(unit), self._loads.get(index)):
            if transfer is not None:
                self._wait(transfer, causes)
        key = block_key(unit, Kind.WEIGHT)
        for transfer in self.store.prefetch(key, Tier.GPU, wait=True):
            self._wait(transfer, causes)
        lease = self.store.lease(key, Tier.GPU)
        cause = causes.most_common(1)[0][0] if causes else "ram_to_gpu"
        return Use(self, access, lease, asked, cause)

    def take_grad(self, unit: str) -> torch.Tensor:
        """A GPU buffer for the unit's gradient of this group: uint8, contents unspecified unless `sums_here`."""
        lease = self._grads[unit] = self.store.lease(
            grad_key(unit), Tier.GPU, fresh=not self.sums_here(unit), wait=True
        )
        return lease.bytes

    def ship_grad(self, unit: str, *, group: int) -> None:
        """Hand a group's gradient over; after the last group the unit's gradient is final.

        In the immediate mode its update starts at once.
        """
        key, last = grad_key(unit), group == self.policy.groups - 1
        self._grads.pop(unit).release()
        if group and (summed := self._updates.get(unit)) is not None:
            summed.wait()  # this gradient takes the place of the last group's
        if self.placement.grad_homes[unit] is not Tier.GPU:
            self.store.mark_dirty(key, Tier.GPU)
            self.store.write_back(key, Tier.GPU, wait=True)
            self.store.evict(key, Tier.GPU)
            if self.policy.groups > 1:
                self._updates[unit] = self._lanes["update"].submit(unit, 0, partial(self._accumulate, unit, group))
        if last and not self.policy.deferred:
            self._submit_update(Update(unit, None), mark(self.store.clock, unit))

    def sums_here(self, unit: str) -> bool:
        """True where the gradient's groups are added up in its home on the GPU."""
        return self.placement.grad_homes[unit] is Tier.GPU

    def drain_gradients(self) -> None:
        """Wait until every gradient of the step is summed and measured (and, in the immediate mode, applied)."""
        self.recorder.collect(self.store.take_log())  # while the device is still at work
        for transfer in self._updates.values():
            transfer.wait()

    def stash(self, unit: str, tensor: torch.Tensor) -> None:
        """Start copying an activation (contiguous, on the GPU) to its place in RAM."""
        self.store.push(activation_key(unit), tensor)
        self._stashed.append((unit, tensor.shape, tensor.dtype))

    def fetch(self, unit: str) -> torch.Tensor:
        """A stashed activation back on the GPU, ordered before what compute does next; and the one before it, ahead."""
        if unit not in self._fetched:
            self._fetch_last(unit)
        tensor, transfer = self._fetched.pop(unit)
        transfer.order()
        if self._stashed:
            self._fetch_last(self._stashed[-1][0])
        return tensor

    def _fetch_last(self, unit: str) -> None:
        """Start bringing the activation that was stashed last: a backward needs them in that order."""
        index = max(i for i, (name, _, _) in enumerate(self._stashed) if name == unit)
        _, shape, dtype = self._stashed.pop(index)
        tensor = torch.empty(shape, dtype=dtype, device=self.store.device)
        self._fetched[unit] = tensor, self.store.pull(activation_key(unit), tensor)

    def _wait(self, transfer: Transfer, causes: Counter[str]) -> None:
        while not transfer.issued(WAIT_SLICE_S):
            before = (*transfer.after, *transfer.behind)
            waits_for = next((other.queue for other in before if not other.done()), transfer.queue)
            causes[self._busy.get(waits_for, waits_for)] += 1
        if not transfer.done():
            causes[transfer.queue] += 1
        transfer.order()

    # ------------------------------------------------------------------ the lanes' side

    def _load(self, load: Load) -> None:
        self._make_room("load", load)
        # A streamed unit is updated in its slot, so there the update comes behind the load.
        if load.unit not in self.placement.streamed and (update := self._updates.get(load.unit)) is not None:
            self._busy["load"] = "update"
            update.wait()
        self._busy["load"] = "ram_to_gpu"
        self.store.prefetch(block_key(load.unit, Kind.WEIGHT), Tier.GPU, wait=True)

    def _make_room(self, lane: str, load: Load) -> None:
        self._busy[lane] = "slot"
        self.gate.wait_for(load.after_access + 1)
        if load.evicts is not None:
            self.store.evict(block_key(load.evicts, Kind.WEIGHT), Tier.GPU)

    def _submit_update(self, update: Update, gradient: Transfer | None, load: Transfer | None = None) -> None:
        """After the point of compute that made the gradient, where compute is asynchronous.

        Behind the load of a streamed unit's weights, even one given up: an update that is due has to run.
        """
        unit = update.unit
        after = [gradient] if gradient is not None else []
        behind = [load] if load is not None else []
        work: Callable[[], Applied | None]
        if self.placement.updater(unit) is Tier.GPU:
            lane, work = self._lanes["update_gpu"], partial(self._update_on_gpu, unit)
        else:
            self._ahead.extend((unit, span) for span in self.blocks.chunks(unit))
            lane, work = self._lanes["update"], partial(self._update, update)
        self._updates[unit] = transfer = lane.submit(unit, 0, work, after, behind)
        if lane.name == "update_gpu":
            self.recorder.watch(transfer)
        if unit in self.placement.streamed:
            size = self.blocks.passing_bytes(unit)
            self.demanded["state_to_gpu"] += 0 if self._is_ahead else size
            self.demanded["state_to_ram"] += size
            self.demanded["gpu_to_ram"] += self.blocks.weight_bytes(unit)

    def _check(self, unit: str) -> None:
        if self._is_closed:
            raise StepAbandonedError(f"the run was closed before {unit} was updated")
        if not self.policy.deferred:
            self._optimizer.check(unit)

    def _update_on_gpu(self, unit: str) -> None:
        """AdamW where the state is at home on the GPU, or came to it; then the weights lie in the forward's slot."""
        self._check(unit)
        (elements,) = self.blocks.chunks(unit)
        streamed = unit in self.placement.streamed
        if streamed:
            # Kernels start in the order in which they were enqueued, also on different streams: one that waits on its
            # stream for a copy would hold up compute. So the host waits.
            for transfer in self.store.prefetch(block_key(unit, Kind.WEIGHT), Tier.GPU, wait=True):
                transfer.wait()
        with (
            self.blocks.grad_lease(unit, elements) as grad,
            self.blocks.open_state(unit, elements, self.blocks.kinds, streamed=streamed) as state,
        ):
            if (work := self._optimizer.apply(unit, elements, state.planes, grad.bytes)) is not None:
                work.wait()  # on the CPU that stands for a GPU
            state.write_back()

    def _submit_exchange(self, *, goes_home: bool, comes_again: bool) -> None:
        """Behind all updates: streamed state home, and to the GPU again for the next update."""
        streamed = self.placement.streamed
        if not streamed:
            return
        if comes_again and (goes_home or not self._is_ahead):
            self.demanded["state_to_gpu"] += sum(map(self.blocks.passing_bytes, streamed))
        self._is_ahead = comes_again
        on_cpu = [transfer for unit, transfer in self._updates.items() if self.placement.updater(unit) is Tier.RAM]
        work = partial(self._exchange_state, on_cpu if goes_home else [], goes_home, comes_again)
        self._exchange = self._lanes["update_gpu"].submit("streamed state", 0, work)

    def _exchange_state(self, on_cpu: Sequence[Transfer], goes_home: bool, comes_again: bool) -> None:
        for transfer in on_cpu:
            transfer.over()
        for unit in self.placement.streamed if goes_home else ():
            self.blocks.return_state(unit)
        for unit in self.placement.streamed if comes_again else ():  # as soon as the old bytes are home
            if not self._is_closed:
                self.blocks.fetch_state(unit)

    def _exchanges(self) -> list[Transfer]:
        return [self._exchange] if self._exchange is not None else []

    def _update(self, update: Update) -> Applied | None:
        """AdamW on one unit, and its gradient's slot free again, whatever happens."""
        try:
            self._check(update.unit)
            if self.policy.deferred and not self.blocks.spilled(update.unit):
                return self._begin_update(update.unit)
            self._update_chunks(update.unit, feeds=update.load is not None and self._may_feed(update.load))
            return None
        finally:
            while self._ahead and self._ahead[0][0] == update.unit:
                self._ahead.popleft()
            if self.policy.groups == 1 and self.placement.grad_homes[update.unit] is None:
                self.store.evict(grad_key(update.unit), Tier.RAM)

    def _begin_update(self, unit: str) -> Applied | None:
        (elements,) = self.blocks.chunks(unit)
        with contextlib.ExitStack() as leases:
            grad = leases.enter_context(self.blocks.grad_lease(unit, elements))
            state = leases.enter_context(self.blocks.open_state(unit, elements, self.blocks.kinds))
            start = time.perf_counter_ns()
            work = self._optimizer.apply(unit, elements, state.planes, grad.bytes)
            leases.callback(state.write_back)
            if work is None:
                self.recorder.work("update", unit, start, time.perf_counter_ns())
                return None
            leases.callback(lambda: self.recorder.work("update", unit, *work.span_ns()))
            return Applied(work, leases.pop_all())

    def _may_feed(self, load: Load) -> bool:
        """True once there is room for the weights on the GPU; False when the step that wanted them was given up."""
        try:
            self._make_room("update", load)
        except StepAbandonedError:
            return False
        return True

    def _update_chunks(self, name: str, *, feeds: bool) -> None:
        """Chunk by chunk: read ahead, update, feed the load, write back."""
        for elements in self.blocks.chunks(name):
            self._busy["update"] = "nvme_to_ram" if self.blocks.spilled(name) else "gpu_to_ram"
            self._read_ahead()
            self._ahead.popleft()
            with (
                self.blocks.grad_lease(name, elements) as grad,
                self.blocks.open_state(name, elements, self.blocks.kinds) as state,
            ):
                self._busy["update"] = "update"
                start = time.perf_counter_ns()
                if (work := self._optimizer.apply(name, elements, state.planes, grad.bytes)) is not None:
                    work.wait()
                self.recorder.work("update", name, start, time.perf_counter_ns())
                state.write_back()
                if feeds:
                    span = self.blocks.span(name, Kind.WEIGHT, elements)
                    self.store.prefetch(block_key(name, Kind.WEIGHT), Tier.GPU, span, wait=True)

    def _read_ahead(self) -> None:
        for name, elements in list(self._ahead)[:CHUNK_DEPTH]:
            for kind in self.blocks.spilled(name):
                self.store.prefetch(block_key(name, kind), Tier.RAM, self.blocks.span(name, kind, elements), wait=True)

    def _accumulate(self, unit: str, group: int) -> None:
        try:
            with self.store.lease(sum_key(unit), Tier.RAM) as total, self.store.lease(grad_key(unit), Tier.RAM) as part:
                self._optimizer.accumulate(unit, total.bytes, part.bytes, group=group)
        finally:
            self.store.evict(grad_key(unit), Tier.RAM)

    # ------------------------------------------------------------------ bookkeeping

    def _demand(self, timeline: Timeline, *, updates: bool) -> None:
        trains = any(access.phase is Phase.BACKWARD for access in timeline.accesses)
        immediate = trains and not self.policy.deferred
        self.demanded.update(
            demanded_bytes(
                timeline,
                self.placement,
                self.units,
                self.policy,
                gradients=trains,
                updates=updates or immediate,
            )
        )

    def forget_weights(self, unit: str) -> None:
        """Drop a unit's weights from its GPU slot, where it has one."""
        if self.placement.homes[unit, Kind.WEIGHT] is not Tier.GPU:
            self.store.evict(block_key(unit, Kind.WEIGHT), Tier.GPU)

    def _evict_weights(self) -> None:
        for name in self.units:
            self.forget_weights(name)
