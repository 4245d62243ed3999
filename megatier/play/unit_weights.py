"""Brings weights to the GPU, and into compute's hands.

Compute asks for a unit (`enter`), gets its bytes on the GPU, and gives them back (`leave`). Ahead of it the queue
`load` brings weights into GPU slots in the timeline's order, each as soon as the access that it displaces is over.
Without a timeline (the first step, the first evaluation) every load happens on demand and the order is recorded.

Threads: the thread that computes calls `enter`, `leave`, `stash` and `fetch` (autograd's, in a backward). Loads run on
the queue's thread.
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
from megatier.play.passes import Orders, Pass
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
    """A unit's weights in compute's hands, from `enter` to `leave`."""

    def __init__(self, weights: UnitWeights, access: Access, lease: Lease, asked: Instant, cause: str) -> None:
        """Note a lease that `UnitWeights.enter` has taken; nobody else makes a use."""
        self._weights = weights
        self.access = access
        """The access of the pass that this is."""
        self.lease = lease
        """The lease that holds the weights."""
        self.asked = asked
        """When compute asked for them."""
        self.cause = cause
        """The queue that compute waited for longest."""
        self.entered = Instant(weights.clock)
        """When compute got them."""
        self.bytes = lease.bytes
        """The weights: uint8 [weight block] on the GPU."""

    def leave(self) -> None:
        """Give the weights back; their slot may be filled again once compute enqueued so far is over."""
        self._weights.leave(self)


class UnitWeights:
    """The weights of all units, as compute uses them in the present pass."""

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
            updates: a unit's weights are used after its update.
            gradients: sums of groups come to the GPU when the unit's weights do.
            gate: told of each access that is over.
            recorder: notes uses.
            offload: takes activations.
            orders: plans what is left of a pass that leaves its course.
            moves: says what a load moves.
            demand: counts the bytes that move.
            collectives: gathers weights of which this rank has a shard; None: it is alone, and has all of them.
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
        """The last gathers that were submitted, as many as there are slots for shards."""
        self._pass = Pass("")
        self._held: list[Lease] = []
        """The leases of weights that compute has in its hands."""

        # The queue decides and waits, and moves nothing itself. So it needs no stream.
        self.queue = Queue("load")
        """The queue `load`."""
        recorder.busy["load"] = "ram_to_gpu"

    # ------------------------------------------------------------------ compute's side

    def begin_leg(self, leg: Leg) -> None:
        """Say that a forward or backward of a training pass follows. On another course its loads are planned anew.

        Raises:
            TimelineError: see `Pass.check_can_replan`.
        """
        played = self._pass
        played.course += leg
        if played.is_on_course:
            return
        played.check_can_replan(is_alone=self._collectives is None)

        # An interrupt tears nothing so far: weights in slots are copies.
        with self._recorder.waiting(self._recorder.busy["load"]):
            self._give_up()
        self._orders.replan(played)
        if played.timeline is None:
            played.sums_ahead = frozenset()
            return

        # An interrupt in here would leave a load that nobody waits for.
        played.sums_ahead = self._moves.sums_ahead(played.timeline)
        with self._store.consistency.change:
            for load in played.timeline.items:
                assert isinstance(load, Load), "nothing else is left of a pass of one rank"
                self._demand.add(self._moves.of(load))
                self.submit(load)

    def enter(self, unit: str, phase: Phase, group: int) -> Use:
        """Return the unit's weights on the GPU; waits for them and notes the stall.

        Raises:
            TimelineError: the order is not the recorded one.
            TransferError, IntegrityError: the weights could not be brought.
        """
        self._store.check_process()
        access = Access(unit, phase, group)
        if phase is Phase.BACKWARD and not self._pass.course.endswith(Leg.BACKWARD):
            self.begin_leg(Leg.BACKWARD)
        if not self._pass.expects(access):
            self.pass_over(access)
        self._pass.used.add((unit, group))

        # Before the wait for the weights, so that the sum comes meanwhile.
        index = len(self._pass.accesses)
        if index in self._pass.sums_ahead:
            self._gradients.fetch_sum(unit)
        use = self._take_use(access)
        if phase is Phase.BACKWARD:
            self._offload.ask_ahead()
        return use

    def leave(self, use: Use) -> None:
        """See `Use.leave`."""
        left = Instant(self.clock)

        # An interrupt between the two would leave a lease that is given back twice.
        with self._store.consistency.change:
            use.lease.release()
            self._held.remove(use.lease)

        self._recorder.access(use.access, use.cause, use.asked, use.entered, left)

        # The gate opens after the release: a load that it lets through evicts these weights, and a lease forbids that.
        num_over = len(self._pass.accesses)
        self._gate.open_to(num_over)

        # Without a timeline nothing is known of the unit's next use, so it makes room for others.
        if self._pass.timeline is None:
            self._blocks.drop_weights(use.access.unit)

    def stash(self, unit: str, tensor: torch.Tensor) -> None:
        """Take an activation home; see `Offload.stash`."""
        with self._recorder.waiting("ram_to_nvme" if self._spills(unit) else "gpu_to_ram"):
            self._offload.stash(unit, tensor)

    def stash_beside(self, unit: str, tensor: torch.Tensor) -> bool:
        """Take another tensor of an activation home; see `Offload.stash_beside`."""
        with self._recorder.waiting("ram_to_nvme" if self._spills(unit) else "gpu_to_ram"):
            return self._offload.stash_beside(unit, tensor)

    def fetch(self, unit: str) -> list[torch.Tensor]:
        """Bring an activation back; see `Offload.fetch`."""
        with self._recorder.waiting("nvme_to_ram" if self._spills(unit) else "ram_to_gpu"):
            fetched = self._offload.fetch(unit)

        # Weights that come on demand take the same way, in order. If the next activation went first, compute would wait
        # for that as well, through drives and all. So without a timeline it is asked for when the weights were.
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

        # An access that an update feeds has no load of its own: its weights are there after the update.
        causes: Counter[str] = Counter()
        update = self._updates.latest(unit)
        load = self._pass.loads.get(index)
        for transfer in (update, load):
            if transfer is not None:
                self._wait(transfer, causes)

        # Without a timeline, or if an update could not feed its load, this brings the weights on demand.
        key = self._blocks.compute_key(unit)
        for transfer in self._on_demand(unit, key, causes):
            self._wait(transfer, causes)

        # An interrupt between the lease and its entry would leave a lease that nobody gives back.
        with self._store.consistency.call:
            lease = self._store.lease(key, Tier.GPU)
            self._held.append(lease)

        return Use(self, access, lease, asked, main_cause(causes))

    def _give_up(self) -> None:
        """Give up the loads of accesses that have not come yet, and empty the slots. Compute holds no weights."""
        timeline = self._pass.timeline
        assert timeline is not None, "nothing was loaded ahead"
        done = len(self._pass.accesses)
        self._gate.abandon()
        for item in timeline.items:
            if item.access < done:
                continue

            # A load that began was moved, and counts. If a move failed, the next access raises its error.
            transfer = self._pass.loads.pop(item.access, None)
            if transfer is not None and not transfer.wait_for_end():
                moves = self._moves.of(item)
                self._demand.take_back(moves)

        self.evict()
        self._gate.reset()
        self._gate.open_to(done)

    def _on_demand(self, unit: str, key: str, causes: Counter[str]) -> list[Transfer]:
        """Start bringing a unit's weights, unless a load did; returns what brings them."""
        if self._collectives is not None:
            if self._pass.timeline is not None:
                return []
            return [self._collectives.gather(unit)]

        began = time.monotonic()
        with HOST_WAIT:
            transfers = self._store.prefetch(key, Tier.GPU, wait=True)

        # Slots may have to become free first. A vote stands for a slice of time.
        waited_s = time.monotonic() - began
        if waited_s >= WAIT_SLICE_S:
            causes["slot"] += int(waited_s / WAIT_SLICE_S)
        return transfers

    def _wait(self, transfer: Transfer, causes: Counter[str]) -> None:
        """Order compute behind a transfer, and count per time slice which queue it waited for."""
        with HOST_WAIT:
            self._recorder.wait_until_started(transfer, causes)

            # With CUDA its copy may still run. Compute is enqueued behind it, and the host goes on.
            if not transfer.done():
                causes[transfer.queue] += 1
            transfer.wait_on_stream()

    # ------------------------------------------------------------------ the player's side

    def begin(self, played: Pass) -> None:
        """Begin a pass, in which nothing was used yet."""
        self._pass = played
        self._offload.forget()
        self._gathers.clear()

    def submit(self, load: Load) -> Transfer:
        """Append a load of the present pass to the queue; returns what brings all that this rank has of the weights.

        `gather` follows, once the update of a streamed unit was submitted.
        """
        if self._collectives is None:
            work = partial(self._load, load)
            transfer = self.queue.submit(load.unit, 0, work)
            self._pass.loads[load.access] = transfer
            return transfer

        # A shard needs a slot. That of the gather before the last one is free when that is over.
        all_slots_taken = len(self._gathers) == SLOTS_MIN
        before = [self._gathers[0]] if all_slots_taken else []
        work = partial(self._bring, load.unit)
        return self.queue.submit(load.unit, 0, work, follows=before)

    def gather(self, load: Load, own: Transfer) -> None:
        """Append the gather of a load to the queue `ranks`, if ranks share the state.

        Args:
            load: the load.
            own: what `submit` returned: it brings this rank's shard.
        """
        if self._collectives is None:
            return

        # A streamed unit is updated where its shard came to. Any other one is updated before that.
        shard_ready = [own]
        update = self._updates.latest(load.unit) if load.updates else None
        if update is not None:
            shard_ready.append(update)

        transfer = self._collectives.submit(load, shard_ready)
        self._gathers.append(transfer)
        self._pass.loads[load.access] = transfer

    def pass_over(self, access: Access | None) -> None:
        """Use and leave the accesses that this pass leaves out.

        They have loads and updates like any other, unless it was known that they would be left out. Later loads wait
        until they are over.

        Args:
            access: the access before which it leaves them out; None: the end of the pass.

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

            # Before the next one: its gather may come after the scatter of what this one leaves out.
            if self._collectives is not None:
                self._collectives.pass_over()

    def sit_out(self, group: int) -> None:
        """Use and leave every access that is left, up to the end of a group, and hand over zeros for its gradients.

        Compute has given up half-way. Other ranks go on, and take this one's shards and its part of each scatter.

        Args:
            group: the last group that is left out.
        """
        timeline = self._pass.timeline
        collectives = self._collectives
        assert timeline is not None, "nothing is known of what is left"
        assert collectives is not None, "a rank that is alone cancels the pass"
        for access in timeline.accesses:
            self._pass.left_out.add((access.unit, access.group))

        # The access that failed was never left.
        done = len(self._pass.accesses)
        self._gate.open_to(done)
        collectives.pass_over()
        for access in timeline.accesses[done:]:
            if access.group > group:
                break
            self._take_use(access).leave()
            collectives.pass_over()

    def release_all(self) -> None:
        """Give back the weights of a forward or backward that was left half-way."""
        while self._held:
            with self._store.consistency.change:
                self._held.pop().release()

    def evict(self) -> None:
        """Drop all weights from GPU slots."""
        for unit in self._blocks.units:
            self._blocks.drop_weights(unit)
            self._blocks.drop_shard(unit)

    def forget(self) -> None:
        """Forget the pass and all weights in use, because the store takes all slots back."""
        self._pass = Pass("")
        self._held.clear()

    # ------------------------------------------------------------------ the queue's side

    def _load(self, load: Load) -> None:
        """Start bringing weights into a GPU slot, on the queue `load`."""
        self._recorder.busy["load"] = "slot"
        self._blocks.make_room(load, self._gate)
        self._bring(load.unit)

    def _bring(self, unit: str) -> None:
        """Start bringing what this rank has of a unit's weights to a slot, once the unit is updated."""
        # A streamed unit is updated in its slot, so there the update comes behind the load.
        busy = self._recorder.busy
        is_streamed = unit in self._blocks.placement.streamed
        update = None if is_streamed else self._updates.latest(unit)
        if update is not None:
            busy["load"] = "update"
            update.wait()

        busy["load"] = "ram_to_gpu"
        key = self._blocks.key(unit, Kind.WEIGHT)
        self._store.prefetch(key, Tier.GPU, wait=True)
