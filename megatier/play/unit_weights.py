"""The weights of units as compute uses them: loaded to the GPU ahead of time, lent to compute, and given back.

Compute calls `enter` to get a unit's bytes on the GPU, and `leave` to give them back. Ahead of it the queue `load`
brings weights into GPU slots in the timeline's order, each as soon as the access is over whose weights it evicts. In a
first step or evaluation there is no timeline, so weights are loaded on demand and the order is recorded.

Threads: the thread that computes calls `enter`, `leave`, `stash` and `fetch`; in a backward that is autograd's. Loads
run on the queue's thread.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from functools import partial

import torch

from megatier.host_wait import HOST_WAIT
from megatier.play.collectives import Collectives
from megatier.play.gate import Gate
from megatier.play.gradients import UnitGradients
from megatier.play.offload import Offload
from megatier.play.orders import Orders
from megatier.play.passes import Pass
from megatier.play.unit_blocks import UnitBlocks
from megatier.play.updates import Updates
from megatier.schedule.demand import Demand
from megatier.schedule.moves import Moves
from megatier.schedule.slots import SLOTS_MIN
from megatier.schedule.timeline import Access, Load
from megatier.store.lease import Lease
from megatier.store.queue import Queue
from megatier.store.stream_clock import Instant
from megatier.store.transfer import Transfer
from megatier.tier import Kind, Leg, Phase, Tier
from megatier.trace.recorder import WAIT_SLICE_S, Recorder, main_cause


class Use:
    """A use of a unit's weights by compute, from `enter` to `leave`."""

    def __init__(self, weights: UnitWeights, access: Access, lease: Lease, asked: Instant, cause: str) -> None:
        """Note a lease. Only `UnitWeights.enter` makes a use."""
        self._weights = weights
        self.access = access
        """The access of the pass."""
        self.lease = lease
        """The lease that holds the weights."""
        self.asked = asked
        """The time at which compute asked for the weights."""
        self.cause = cause
        """The queue that compute waited for longest."""
        self.entered = Instant(weights.clock)
        """The time at which compute got the weights."""
        self.bytes = lease.bytes
        """The weights: uint8 [weight block] on the GPU."""

    def leave(self) -> None:
        """Give the weights back. Their slot may be filled again after the compute that is enqueued so far."""
        self._weights.leave(self)


class UnitWeights:
    """The weights of all units in the current pass."""

    def __init__(
        self,
        *,
        blocks: UnitBlocks,
        updates: Updates,
        gradients: UnitGradients,
        gate: Gate,
        recorder: Recorder,
        offload: Offload,
        orders: Orders,
        moves: Moves,
        demand: Demand,
        collectives: Collectives | None,
    ) -> None:
        """Start the queue `load`.

        Args:
            blocks: the run's blocks.
            updates: the updates, for which uses of weights wait.
            gradients: fetches a unit's sum of groups when its backward begins.
            gate: counts the accesses that are over.
            recorder: records uses.
            offload: takes activations.
            orders: plans the rest of a pass that leaves its course.
            moves: the bytes that loads move.
            demand: adds up these bytes.
            collectives: the collectives between ranks; None: a single rank.
        """
        self._blocks = blocks
        self._store = blocks.store
        self.clock = blocks.store.clock
        """The clock on which uses are timed; None without a CUDA device."""
        self._updates = updates
        self._gradients = gradients
        self._gate = gate
        self._recorder = recorder
        self._offload = offload
        self._orders = orders
        self._moves = moves
        self._demand = demand
        self._collectives = collectives
        self._gathers: deque[Transfer] = deque(maxlen=SLOTS_MIN)
        """The last all-gathers that were submitted, at most one for each slot of shards."""
        self._pass = Pass("")
        self._leases_in_use: list[Lease] = []
        """The leases of weights that compute uses now."""

        # The queue moves nothing itself, so it needs no stream.
        self.queue = Queue("load")
        """The queue `load`."""
        recorder.busy["load"] = "ram_to_gpu"

    # ------------------------------------------------------------------ compute's side

    def begin_leg(self, leg: Leg) -> None:
        """Note that a forward or backward of a training pass begins. If it is not the planned one, plan the rest anew.

        Raises:
            TimelineError: see `Pass.check_can_replan`.
        """
        played = self._pass
        played.course += leg
        if played.is_on_course:
            return
        played.check_can_replan(is_alone=self._collectives is None)

        # An interrupt leaves state whole here, because weights in slots are copies.
        with self._recorder.waiting(self._recorder.busy["load"]):
            self._give_up()
        self._orders.replan(played)
        if played.timeline is None:
            played.sums_ahead = frozenset()
            return

        # An interrupt in here would leave a load for which nobody waits.
        played.sums_ahead = self._moves.sums_ahead(played.timeline)
        with self._store.consistency.change:
            for load in played.timeline.items:
                assert isinstance(load, Load), "the rest of a pass has only loads"
                self._demand.add(self._moves.of(load))
                self.submit(load)

    def enter(self, unit: str, phase: Phase, group: int) -> Use:
        """Wait for a unit's weights on the GPU, and return them. The wait is noted as a stall.

        Raises:
            TimelineError: the order is not the recorded one.
            TransferError, IntegrityError: the weights could not be loaded.
        """
        self._store.check_process()
        access = Access(unit, phase, group)
        if phase is Phase.BACKWARD and not self._pass.course.endswith(Leg.BACKWARD):
            self.begin_leg(Leg.BACKWARD)
        if not self._pass.expects(access):
            self.pass_over(access)
        self._pass.used.add((unit, group))

        # The sum comes while compute waits for the weights.
        index = len(self._pass.accesses)
        if index in self._pass.sums_ahead:
            self._gradients.fetch_sum(unit)
        use = self._take_use(access)
        if phase is Phase.BACKWARD:
            self._offload.ask_ahead()
        return use

    def leave(self, use: Use) -> None:
        """See `Use.leave`."""
        ended = Instant(self.clock)

        # An interrupt between the two would let the lease be released twice.
        with self._store.consistency.change:
            use.lease.release()
            self._leases_in_use.remove(use.lease)

        self._recorder.access(use.access, use.cause, use.asked, use.entered, ended)

        # The gate opens after the release, because a load behind it evicts these weights.
        num_over = len(self._pass.accesses)
        self._gate.open_to(num_over)

        # Without a timeline the next use is not known, so the weights make room for others.
        if self._pass.timeline is None:
            self._blocks.drop_weights(use.access.unit)

    def stash(self, unit: str, tensor: torch.Tensor) -> None:
        """Move an activation home; see `Offload.stash`."""
        with self._recorder.waiting("ram_to_nvme" if self._spills(unit) else "gpu_to_ram"):
            self._offload.stash(unit, tensor)

    def stash_beside(self, unit: str, tensor: torch.Tensor) -> bool:
        """Move another tensor of an activation home; see `Offload.stash_beside`."""
        with self._recorder.waiting("ram_to_nvme" if self._spills(unit) else "gpu_to_ram"):
            return self._offload.stash_beside(unit, tensor)

    def fetch(self, unit: str) -> list[torch.Tensor]:
        """Bring an activation back; see `Offload.fetch`."""
        with self._recorder.waiting("nvme_to_ram" if self._spills(unit) else "ram_to_gpu"):
            fetched = self._offload.fetch(unit)

        # Weights that are loaded on demand use the same queues. If the next activation were asked for before them,
        # compute would wait for it too. So without a timeline `enter` asks for it, after the weights.
        if self._pass.timeline is not None:
            self._offload.ask_ahead()
        return fetched

    def _spills(self, unit: str) -> bool:
        """Return whether a unit's activation goes on to NVMe."""
        return self._blocks.placement.activation_homes.get(unit) is Tier.NVME

    def _take_use(self, access: Access) -> Use:
        """Wait for the unit's update and the access's load, then lease the weights."""
        asked = Instant(self.clock)
        unit = access.unit
        index = len(self._pass.accesses)
        self._pass.accesses.append(access)

        # If an update feeds the access, its weights come with the update, and there is no load.
        causes: Counter[str] = Counter()
        update = self._updates.latest(unit)
        load = self._pass.loads.get(index)
        for transfer in (update, load):
            if transfer is not None:
                self._wait(transfer, causes)

        # Load on demand without a timeline, or if the update could not feed the load.
        key = self._blocks.compute_key(unit)
        for transfer in self._on_demand(unit, key, causes):
            self._wait(transfer, causes)

        # An interrupt between the two would leave a lease that nobody releases.
        with self._store.consistency.call:
            lease = self._store.lease(key, Tier.GPU)
            self._leases_in_use.append(lease)

        return Use(self, access, lease, asked, main_cause(causes))

    def _give_up(self) -> None:
        """Give up the loads of later accesses, and empty the slots. Compute must not use any weights."""
        timeline = self._pass.timeline
        assert timeline is not None, "nothing was loaded ahead"
        done = len(self._pass.accesses)
        self._gate.abandon()
        for item in timeline.items:
            if item.access < done:
                continue

            # A load that has begun counts. If it failed, the next access raises its error.
            transfer = self._pass.loads.pop(item.access, None)
            if transfer is not None and not transfer.wait_for_end():
                moves = self._moves.of(item)
                self._demand.take_back(moves)

        self.evict()
        self._gate.reset()
        self._gate.open_to(done)

    def _on_demand(self, unit: str, key: str, causes: Counter[str]) -> list[Transfer]:
        """Start to load a unit's weights, unless a load has. Return the transfers to wait for."""
        if self._collectives is not None:
            if self._pass.timeline is not None:
                return []
            return [self._collectives.all_gather(unit)]

        began = time.monotonic()
        with HOST_WAIT:
            transfers = self._store.prefetch(key, Tier.GPU, wait=True)

        # Slots may have to become free first. Causes are counted in slices of time.
        waited_s = time.monotonic() - began
        if waited_s >= WAIT_SLICE_S:
            causes["slot"] += int(waited_s / WAIT_SLICE_S)
        return transfers

    def _wait(self, transfer: Transfer, causes: Counter[str]) -> None:
        """Order compute behind a transfer, and count the queue for which it waits in each slice of time."""
        with HOST_WAIT:
            self._recorder.wait_until_started(transfer, causes)

            # With CUDA the copy may still run. Compute is enqueued behind it, and the host goes on.
            if not transfer.done():
                causes[transfer.queue] += 1
            transfer.wait_on_stream()

    # ------------------------------------------------------------------ the player's side

    def begin(self, played: Pass) -> None:
        """Begin a pass."""
        self._pass = played
        self._offload.forget()
        self._gathers.clear()

    def submit(self, load: Load) -> Transfer:
        """Append a load to the queue. Return the transfer that brings this rank's own weights.

        `submit_all_gather` follows, after the update of a streamed unit.
        """
        if self._collectives is None:
            work = partial(self._load, load)
            transfer = self.queue.submit(load.unit, 0, work)
            self._pass.loads[load.access] = transfer
            return transfer

        # The shard gets the slot of an earlier all-gather, so it waits until that is over.
        all_slots_taken = len(self._gathers) == SLOTS_MIN
        before = [self._gathers[0]] if all_slots_taken else []
        work = partial(self._bring, load.unit)
        return self.queue.submit(load.unit, 0, work, follows=before)

    def submit_all_gather(self, load: Load, shard_load: Transfer) -> None:
        """Append the all-gather of a load to the queue `ranks`, if ranks share the state.

        Args:
            load: the load.
            shard_load: the result of `submit`, which brings this rank's shard.
        """
        if self._collectives is None:
            return

        # A streamed unit is updated in the slot of its shard, and any other unit before its load.
        shard_ready = [shard_load]
        update = self._updates.latest(load.unit) if load.updates else None
        if update is not None:
            shard_ready.append(update)

        transfer = self._collectives.submit(load, shard_ready)
        self._gathers.append(transfer)
        self._pass.loads[load.access] = transfer

    def pass_over(self, access: Access | None) -> None:
        """Take and release the weights of the accesses that this pass leaves out.

        Such accesses have loads and updates, unless the plan knew of them, and later loads wait until they are over.

        Args:
            access: the next access that the pass has; None: the end of the pass.

        Raises:
            TimelineError: the order is not the recorded one.
        """
        trained = self._blocks.placement.grad_homes.keys()
        for recorded in self._pass.leave_out(access, trained):
            index = len(self._pass.accesses)
            if (recorded.unit, recorded.group) in self._pass.absent and index not in self._pass.loads:
                self._pass.accesses.append(recorded)
                self._gate.open_to(index + 1)
                continue
            self._take_use(recorded).leave()

            # The next all-gather may come after the reduce-scatter of this unit.
            if self._collectives is not None:
                self._collectives.pass_over()

    def sit_out(self, group: int) -> None:
        """Take and release the weights of all accesses up to the end of a group, with zeros as gradients.

        Compute has given up, but the other ranks go on. They need this rank's shards, and its part of each collective.

        Args:
            group: the last group that is left out.
        """
        timeline = self._pass.timeline
        collectives = self._collectives
        assert timeline is not None, "the rest of the pass is not known"
        assert collectives is not None, "a single rank cancels the pass"
        for access in timeline.accesses:
            self._pass.left_out.add((access.unit, access.group))

        # The access that failed has not opened the gate.
        done = len(self._pass.accesses)
        self._gate.open_to(done)
        collectives.pass_over()
        for access in timeline.accesses[done:]:
            if access.group > group:
                break
            self._take_use(access).leave()
            collectives.pass_over()

    def release_all(self) -> None:
        """Release the weights of a forward or backward that failed."""
        while self._leases_in_use:
            with self._store.consistency.change:
                self._leases_in_use.pop().release()

    def evict(self) -> None:
        """Drop all weights from GPU slots."""
        for unit in self._blocks.units:
            self._blocks.drop_weights(unit)
            self._blocks.drop_shard(unit)

    def forget(self) -> None:
        """Forget the pass and all weights in use, because the store takes all slots back."""
        self._pass = Pass("")
        self._leases_in_use.clear()

    # ------------------------------------------------------------------ the queue's side

    def _load(self, load: Load) -> None:
        """Start to load weights into a GPU slot, on the queue `load`."""
        self._recorder.busy["load"] = "slot"
        self._blocks.make_room(load, self._gate)
        self._bring(load.unit)

    def _bring(self, unit: str) -> None:
        """Start to load this rank's own weights of a unit, after the unit's update."""
        # A streamed unit is updated in its slot, after the load.
        busy = self._recorder.busy
        is_streamed = unit in self._blocks.placement.streamed
        update = None if is_streamed else self._updates.latest(unit)
        if update is not None:
            busy["load"] = "update"
            update.wait()

        busy["load"] = "ram_to_gpu"
        key = self._blocks.key(unit, Kind.WEIGHT)
        self._store.prefetch(key, Tier.GPU, wait=True)
