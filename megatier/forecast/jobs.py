"""Jobs: what each lane does in a step, and what each job waits for, as the player would play it. Pure.

The timeline has the items of a step in order, and `Moves` says what each takes over which queue, and what follows a
gradient. Here they become jobs, which the forecast simulates, with those of compute, and the slots each waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from megatier.forecast.job_list import PIECES_MAX, JobList
from megatier.schedule.activations import SPILLING_MAX, AwayActivations
from megatier.schedule.moves import Gradient, Move, Moves
from megatier.schedule.placement import Placement
from megatier.schedule.policy import Policy
from megatier.schedule.rates import UPDATE_BYTES
from megatier.schedule.slots import ACTIVATION_SLOTS, MATRICES_CARRIED, SLOTS_MIN, UPDATE_DEPTH
from megatier.schedule.timeline import Access, Exchange, Item, Load, Timeline, Update
from megatier.schedule.unit_spec import UnitSpec
from megatier.tier import Kind, Phase, Tier

ComputeSeconds = Mapping[tuple[str, Phase], float]
"""Seconds of one use of a unit by one group, by unit and phase."""
ByUnit = dict[str, int]
"""One job for each unit."""
HOST_SECONDS = 0.03
"""Seconds of Python between two steps, when nothing else is going on."""
SUM_BYTES = {False: 12, True: 24}
"""Memory traffic of adding a group's gradient in RAM, for one parameter, by whether it is the last group's: that one is
rounded and measured too."""


class StepJobs(JobList):
    """The jobs of some steps in a row, in the order of their lanes."""

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
            compute_seconds: seconds of one use of a unit by one group, by unit and phase. One that is missing takes
                none.
            units: all units.
            placement: homes, slots.
            policy: groups, clipping.
            parameters_per_flop: parameters that AdamW on the GPU updates while a product does one operation.
        """
        super().__init__(placement.chunk_elements)
        self._compute_seconds = compute_seconds
        self._units = {spec.name: spec for spec in units}
        self._placement = placement
        self._policy = policy
        self._parameters_per_flop = parameters_per_flop
        self._moves = Moves(self._units, placement, policy)
        self._last_end: int | None = None
        """The end of the last step, which lets the present one begin; None: this is the first."""
        self._uses: list[int] = []
        """The job that computes, for each access of the step so far."""
        self._arrivals: ByUnit = {}
        """The job that brings a unit's weights to the GPU in the step, by unit."""

        # By unit, the last job that did something for it.
        self._grads: ByUnit = {}
        """The job that brought its last gradient to where AdamW finds it."""
        self._updates: ByUnit = {}
        """The job that updated it."""
        self._speculated: ByUnit = {}
        """The job that updated it in the present backward."""
        self._states: ByUnit = {}
        """The job that brought its state to the GPU, if it is streamed."""
        self._stashed: ByUnit = {}
        """The job that brought its activation home."""
        self._fetched: ByUnit = {}
        """The job that brings its activation back."""
        self._activations = AwayActivations()

        # Slots are few, so a job may wait for the one that empties a slot. Each of these keeps as many jobs as there
        # are slots: the first one empties the slot that is free next.
        self._grad_slots: deque[int] = deque(maxlen=SLOTS_MIN)
        """The last jobs that emptied a GPU slot for gradients."""
        self._activation_slots: deque[int] = deque(maxlen=ACTIVATION_SLOTS)
        """The last jobs that emptied a RAM slot for activations."""
        self._copied: deque[int] = deque(maxlen=SPILLING_MAX)
        """The last copies to RAM of activations that spill."""
        self._sums: deque[int] = deque(maxlen=placement.num_slots(Tier.RAM, Kind.GRAD))
        """The last sums that emptied a RAM slot for gradients."""
        self._carried: ByUnit = {}
        """The last job that carried matrices home, by the lane that updates: a lane carries one after the other."""
        self._chunks: deque[int] = deque(maxlen=UPDATE_DEPTH)
        """The last writes that emptied a RAM slot for update chunks."""

    def follow_a_step(self) -> None:
        """Go on as if a step had been before: there are updates to do, and those of its backward are over."""
        end = self._add("host", "step", 0.0)
        self._last_end = end
        self._speculated = dict.fromkeys(self._placement.speculative, end)

    def step(self, timeline: Timeline) -> int:
        """Add a step; returns the job that ends it."""
        self._uses = []
        self._arrivals = {}
        last_uses = timeline.last_uses()
        offloaded = self._offloaded(timeline)

        # What the last backward updated is not updated again.
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

            # The last use may be a forward: that of a fused head makes its gradient. What is frozen makes none.
            is_last_use = last_uses[key] == index
            makes_grad = is_last_use and spec.num_trained > 0
            use = self._compute(access, activation, makes_grad=makes_grad)
            self._uses.append(use)
            if makes_grad:
                self._hand_over(spec, access.group, use, before)

        self._add_items(items, len(timeline.accesses))
        self._last_end = self._add(
            "host",
            "step",
            HOST_SECONDS,
            self._uses[-1],
            *self._sums,
            *self._awaited(),
        )
        return self._last_end

    # ------------------------------------------------------------------ compute and activations

    def _compute(self, access: Access, activation: int | None, *, makes_grad: bool) -> int:
        """Add one use of a unit, when its weights and its activation are there and its update is over."""
        unit = access.unit
        weights = self._arrivals.get(unit)
        needs = [self._last_end, weights, activation]

        # In the immediate mode the update of this step comes after the use, and that of the last step is over.
        if self._policy.deferred:
            needs.append(self._updates.get(unit))
        if makes_grad:
            needs.append(self._grad_slot(unit))

        name = f"{unit} {access.phase} {access.group}"
        seconds = self._compute_seconds.get((unit, access.phase), 0.0)
        return self._add("compute", name, seconds, *needs)

    def _offloaded(self, timeline: Timeline) -> set[tuple[str, int]]:
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
        """Move a unit's input as `AwayActivations` says; returns the job that its use waits for.

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
            bring = self._chain if len(moves) == 1 else self._move_through_slots
            stashed = self._stashed.pop(asked)
            self._fetched[asked] = bring(moves, asked, stashed, before)
        return self._fetched.pop(unit)

    def _stash(self, unit: str, before: int | None) -> int | None:
        """Move a unit's input home; returns the job that its use waits for."""
        self._activations.stash(unit)
        num_bytes = self._units[unit].activation_bytes
        moves = self._moves.stash(unit, num_bytes)
        if len(moves) == 1:
            self._stashed[unit] = self._chain(moves, unit, before)
            return None

        # Compute waits for older copies, since it would else make activations faster than the drives take them.
        oldest = self._copied[0] if len(self._copied) == SPILLING_MAX else None
        written = self._move_through_slots(moves, unit, before)
        self._stashed[unit] = written

        # The job before the last write is the copy to RAM of the same piece.
        self._copied.append(written - 1)
        return oldest

    def _move_through_slots(self, moves: Sequence[Move], unit: str, *after: int | None) -> int:
        """Move an activation through slots in RAM, piece by piece; returns the last job."""
        # Fewer pieces than there are: a drive is as busy with these, and each costs the simulation time.
        last = -1
        slots = self._activation_slots
        for _ in range(PIECES_MAX):
            free = slots[0] if len(slots) == ACTIVATION_SLOTS else None
            last = self._add_piece(moves, unit, PIECES_MAX, free, *after)
            slots.append(last)
        return last

    # ------------------------------------------------------------------ weights and updates

    def _add_items(self, items: deque[Item], index: int) -> None:
        """Add the items that come before an access, or before the end of the pass."""
        while items and self._comes_before(items[0], index):
            self._add_item(items.popleft())

    def _comes_before(self, item: Item, index: int) -> bool:
        """Return whether an item is added before an access, because that needs it."""
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
        """Bring weights to the GPU, as soon as their slot is free and they are updated."""
        unit = load.unit
        spec = self._units[unit]
        moves = self._moves.load(unit)
        free = self._slot_free(load)

        # AdamW on a streamed unit works in the slot that this load fills, so it comes after.
        updated = None if load.updates else self._updates.get(unit)

        # In pieces: one comes to RAM while the one before goes on to the GPU.
        pieces = self._num_pieces(spec.num_elements) if len(moves) > 1 else 1
        arrived = self._chain(moves, unit, free, updated, pieces=pieces)
        self._arrivals[unit] = arrived
        if load.updates:
            self._update_streamed(spec, arrived)

    def _slot_free(self, load: Load) -> int | None:
        """Return the job after which the slot of a load is free."""
        # A slot that is empty when the pass begins has nobody to wait for.
        if load.after_access < 0:
            return self._last_end
        return self._uses[load.after_access]

    def _update(self, update: Update) -> None:
        """Run AdamW where the unit's state is at home."""
        unit = update.unit
        spec = self._units[unit]
        lane = self._placement.update_queue(unit)
        if lane == "update_nvme":
            self._update_spilled(spec, update.load)
            return

        # No drive moves any of it, so there is nothing to overlap piece by piece.
        gradient = self._grads.get(unit)
        is_speculative = unit in self._placement.speculative
        updated = self._apply(lane, spec, 1, self._last_end, gradient, elsewhere=is_speculative)
        self._updates_of(unit)[unit] = updated

    def _update_spilled(self, spec: UnitSpec, fed: Load | None) -> None:
        """Run AdamW on a unit with bytes on NVMe, piece by piece: read, update, feed, write."""
        unit = spec.name
        moves = self._moves
        gradient = self._grads.get(unit)
        pieces = 1 if spec.schema.by_matrix else self._num_pieces(spec.num_trained)
        is_speculative = unit in self._placement.speculative
        updated = -1

        for _ in range(pieces):
            # Nothing is read ahead of an update that is not due yet, so reads wait for the gradient too.
            free = self._chunks[0] if len(self._chunks) == UPDATE_DEPTH else None
            needs = self._last_end, free, gradient
            read = self._add_piece(moves.read_state(unit), unit, pieces, *needs)
            updated = self._apply("update_nvme", spec, pieces, read, elsewhere=is_speculative)

            if fed is not None:
                slot = self._slot_free(fed)
                arrived = self._add_piece(moves.feed(unit), unit, pieces, updated, slot)
                self._arrivals[unit] = arrived

            written = self._add_piece(moves.write_state(unit), unit, pieces, updated)
            self._chunks.append(written)

        # Frozen weights lie behind the trained ones, and no update feeds them.
        if fed is not None and spec.frozen_elements:
            frozen = moves.load_frozen(unit)
            self._arrivals[unit] = self._chain(frozen, unit, updated)

        self._updates_of(unit)[unit] = updated

    def _updates_of(self, unit: str) -> ByUnit:
        """Return the jobs among which a unit's update counts: the next step counts what this backward updates."""
        return self._speculated if unit in self._placement.speculative else self._updates

    def _update_streamed(self, spec: UnitSpec, arrival: int) -> int:
        """Run AdamW on the GPU, when weights, gradient and state are there; returns the job that takes weights home."""
        unit = spec.name
        gradient = self._grads.get(unit)
        state = self._states.get(unit)
        updated = self._apply("update_gpu", spec, 1, arrival, gradient, state)
        self._updates[unit] = updated
        home = self._moves.return_weights(unit)
        return self._chain(home, unit, updated)

    def _apply(self, lane: str, spec: UnitSpec, pieces: int, *after: int | None, elsewhere: bool = False) -> int:
        """Do one of so many pieces of a unit's update, of matrices on the GPU; returns the job that ends it.

        Args:
            lane: the one that updates.
            spec: the sizes of the unit.
            pieces: how many there are.
            after: the jobs that bring what it needs.
            elsewhere: whether it writes to another generation.
        """
        unit = spec.name
        if not spec.schema.by_matrix:
            amount = _updated(spec, elsewhere=elsewhere) / pieces
            return self._add(lane, unit, amount, *after)

        moves = self._moves.carry(unit)
        products = spec.update_flops * self._parameters_per_flop
        amount = _updated(spec) + products
        if not moves:
            return self._add("update_gpu", unit, amount, *after)

        # As if it had so many matrices of equal size. The first one comes when all of the unit before are home.
        there, back = moves
        home = self._carried.get(lane)
        homes = deque([home], maxlen=MATRICES_CARRIED)
        for _ in range(PIECES_MAX):
            arrived = self._add_piece([there], unit, PIECES_MAX, homes[0], *after)
            updated = self._add("update_gpu", unit, amount / PIECES_MAX, arrived)
            home = self._add_piece([back], unit, PIECES_MAX, updated)
            self._carried[lane] = home
            homes.append(home)
        return self._carried[lane]

    def _exchange(self, exchange: Exchange) -> None:
        """Move streamed state home when the CPU is through with its own updates, and to the GPU again."""
        # State would take from memory what AdamW on the CPU needs (docs/decisions/0011).
        on_cpu = []
        for unit, job in self._updates.items():
            if self._placement.update_queue(unit) != "update_gpu":
                on_cpu.append(job)

        homes: ByUnit = {}
        for unit in exchange.home:
            moves = self._moves.return_state(unit)
            updated = self._updates[unit]
            homes[unit] = self._chain(moves, unit, *on_cpu, updated)

        # The new bytes fill the slot that the old ones leave.
        for unit in exchange.fetched:
            moves = self._moves.fetch_state(unit)
            left = homes.get(unit)
            self._states[unit] = self._chain(moves, unit, left, self._last_end)

    # ------------------------------------------------------------------ gradients

    def _grad_slot(self, unit: str) -> int | None:
        """Return the job that empties a slot in which a unit's gradient is made; None: a slot is free."""
        # A gradient that stays on the GPU has a place of its own.
        stays = self._placement.grad_homes[unit] is Tier.GPU
        has_free = len(self._grad_slots) < SLOTS_MIN
        if stays or has_free:
            return None
        return self._grad_slots[0]

    def _hand_over(self, spec: UnitSpec, group: int, made: int, before: int | None) -> None:
        """Move the gradient of a group to where it waits, after adding the sum of the groups before.

        Args:
            spec: the sizes of the unit.
            group: the group.
            made: the use that makes the gradient.
            before: the use before.
        """
        unit = spec.name
        gradient = self._moves.gradient(unit, group)
        if gradient.fetched:
            shipped = self._grads[unit]
            arrived = self._chain(gradient.fetched, unit, shipped, before)

            # The addition takes next to no time, but the gradient is final only when the sum of the others has arrived.
            made = self._add("compute", f"{unit} sum", 0.0, made, arrived)
        self._ship(spec, gradient, made)

    def _ship(self, spec: UnitSpec, gradient: Gradient, made: int) -> None:
        """Move a sum of groups, or the gradient of one, to where it waits. Its update may follow."""
        unit = spec.name
        last = made
        if gradient.shipped:
            # No slots are planned, and none is taken, where nothing is summed in RAM.
            slot = self._sums[0] if self._sums and len(self._sums) == self._sums.maxlen else None
            last = self._chain(gradient.shipped, unit, made, slot)

            # A GPU slot is free again when the gradient is where it waits, in RAM or on NVMe.
            self._grad_slots.append(last)

        if gradient.sums_in_ram:
            traffic = spec.num_trained * SUM_BYTES[gradient.is_final]
            last = self._add("update", unit, traffic / UPDATE_BYTES, last)
            self._sums.append(last)

        # Before the update, which looks for it here.
        self._grads[unit] = last
        if gradient.update is not None:
            self._update(gradient.update)

    def _awaited(self) -> Iterable[int | None]:
        """Return the jobs that a step awaits besides compute and sums: its updates, if they run in its backward."""
        return () if self._policy.deferred else self._updates.values()


def _updated(spec: UnitSpec, *, elsewhere: bool = False) -> float:
    """Return the parameters of AdamW's work on a unit, in those that rates count.

    If it writes to another generation, a processor fetches the bytes that lie there before it overwrites them.
    """
    # Read and written, or read, fetched and written. A gradient is read.
    schema = spec.schema
    passes = 3 if elsewhere else 2
    traffic = passes * schema.bytes_per_parameter + schema.grad_width
    return spec.num_trained * traffic / UPDATE_BYTES
