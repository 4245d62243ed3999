"""Forecast: how long a step takes on a machine with given rates, and what bounds it. Pure.

The jobs are those that the player would play: the loads of the timeline, compute, gradients, AdamW on the CPU and on
the GPU, state from and to NVMe. Three steps are simulated in a row, since a step's updates run under the next one; the
last one counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megatier.schedule.moves import Move, Moves, by_lane, stash, unstash
from megatier.schedule.placement import Placement
from megatier.schedule.rates import Rates
from megatier.schedule.simulate import Job, Lane, least_seconds, simulate
from megatier.schedule.sizes import Policy, UnitSpec
from megatier.schedule.slots import GRAD_DEPTH, SLOTS_MIN, UPDATE_DEPTH
from megatier.schedule.timeline import Access, Load, Timeline, build
from megatier.tier import Phase, Tier

NUM_STEPS = 3
HOST_SECONDS = 0.03
"""Seconds of Python between two steps, when nothing else is going on."""
PIECES_MAX = 4
"""Pieces in which a spilled unit's state is simulated: reads, AdamW and writes of a unit overlap."""
UPDATE_BYTES = 26
"""Memory traffic of AdamW on the CPU, a parameter: 14 read, 12 written."""
ALLOCATE_BYTES = 12
"""Memory traffic a parameter in addition, if AdamW writes to another generation: a processor fetches the bytes that lie
there before it overwrites them."""
SUM_BYTES = {False: 12, True: 24}
"""Memory traffic of adding a group's gradient in RAM, a parameter; the last one is rounded and measured too."""

QUEUES_OF_DISK = ("nvme_to_ram", "nvme_to_gpu", "ram_to_nvme")


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneSpan:
    """A job as simulated.

    Attributes:
        lane: its lane.
        name: block or unit.
        start: seconds from the start of the step; less than 0 if it began in the step before.
        end: seconds from the start of the step.
    """

    lane: str
    name: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """A step as it should be.

    Attributes:
        seconds: of one step.
        busy_seconds: per lane, seconds of the step in which it does something.
        alone_seconds: per lane, seconds that its amounts take with nothing else going on.
        moved_bytes: per queue.
        spans: all that goes on in the step, including moves that the step before left to it.
    """

    seconds: float
    busy_seconds: Mapping[str, float]
    alone_seconds: Mapping[str, float]
    moved_bytes: Mapping[str, float]
    spans: tuple[LaneSpan, ...]

    @property
    def uses_drives(self) -> bool:
        """Whether a step reads or writes NVMe."""
        return any(self.moved_bytes.get(queue) for queue in QUEUES_OF_DISK)

    @property
    def bound_by(self) -> str:
        """The lane that would need longest if all else were free, or "nvme": drives do the work of both directions."""
        needs = {lane: seconds for lane, seconds in self.alone_seconds.items() if lane != "host"}
        disk = sum(needs.pop(queue, 0.0) for queue in QUEUES_OF_DISK)
        return max({**needs, "nvme": disk}.items(), key=lambda item: item[1])[0]


def lanes_of(rates: Rates) -> dict[str, Lane]:
    """The lanes of a machine, with the drives and the host's memory that they share.

    Drives that read 14 bytes and write 12 at the same time do 26 bytes in 26 / mixed seconds. Alone, the two would take
    14 / read and 12 / write. So each direction uses the share disk = (26 / mixed) / (14 / read + 12 / write) of the
    drives at its full rate, and both together get the mixed rate.
    """
    read = sum(drive.read_bytes_per_s for drive in rates.drives) or 1.0
    write = sum(drive.write_bytes_per_s for drive in rates.drives) or 1.0
    mixed = sum(drive.mixed_bytes_per_s for drive in rates.drives) or 1.0
    disk = 26 / mixed / (14 / read + 12 / write)
    memory = rates.memory_bytes_per_s

    def lane(rate: float, memory_bytes: float, **uses: float) -> Lane:
        return Lane(rate, {"memory": min(1.0, rate * memory_bytes / memory), **uses})

    return {
        "host": Lane(1.0),
        "compute": Lane(1.0),
        "nvme_to_ram": lane(read, 2, disk=disk),
        "nvme_to_gpu": lane(read, 2, disk=disk, to_gpu=min(1.0, read / rates.to_gpu_bytes_per_s)),
        "ram_to_nvme": lane(write, 2, disk=disk),
        "ram_to_gpu": lane(rates.to_gpu_bytes_per_s, 1, to_gpu=1.0),
        "state_to_gpu": lane(rates.to_gpu_bytes_per_s, 1, to_gpu=1.0),
        "gpu_to_ram": lane(rates.to_ram_bytes_per_s, 1, to_ram=1.0),
        "state_to_ram": lane(rates.to_ram_bytes_per_s, 1, to_ram=1.0),
        "update": lane(rates.update_parameters_per_s, UPDATE_BYTES),
        "update_nvme": lane(rates.update_parameters_per_s, UPDATE_BYTES),
        "update_gpu": Lane(rates.gpu_update_parameters_per_s),
    }


def forecast(
    accesses: Sequence[Access],
    compute_seconds: Mapping[tuple[str, Phase], float],
    units: Sequence[UnitSpec],
    placement: Placement,
    policy: Policy,
    rates: Rates,
) -> Forecast:
    """Simulate a step, none of whose gradients are clipped.

    Args:
        accesses: the order in which a step uses its units.
        compute_seconds: of one use by one group, per unit and phase. One that is missing takes none.
        units: all units.
        placement: homes, slots.
        policy: groups, clipping.
        rates: the machine's.

    Raises:
        PlanError: a unit must be loaded and there is no GPU slot.
    """
    jobs = _Jobs(compute_seconds, {unit.name: unit for unit in units}, placement, policy)
    timeline = build(accesses, placement, updates=policy.deferred, updated=placement.speculative)

    # The first step has no updates to do. The second does those of the first; its last writes and its exchange reach
    # into the third, which is therefore as all later ones.
    ends = [jobs.step(timeline) for _ in range(NUM_STEPS)]
    lanes = lanes_of(rates)
    times = simulate(jobs.jobs, lanes)
    start = times[ends[-2]][1]
    stop = times[ends[-1]][1]
    busy = dict.fromkeys(lanes, 0.0)
    alone = dict.fromkeys(lanes, 0.0)
    moved: dict[str, float] = {}
    spans = []

    # By time: what runs in this step may belong to the one before.
    for job, (begin, end) in zip(jobs.jobs, times, strict=True):
        if end > start and begin < stop and end > begin:
            busy[job.lane] += min(end, stop) - max(begin, start)
            spans.append(LaneSpan(lane=job.lane, name=job.name, start=begin - start, end=end - start))

    # By job: what belongs to this step may end in the next one.
    for job in jobs.jobs[ends[-2] + 1 : ends[-1] + 1]:
        alone[job.lane] += job.amount / lanes[job.lane].rate
        if "_to_" in job.lane:
            moved[job.lane] = moved.get(job.lane, 0.0) + job.amount

    return Forecast(seconds=stop - start, busy_seconds=busy, alone_seconds=alone, moved_bytes=moved, spans=tuple(spans))


def floor(
    accesses: Sequence[Access],
    compute_seconds: Mapping[tuple[str, Phase], float],
    units: Sequence[UnitSpec],
    placement: Placement,
    policy: Policy,
    rates: Rates,
) -> float:
    """Seconds that the forecast of a step has at least, counted and not simulated.

    All that a step waits for begins when the step before is over; that is counted. Moves and updates that a step leaves
    to the next one (last writes, the exchange, updates in the backward) are not. Arguments and errors are those of
    `forecast`.
    """
    jobs = _Jobs(compute_seconds, {unit.name: unit for unit in units}, placement, policy)

    # As if a step had been before: there are updates to do, and those of its backward are over.
    jobs.begun = jobs._add("host", "step", 0.0)
    jobs.speculated = dict.fromkeys(placement.speculative, jobs.begun)
    jobs.step(build(accesses, placement, updates=policy.deferred, updated=placement.speculative))
    return least_seconds(jobs.jobs, lanes_of(rates), "compute")


@dataclass(slots=True)
class _Jobs:
    """The jobs of some steps in a row, in the order of their lanes.

    All references to jobs are their indices in `jobs`.
    """

    compute_seconds: Mapping[tuple[str, Phase], float]
    units: Mapping[str, UnitSpec]
    placement: Placement
    policy: Policy
    moves: Moves = field(init=False)
    """Says what each part of the step moves; only its order in time is known here."""
    jobs: list[Job] = field(default_factory=list)
    begun: int | None = None
    """The end of the last step, which lets the present one begin; None: this is the first."""
    grads: dict[str, int] = field(default_factory=dict)
    """Per unit, the job that brought its last gradient to where AdamW finds it."""
    updates: dict[str, int] = field(default_factory=dict)
    """Per unit, its last update."""
    speculated: dict[str, int] = field(default_factory=dict)
    """Per unit, its update in the present backward."""
    states: dict[str, int] = field(default_factory=dict)
    """Per streamed unit, the job that brought its state to the GPU."""
    stashed: dict[str, int] = field(default_factory=dict)
    """Per unit whose activation is in RAM, the job that brought it there. The last one comes back first."""
    fetched: dict[str, int] = field(default_factory=dict)
    """Per unit whose activation comes back, the job that brings it."""
    grad_slots: deque[int] = field(default_factory=lambda: deque(maxlen=SLOTS_MIN))
    """The last jobs that emptied a GPU slot for gradients, as many as there are slots: the first is free next."""
    sums: deque[int] = field(default_factory=lambda: deque(maxlen=GRAD_DEPTH))
    """The last sums that emptied a RAM slot for gradients, as many as there are slots."""
    chunks: deque[int] = field(default_factory=lambda: deque(maxlen=UPDATE_DEPTH))
    """The last writes that emptied a RAM slot for update chunks, as many as there are slots."""

    def __post_init__(self) -> None:
        self.moves = Moves(self.units, self.placement, self.policy)

    def step(self, timeline: Timeline) -> int:
        """Add a step; returns the job that ends it."""
        uses: list[int] = []
        fed = {update.unit: update.load for update in timeline.updates if update.load is not None}
        loads = {load.access: load for load in timeline.loads}

        # Units that the last backward updated are due no more.
        self.updates = self.speculated
        self.speculated = {}
        arrivals: dict[str, int] = {}
        last_uses = timeline.last_uses()
        offloaded = self._offloaded(timeline)

        for index, access in enumerate(timeline.accesses):
            unit = self.units[access.unit]
            load = loads.get(index)
            is_due = bool(timeline.updates) and self.begun is not None and unit.name not in self.updates
            is_due = is_due and unit.num_trained > 0

            # A unit's update comes before its load, except if it is streamed: AdamW works in the slot that the load
            # fills, so it comes after.
            if is_due and unit.name not in self.placement.streamed:
                copied = self._update(unit, fed.get(unit.name), uses)
                if copied is not None:
                    arrivals[unit.name] = copied
            elif unit.name in fed and fed[unit.name].access == index:  # the first step: nothing to update yet
                load = fed[unit.name]

            if load is not None:
                arrivals[unit.name] = self._load(unit, load, uses)
            if is_due and unit.name in self.placement.streamed:
                self._update_streamed(unit, arrivals[unit.name])
            before = uses[-1] if uses else self.begun
            activation = self._offload(access, before) if (unit.name, access.group) in offloaded else None

            # The last use may be a forward: that of a fused head makes its gradient.
            makes_grad = last_uses[unit.name, access.group] == index and unit.num_trained > 0
            uses.append(self._compute(access, arrivals.get(unit.name), activation, makes_grad=makes_grad))
            if makes_grad:
                self._ship(unit, access.group, uses[-1], before)

        self._exchange()
        self.begun = self._add("host", "step", HOST_SECONDS, uses[-1], *self.sums, *self._immediate())
        return self.begun

    # ------------------------------------------------------------------ jobs

    def _compute(self, access: Access, arrival: int | None, activation: int | None, *, makes_grad: bool) -> int:
        """One use of a unit, when its weights and its activation are there and its update is over."""
        seconds = self.compute_seconds.get((access.unit, access.phase), 0.0)
        needs = [self.begun, arrival, activation, self.updates.get(access.unit) if self.policy.deferred else None]

        # A use that makes a gradient which leaves the GPU needs a slot for it.
        is_shipped = makes_grad and self.placement.grad_homes[access.unit] is not Tier.GPU
        if is_shipped and len(self.grad_slots) == SLOTS_MIN:
            needs.append(self.grad_slots[0])
        return self._add("compute", f"{access.unit} {access.phase} {access.group}", seconds, *needs)

    def _offloaded(self, timeline: Timeline) -> set[tuple[str, int]]:
        """Units and groups with an activation to offload: not the last of a backward, whose input has no gradient."""
        ends = {access.group: index for index, access in enumerate(timeline.accesses)}
        return {
            (access.unit, access.group)
            for index, access in enumerate(timeline.accesses)
            if access.phase is Phase.BACKWARD
            and self.units[access.unit].activation_bytes
            and index < ends[access.group]
        }

    def _offload(self, access: Access, before: int | None) -> int | None:
        """A unit's input leaves as its forward begins; its backward waits for it, and asks for the one before it."""
        if access.phase is Phase.FORWARD:
            out = stash(self.units[access.unit].activation_bytes)
            self.stashed[access.unit] = self._chain([out], access.unit, before)
            return None

        if access.unit not in self.fetched:
            self._fetch(access.unit, before)
        if self.stashed:
            self._fetch(next(reversed(self.stashed)), before)
        return self.fetched.pop(access.unit)

    def _fetch(self, unit: str, before: int | None) -> None:
        """A unit's activation comes back."""
        back = unstash(self.units[unit].activation_bytes)
        self.fetched[unit] = self._chain([back], unit, self.stashed.pop(unit), before)

    def _load(self, unit: UnitSpec, load: Load, uses: Sequence[int]) -> int:
        """Weights come to the GPU as soon as their slot is free and they are updated."""
        # AdamW on a streamed unit works in the slot that this load fills, so it comes after.
        updated = None if unit.name in self.placement.streamed else self.updates.get(unit.name)
        moves = self.moves.load(unit.name)

        # In pieces: one comes to RAM while the one before goes on to the GPU.
        pieces = self._num_pieces(unit.num_elements) if len(moves) > 1 else 1
        return self._chain(moves, unit.name, self._slot_free(load, uses), updated, pieces=pieces)

    def _slot_free(self, load: Load, uses: Sequence[int]) -> int | None:
        """The job after which the slot of a load is free."""
        return uses[load.after_access] if load.after_access >= 0 else self.begun

    def _update(self, unit: UnitSpec, fed: Load | None, uses: Sequence[int]) -> int | None:
        """AdamW where the unit's state is at home; returns what brings the weights it feeds."""
        gradient = self.grads.get(unit.name)
        if self.placement.updater(unit.name) is Tier.GPU:
            self.updates[unit.name] = self._add("update_gpu", unit.name, unit.num_trained, self.begun, gradient)
            return None

        if not by_lane(self.moves.update(unit.name)):
            self.updates[unit.name] = self._add("update", unit.name, unit.num_trained, self.begun, gradient)
            return None

        return self._update_spilled(unit, gradient, fed, uses)

    def _update_spilled(
        self, unit: UnitSpec, gradient: int | None, fed: Load | None, uses: Sequence[int]
    ) -> int | None:
        """AdamW on a unit with bytes on NVMe, in pieces: read, update, feed, write; returns what brings fed weights."""
        pieces = self._num_pieces(unit.num_trained)
        is_speculative = unit.name in self.placement.speculative
        amount = unit.num_trained * (1 + ALLOCATE_BYTES / UPDATE_BYTES * is_speculative)
        copied: int | None = None
        updated = -1

        for _ in range(pieces):
            free = self.chunks[0] if len(self.chunks) == UPDATE_DEPTH else None
            # Nothing is read ahead of an update that is not due yet.
            read = self._part(self.moves.read_state(unit.name), unit.name, pieces, self.begun, free, gradient)
            updated = self._add("update_nvme", unit.name, amount / pieces, read)
            if fed is not None:
                weights = self.moves.feed(unit.name)
                copied = self._part(weights, unit.name, pieces, updated, self._slot_free(fed, uses))

            self.chunks.append(self._part(self.moves.write_state(unit.name), unit.name, pieces, updated))

        if fed is not None and unit.frozen_elements:
            copied = self._chain(self.moves.load_frozen(unit.name), unit.name, updated)
        (self.speculated if is_speculative else self.updates)[unit.name] = updated
        return copied

    def _update_streamed(self, unit: UnitSpec, arrival: int) -> None:
        """AdamW on the GPU, when weights, gradient and state are there. The new weights go home at once."""
        needs = [arrival, self.grads.get(unit.name), self.states.get(unit.name)]
        self.updates[unit.name] = self._add("update_gpu", unit.name, unit.num_trained, *needs)
        self._chain(self.moves.return_weights(unit.name), unit.name, self.updates[unit.name])

    def _exchange(self) -> None:
        """Streamed state goes home when the CPU is through with its own updates, and comes to the GPU again."""
        on_cpu = [job for name, job in self.updates.items() if self.placement.updater(name) is Tier.RAM]
        for unit in self.placement.streamed:
            home = None
            if unit in self.updates:
                home = self._chain(self.moves.return_state(unit), unit, *on_cpu, self.updates[unit])
            self.states[unit] = self._chain(self.moves.fetch_state(unit), unit, home, self.begun)

    def _ship(self, unit: UnitSpec, group: int, made: int, before: int | None) -> None:
        """The gradient of a group leaves; without clipping its update follows at once.

        `made` is the use that makes it, `before` the one before.
        """
        is_last = group == self.policy.groups - 1
        if group and (fetched := self.moves.fetch_sum(unit.name)):
            arrived = self._chain(fetched, unit.name, self.grads[unit.name], before)
            made = self._add("compute", f"{unit.name} sum", 0.0, made, arrived)

        self.grads[unit.name] = made

        if shipped := self.moves.ship(unit.name, is_last=is_last):
            slot = self.sums[0] if len(self.sums) == GRAD_DEPTH else None
            # RAM slots are few: one is free when the gradient is where it waits, in RAM or on NVMe.
            self.grads[unit.name] = self._chain(shipped, unit.name, made, slot)
            self.grad_slots.append(self.grads[unit.name])
            if self.policy.groups > 1 and self.placement.sums_at(unit.name) is not Tier.GPU:
                amount = unit.num_trained * SUM_BYTES[is_last] / UPDATE_BYTES
                self.grads[unit.name] = self._add("update", unit.name, amount, self.grads[unit.name])
                self.sums.append(self.grads[unit.name])

        if is_last and (not self.policy.deferred or unit.name in self.placement.speculative):
            self._update(unit, None, ())

    def _immediate(self) -> Iterable[int]:
        """The updates that a step waits for: its own, if they run in its backward."""
        return () if self.policy.deferred else self.updates.values()

    # ------------------------------------------------------------------ adding jobs

    def _chain(self, moves: Sequence[Move], name: str, *after: int | None, pieces: int = 1) -> int:
        """Add moves of which each begins when the one before is over, piece by piece; returns the last job."""
        last = -1
        for _ in range(pieces):
            last = self._part(moves, name, pieces, *after)
        return last

    def _part(self, moves: Sequence[Move], name: str, pieces: int, *after: int | None) -> int:
        """Add one of so many pieces of each move, one after the other; returns the last job."""
        last = -1
        for move in moves:
            last = self._add(move.lane, name, move.num_bytes / pieces, *after)
            after = (last,)
        return last

    def _add(self, lane: str, name: str, amount: float, *after: int | None) -> int:
        """Add one job, behind all others of its lane; returns its index."""
        self.jobs.append(
            Job(lane=lane, name=name, amount=amount, after=tuple({index for index in after if index is not None}))
        )
        return len(self.jobs) - 1

    def _num_pieces(self, elements: int) -> int:
        """Pieces of a unit's state: its chunks, but no more than are worth simulating."""
        return max(1, min(PIECES_MAX, -(-elements // self.placement.chunk_elements)))
