"""The jobs of a step: what each lane does, and which other jobs each job waits for. Pure.

The forecast simulates them. They are what the player would do: the items of the timeline in order, with the moves that
`Moves` gives for each, the uses of units by compute, and the slots that these wait for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from megatier.forecast.job_list import PIECES_MAX, JobList, nth_last
from megatier.forecast.lanes import adamw_work
from megatier.forecast.simulate import Job
from megatier.schedule.activations import SPILLING_MAX, AwayActivations
from megatier.schedule.moves import Gradient, Move, Moves
from megatier.schedule.placement import Placement
from megatier.schedule.policy import Policy
from megatier.schedule.rates import UPDATE_BYTES
from megatier.schedule.slots import ACTIVATION_SLOTS, CHUNK_DEPTH, MATRICES_CARRIED, SLOTS_MIN, update_depth
from megatier.schedule.timeline import Access, Exchange, Item, Load, Timeline, Update
from megatier.schedule.unit_spec import UnitSpec
from megatier.tier import Kind, Phase, Tier

ComputeSeconds = Mapping[tuple[str, Phase], float]
"""Seconds that one group's use of a unit takes, by unit and phase."""
ByUnit = dict[str, int]
"""A job for each unit."""
HOST_SECONDS = 0.03
"""Seconds of Python between two steps, in which no lane works."""
SUM_BYTES = {False: 12, True: 24}
"""Bytes of memory traffic, for each parameter, to add a group's gradient in RAM. The key says whether it is the last
group's, which is rounded and measured too."""


class StepJobs:
    """The jobs of several steps in a row."""

    def __init__(
        self,
        compute_seconds: ComputeSeconds,
        units: Sequence[UnitSpec],
        placement: Placement,
        policy: Policy,
        parameters_per_flop: float,
    ) -> None:
        """Begin before the first step.

        Args:
            compute_seconds: seconds that one group's use of a unit takes, by unit and phase. A missing one takes none.
            units: all units.
            placement: homes and slots.
            policy: groups and clipping.
            parameters_per_flop: parameters that AdamW on the GPU updates in the time of one operation of a product.
        """
        self._list = JobList(placement.chunk_elements)
        self._compute_seconds = compute_seconds
        self._units = {spec.name: spec for spec in units}
        self._placement = placement
        self._policy = policy
        self._parameters_per_flop = parameters_per_flop
        self._moves = Moves(self._units, placement, policy)
        self._last_end: int | None = None
        """The end of the step before, for which this one waits; None: this is the first step."""
        self._uses: list[int] = []
        """The compute job of each access of the step so far."""
        self._arrivals: ByUnit = {}
        """The job that brings a unit's weights to the GPU in this step."""

        # For each unit, the last job of each sort.
        self._grads: ByUnit = {}
        """The job that brought its gradient to where AdamW reads it."""
        self._updates: ByUnit = {}
        """The job that updated it."""
        self._speculated: ByUnit = {}
        """The job that updated it in this backward."""
        self._states: ByUnit = {}
        """The job that brought its state to the GPU, if it is streamed."""
        self._stashed: ByUnit = {}
        """The job that brought its activation home."""
        self._fetched: ByUnit = {}
        """The job that brings its activation back."""
        self._activations = AwayActivations()

        # A job may wait for a slot. Each of these keeps as many jobs as there are slots, and the first one empties the
        # slot that is free next.
        self._grad_slots: deque[int] = deque(maxlen=SLOTS_MIN)
        """The last jobs that emptied a GPU slot for gradients."""
        self._activation_slots: deque[int] = deque(maxlen=ACTIVATION_SLOTS)
        """The last jobs that emptied a RAM slot for activations."""
        self._copied: deque[int] = deque(maxlen=SPILLING_MAX)
        """The last copies to RAM of activations on their way to NVMe."""
        self._sums: deque[int] = deque(maxlen=placement.num_slots(Tier.RAM, Kind.GRAD))
        """The last sums that emptied a RAM slot for gradients."""
        self._carried: ByUnit = {}
        """By lane, the last job that carried matrices home: a lane carries one matrix after the other."""
        self._chunk_slots = update_depth(policy)
        """The RAM slots for update chunks of a kind."""
        self._updated_chunks: deque[int] = deque(maxlen=CHUNK_DEPTH)
        """The last updates of chunks. A read waits for one of them, because few chunks are read ahead."""
        self._written_chunks: deque[int] = deque(maxlen=self._chunk_slots)
        """The last writes that emptied a RAM slot for update chunks."""

    @property
    def jobs(self) -> list[Job]:
        """The jobs of all steps so far."""
        return self._list.jobs

    def follow_a_step(self) -> None:
        """Pretend that a step came before: its updates are due, and those of its backward are over."""
        end = self._list.add("host", "step", 0.0)
        self._last_end = end
        self._speculated = dict.fromkeys(self._placement.speculative, end)

    def step(self, timeline: Timeline) -> int:
        """Add a step. Return the job that ends it."""
        self._uses = []
        self._arrivals = {}
        last_uses = timeline.last_uses()
        offloaded = self._find_offloaded(timeline)

        # Units that the last backward updated are not updated again.
        self._updates = self._speculated
        self._speculated = {}
        items = deque(timeline.items)

        for index, access in enumerate(timeline.accesses):
            spec = self._units[access.unit]
            key = access.unit, access.group
            self._add_items(items, index)
            before = self._uses[-1] if self._uses else self._last_end
            activation = None
            if key in offloaded:
                activation = self._offload(access, before)

            # A fused head makes its gradient in the forward. Frozen units make none.
            is_last_use = last_uses[key] == index
            makes_grad = is_last_use and spec.num_trained > 0
            use = self._compute(access, activation, makes_grad=makes_grad)
            self._uses.append(use)
            if makes_grad:
                self._hand_over(spec, access.group, use, before)

        self._add_items(items, len(timeline.accesses))
        awaited = self._uses[-1], *self._sums, *self._list_awaited()
        self._last_end = self._list.add("host", "step", HOST_SECONDS, *awaited)
        return self._last_end

    # ------------------------------------------------------------------ compute and activations

    def _compute(self, access: Access, activation: int | None, *, makes_grad: bool) -> int:
        """Add a use of a unit, which waits for its weights, its activation and its update."""
        unit = access.unit
        weights = self._arrivals.get(unit)
        needs = [self._last_end, weights, activation]

        # In the immediate mode the update of this step comes after the use, and that of the step before is over.
        if self._policy.deferred:
            needs.append(self._updates.get(unit))
        if makes_grad:
            needs.append(self._grad_slot(unit))

        name = f"{unit} {access.phase} {access.group}"
        seconds = self._compute_seconds.get((unit, access.phase), 0.0)
        return self._list.add("compute", name, seconds, *needs)

    def _find_offloaded(self, timeline: Timeline) -> set[tuple[str, int]]:
        """Return the units and groups with an activation to offload.

        The last unit of a backward has none, because its input needs no gradient.
        """
        ends = {access.group: index for index, access in enumerate(timeline.accesses)}
        offloaded = set()
        for index, access in enumerate(timeline.accesses):
            spec = self._units[access.unit]
            is_last = index == ends[access.group]
            is_backward = access.phase is Phase.BACKWARD
            if is_backward and spec.activation_bytes and not is_last:
                offloaded.add((access.unit, access.group))
        return offloaded

    def _offload(self, access: Access, before: int | None) -> int | None:
        """Move a unit's input as `AwayActivations` says. Return the job that its use waits for.

        Args:
            access: the use.
            before: the job of the use before.
        """
        if access.phase is Phase.FORWARD:
            return self._stash(access.unit, before)

        unit = access.unit
        for asked in self._activations.fetch(unit):
            num_bytes = self._units[asked].activation_bytes
            moves = self._moves.unstash(asked, num_bytes)
            bring = self._list.chain if len(moves) == 1 else self._move_through_slots
            stashed = self._stashed.pop(asked)
            self._fetched[asked] = bring(moves, asked, stashed, before)
        return self._fetched.pop(unit)

    def _stash(self, unit: str, before: int | None) -> int | None:
        """Move a unit's input home. Return the job that its use waits for."""
        self._activations.stash(unit)
        num_bytes = self._units[unit].activation_bytes
        moves = self._moves.stash(unit, num_bytes)
        if len(moves) == 1:
            self._stashed[unit] = self._list.chain(moves, unit, before)
            return None

        # Compute waits for older copies. Otherwise it would make activations faster than the drives take them.
        oldest = self._copied[0] if len(self._copied) == SPILLING_MAX else None
        written = self._move_through_slots(moves, unit, before)
        self._stashed[unit] = written

        # The job before the last write is the copy to RAM of the same piece.
        self._copied.append(written - 1)
        return oldest

    def _move_through_slots(self, moves: Sequence[Move], unit: str, *after: int | None) -> int:
        """Move an activation through slots in RAM, piece by piece. Return the last job."""
        # There are more pieces in fact. Drives are as busy with these few, and the simulation is faster.
        last = -1
        slots = self._activation_slots
        for _ in range(PIECES_MAX):
            free = slots[0] if len(slots) == ACTIVATION_SLOTS else None
            last = self._list.add_piece(moves, unit, PIECES_MAX, free, *after)
            slots.append(last)
        return last

    # ------------------------------------------------------------------ weights and updates

    def _add_items(self, items: deque[Item], index: int) -> None:
        """Add the items that come before an access, or before the end of the pass."""
        while items and self._comes_before(items[0], index):
            self._add_item(items.popleft())

    def _comes_before(self, item: Item, index: int) -> bool:
        """Return whether an item has to be added before an access."""
        return item.access <= index

    def _add_item(self, item: Item) -> None:
        """Add the jobs of an item."""
        match item:
            case Update():
                self._update(item)
            case Load():
                self._load(item)
            case Exchange():
                self._exchange(item)

    def _load(self, load: Load) -> None:
        """Bring weights to the GPU when their slot is free and they are updated."""
        unit = load.unit
        spec = self._units[unit]
        moves = self._moves.load(unit)
        free = self._slot_free(load)

        # AdamW on a streamed unit works in the slot that this load fills, so it comes later.
        updated = None if load.updates else self._updates.get(unit)

        # One piece comes to RAM while the piece before moves on to the GPU.
        pieces = self._list.num_pieces(spec.num_elements) if len(moves) > 1 else 1
        arrived = self._list.chain(moves, unit, free, updated, pieces=pieces)
        self._arrivals[unit] = arrived
        if load.updates:
            self._update_streamed(spec, arrived)

    def _slot_free(self, load: Load) -> int | None:
        """Return the job after which the slot of a load is free."""
        # A slot that is empty when the pass begins is free at once.
        if load.after_access < 0:
            return self._last_end
        return self._uses[load.after_access]

    def _update(self, update: Update) -> None:
        """Update a unit where its state is at home."""
        unit = update.unit
        spec = self._units[unit]
        lane = self._placement.update_queue(unit)
        if lane == "update_nvme":
            self._update_spilled(spec, update.load)
            return

        # No drive moves its state, so there is nothing to overlap piece by piece.
        gradient = self._grads.get(unit)
        is_speculative = unit in self._placement.speculative
        updated = self._apply(lane, spec, 1, self._last_end, gradient, elsewhere=is_speculative)
        self._updates_of(unit)[unit] = updated

    def _update_spilled(self, spec: UnitSpec, fed: Load | None) -> None:
        """Update a unit with state on NVMe, piece by piece: read, update, feed, write."""
        unit = spec.name
        moves = self._moves
        gradient = self._grads.get(unit)
        pieces = 1 if spec.schema.by_matrix else self._list.num_pieces(spec.num_trained)
        is_speculative = unit in self._placement.speculative
        updated = -1

        for _ in range(pieces):
            # Reads wait for the gradient too, because state is read only for an update that is due.
            ahead = nth_last(self._updated_chunks, CHUNK_DEPTH)
            free = nth_last(self._written_chunks, self._chunk_slots)

            # New bytes of a speculative update have a slot of their own. The old ones leave theirs with the update.
            fresh = None
            if is_speculative:
                free = None
                fresh = nth_last(self._written_chunks, self._chunk_slots - CHUNK_DEPTH)
            needs = self._last_end, ahead, free, gradient
            read = self._list.add_piece(moves.read_state(unit), unit, pieces, *needs)
            updated = self._apply("update_nvme", spec, pieces, read, fresh, elsewhere=is_speculative)
            self._updated_chunks.append(updated)

            if fed is not None:
                slot = self._slot_free(fed)
                arrived = self._list.add_piece(moves.feed(unit), unit, pieces, updated, slot)
                self._arrivals[unit] = arrived

            written = self._list.add_piece(moves.write_state(unit), unit, pieces, updated)
            self._written_chunks.append(written)

        # Frozen weights lie behind the trained ones. No update feeds them, so they are loaded.
        if fed is not None and spec.frozen_elements:
            frozen = moves.load_frozen(unit)
            self._arrivals[unit] = self._list.chain(frozen, unit, updated)

        self._updates_of(unit)[unit] = updated

    def _updates_of(self, unit: str) -> ByUnit:
        """Return the table for a unit's update: a speculative one counts for the next step."""
        return self._speculated if unit in self._placement.speculative else self._updates

    def _update_streamed(self, spec: UnitSpec, arrival: int) -> int:
        """Update a streamed unit on the GPU. Return the job that takes its weights home."""
        unit = spec.name
        gradient = self._grads.get(unit)
        state = self._states.get(unit)
        updated = self._apply("update_gpu", spec, 1, arrival, gradient, state)
        self._updates[unit] = updated
        home = self._moves.return_weights(unit)
        return self._list.chain(home, unit, updated)

    def _apply(self, lane: str, spec: UnitSpec, pieces: int, *after: int | None, elsewhere: bool = False) -> int:
        """Do one of so many pieces of a unit's update; matrices are updated on the GPU. Return the job that ends it.

        Args:
            lane: the lane that updates.
            spec: the sizes of the unit.
            pieces: the number of pieces.
            after: the jobs that the update waits for.
            elsewhere: whether it writes to another generation.
        """
        unit = spec.name
        if not spec.schema.by_matrix:
            amount = adamw_work(spec, elsewhere=elsewhere) / pieces
            return self._list.add(lane, unit, amount, *after)

        moves = self._moves.carry(unit)
        products = spec.update_flops * self._parameters_per_flop
        amount = adamw_work(spec) + products
        if not moves:
            return self._list.add("update_gpu", unit, amount, *after)

        # Simulate PIECES_MAX matrices of equal size. The first one comes when all matrices of the unit before are home.
        there, back = moves
        home = self._carried.get(lane)
        homes = deque([home], maxlen=MATRICES_CARRIED)
        for _ in range(PIECES_MAX):
            arrived = self._list.add_piece([there], unit, PIECES_MAX, homes[0], *after)
            updated = self._list.add("update_gpu", unit, amount / PIECES_MAX, arrived)
            home = self._list.add_piece([back], unit, PIECES_MAX, updated)
            self._carried[lane] = home
            homes.append(home)
        return self._carried[lane]

    def _exchange(self, exchange: Exchange) -> None:
        """Move streamed state home after the CPU's updates, and back to the GPU."""
        # These moves would slow AdamW on the CPU, which needs the bandwidth of RAM (docs/decisions/0011).
        on_cpu = []
        for unit, job in self._updates.items():
            if self._placement.update_queue(unit) != "update_gpu":
                on_cpu.append(job)

        homes: ByUnit = {}
        for unit in exchange.home:
            moves = self._moves.return_state(unit)
            updated = self._updates[unit]
            homes[unit] = self._list.chain(moves, unit, *on_cpu, updated)

        # New bytes need the slot of the old ones.
        for unit in exchange.fetched:
            moves = self._moves.fetch_state(unit)
            left = homes.get(unit)
            self._states[unit] = self._list.chain(moves, unit, left, self._last_end)

    # ------------------------------------------------------------------ gradients

    def _grad_slot(self, unit: str) -> int | None:
        """Return the job that empties a GPU slot for a unit's gradient; None: a slot is free."""
        # A gradient that stays on the GPU needs no slot.
        stays = self._placement.grad_homes[unit] is Tier.GPU
        has_free = len(self._grad_slots) < SLOTS_MIN
        if stays or has_free:
            return None
        return self._grad_slots[0]

    def _hand_over(self, spec: UnitSpec, group: int, gradient_job: int, before: int | None) -> None:
        """Add the sum of the groups before to a group's gradient, and move it to where it waits.

        Args:
            spec: the sizes of the unit.
            group: the group.
            gradient_job: the use that makes the gradient.
            before: the use before.
        """
        unit = spec.name
        gradient = self._moves.gradient(unit, group)
        if gradient.fetched:
            shipped = self._grads[unit]
            arrived = self._list.chain(gradient.fetched, unit, shipped, before)

            # The addition takes almost no time, but it waits for the sum of the other groups.
            gradient_job = self._list.add("compute", f"{unit} sum", 0.0, gradient_job, arrived)
        self._ship(spec, gradient, gradient_job)

    def _ship(self, spec: UnitSpec, gradient: Gradient, gradient_job: int) -> None:
        """Move a sum of groups, or one group's gradient, to where it waits. Its update may follow."""
        unit = spec.name
        last = gradient_job
        if gradient.shipped:
            # There are slots only if groups are summed in RAM.
            slot = self._sums[0] if self._sums and len(self._sums) == self._sums.maxlen else None
            last = self._list.chain(gradient.shipped, unit, gradient_job, slot)

            # The GPU slot is free when the gradient has arrived in RAM or on NVMe.
            self._grad_slots.append(last)

        if gradient.sums_in_ram:
            traffic = spec.num_trained * SUM_BYTES[gradient.is_final]
            last = self._list.add("update", unit, traffic / UPDATE_BYTES, last)
            self._sums.append(last)

        # The update below looks for the gradient here.
        self._grads[unit] = last
        if gradient.update is not None:
            self._update(gradient.update)

    def _list_awaited(self) -> Iterable[int | None]:
        """Return what else the end of a step waits for: its updates, if they run in its backward."""
        return () if self._policy.deferred else self._updates.values()
