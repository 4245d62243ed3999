"""Forecasts how long a step takes on a machine with given rates, and what bounds it. Pure.

The jobs are those that the player would play (`jobs`, `rank_jobs`): the items of the timeline, compute, and what
follows gradients. Three steps are simulated in a row, because a step's updates run under the next one. The last one
counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from megatier.forecast.jobs import UPDATE_BYTES, ComputeSeconds, StepJobs
from megatier.forecast.rank_jobs import LANES, RankJobs
from megatier.forecast.simulate import Lane, least_seconds, simulate
from megatier.schedule.placement import Placement
from megatier.schedule.rates import Rates
from megatier.schedule.sizes import Policy, UnitSpec, block_bytes
from megatier.schedule.timeline import Access, Timeline, build, scatters_of
from megatier.tier import Kind, Tier, Way

NUM_STEPS = 3
"""Steps that are simulated in a row."""
QUEUES_OF_DISK = ("nvme_to_ram", "nvme_to_gpu", "ram_to_nvme")
"""The queues that share the drives."""
RING_TRAFFIC = 3
"""Bytes of memory traffic for each byte that passes through a ring: the host reads and writes it, then the GPU reads or
writes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneSpan:
    """One job as simulated: what its lane did, and when."""

    lane: str
    name: str
    """The block or unit that the job is about."""
    start: float
    """Seconds from the start of the step; less than 0 if the job began in the step before."""
    end: float
    """Seconds from the start of the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """A step as it should be."""

    seconds: float
    """Seconds of one step."""
    busy_seconds: Mapping[str, float]
    """Seconds of the step in which each lane does something."""
    alone_seconds: Mapping[str, float]
    """Seconds that each lane's amounts take with nothing else going on."""
    moved_bytes: Mapping[str, float]
    """Bytes that each queue moves."""
    spans: tuple[LaneSpan, ...]
    """All that goes on in the step, including moves that the step before left to it."""

    @property
    def uses_drives(self) -> bool:
        """Whether a step reads or writes NVMe."""
        return any(self.moved_bytes.get(queue) for queue in QUEUES_OF_DISK)

    @property
    def bound_by(self) -> str:
        """The lane that would need longest if all else were free; "nvme" stands for all queues of the drives."""
        # The host's seconds are the same in every plan.
        needs = dict(self.alone_seconds)
        needs.pop("host", None)

        # All queues of the drives count as one, since they share them.
        disk = 0.0
        for queue in QUEUES_OF_DISK:
            disk += needs.pop(queue, 0.0)
        needs["nvme"] = disk
        return max(needs, key=lambda lane: needs[lane])


def lanes_of(
    rates: Rates, ranks: int = 1, *, multiplies: bool = False, locked: tuple[float, float] = (1.0, 1.0)
) -> dict[str, Lane]:
    """Return the lanes of a machine, with the drives and the host's memory that they share.

    One of several ranks has the rates of `Rates.of_rank`. While bytes come from other ranks, its compute is slower: the
    two share the GPU's processors, of which collectives take the share `ranks_slowdown`. If updates on the GPU multiply
    matrices, they and compute share the processors as well.

    Drives that read 14 bytes and write 12 at the same time do 26 bytes in 26 / mixed seconds. Alone, the two would take
    14 / read and 12 / write. So each direction uses the share disk = (26 / mixed) / (14 / read + 12 / write) of the
    drives at its full rate, and both together get the mixed rate.

    Of the bytes that are copied between RAM and a GPU a share lies in page-locked RAM: `locked` has that of bytes which
    compute waits for, and that of other state. All others pass through rings, which share their threads.
    """
    # Without drives nothing moves on these lanes, and any rate will do.
    drives = rates.drives
    read = sum(drive.read_bytes_per_s for drive in drives) or 1.0
    write = sum(drive.write_bytes_per_s for drive in drives) or 1.0
    mixed = sum(drive.mixed_bytes_per_s for drive in drives) or 1.0
    disk = 26 / mixed / (14 / read + 12 / write)

    # Links and memory are resources that lanes share, each of which takes a part of them at its full rate.
    to_gpu = rates.to_gpu_bytes_per_s
    to_ram = rates.to_ram_bytes_per_s
    memory = rates.memory_bytes_per_s

    # `memory_bytes` are bytes of memory traffic for each byte, or each parameter, that the lane's rate counts.
    def lane(rate: float, memory_bytes: float, **uses: float) -> Lane:
        share = rate * memory_bytes / memory
        return Lane(rate, {"memory": min(1.0, share), **uses})

    shared: dict[str, Lane] = {}
    processors = {"processors": min(1.0, rates.ranks_slowdown or 1.0)}
    if ranks > 1:
        assert rates.gather_bytes_per_s and rates.scatter_bytes_per_s
        shared = {
            "compute": Lane(1.0, {"processors": 1.0}),
            "gather": Lane(rates.gather_bytes_per_s, processors),
            "scatter": Lane(rates.scatter_bytes_per_s, processors),
        }

    if ranks > 1 and rates.ranks_way is Way.RAM:
        # Bytes of the rank itself go to RAM for each byte that comes from there: its shard, which all others read, or
        # a piece for each of them.
        sent_bytes = {"gather": 1 / (ranks - 1), "scatter": 1.0}
        for name, sent in sent_bytes.items():
            rate = min(shared[name].rate, to_gpu, to_ram / sent)
            links = {"to_gpu": rate / to_gpu, "to_ram": rate * sent / to_ram}
            shared[name] = lane(rate, 1 + sent, **processors, **links)

    # Seconds of a byte are added up: one part of the bytes goes at the rate of the link, the other at that of the ring.
    def copies(link: str, full: float, ring: float | None, share: float) -> Lane:
        through_ring = min(full, ring or memory / RING_TRAFFIC)
        staged_s = (1 - share) / through_ring
        rate = 1 / (share / full + staged_s)
        traffic = share + (1 - share) * RING_TRAFFIC
        return lane(rate, traffic, ring=rate * staged_s, **{link: rate / full})

    up = partial(copies, "to_gpu", to_gpu, rates.ring_to_gpu_bytes_per_s)
    down = partial(copies, "to_ram", to_ram, rates.ring_to_ram_bytes_per_s)
    awaited, other = locked

    # AdamW on the GPU is bound by its memory, and takes few processors from compute.
    products = {"processors": 1.0} if multiplies else {}
    return {
        "host": Lane(1.0),
        "compute": Lane(1.0, products),
        "nvme_to_ram": lane(read, 2, disk=disk),
        "nvme_to_gpu": lane(read, 2, disk=disk, to_gpu=min(1.0, read / to_gpu)),
        "ram_to_nvme": lane(write, 2, disk=disk),
        "ram_to_gpu": up(awaited),
        "state_to_gpu": up(other),
        "gpu_to_ram": down(awaited),
        "state_to_ram": down(other),
        "update": lane(rates.update_parameters_per_s, UPDATE_BYTES),
        "update_nvme": lane(rates.update_parameters_per_s, UPDATE_BYTES),
        "update_gpu": Lane(rates.gpu_update_parameters_per_s, products),
        **shared,
    }


def forecast(
    accesses: Sequence[Access],
    compute_seconds: ComputeSeconds,
    units: Sequence[UnitSpec],
    placement: Placement,
    policy: Policy,
    rates: Rates,
) -> Forecast:
    """Simulate a step, none of whose gradients are clipped.

    Args:
        accesses: the order in which a step uses its units.
        compute_seconds: seconds of one use of a unit by one group, by unit and phase. One that is missing takes none.
        units: all units.
        placement: homes, slots.
        policy: groups, clipping.
        rates: what the machine's links, drives and processors do; of several ranks, what one of them has.

    Raises:
        PlanError: a unit must be loaded and there is no GPU slot.
    """
    steps, first, later, lanes = _simulation(accesses, compute_seconds, units, placement, policy, rates)

    # The first step has no updates to do. The second does those of the first; its last writes and its exchange reach
    # into the third, which is therefore as all later ones.
    ends = [steps.step(first)]
    for _ in range(NUM_STEPS - 1):
        end = steps.step(later)
        ends.append(end)
    times = simulate(steps.jobs, lanes)

    *_, end_before, end_of_last = ends
    _, start = times[end_before]
    _, stop = times[end_of_last]

    names = [LANES.get(name, name) for name in lanes]
    busy = dict.fromkeys(names, 0.0)
    alone = busy.copy()
    moved: dict[str, float] = {}
    spans = []

    # Busy seconds are counted by time: a job that runs in this step may belong to the one before.
    for job, (begin, end_s) in zip(steps.jobs, times, strict=True):
        is_within = end_s > start and begin < stop
        if not (is_within and end_s > begin):
            continue

        lane = LANES.get(job.lane, job.lane)
        busy[lane] += min(end_s, stop) - max(begin, start)
        span = LaneSpan(
            lane=lane,
            name=job.name,
            start=begin - start,
            end=end_s - start,
        )
        spans.append(span)

    # Amounts are counted by job: one that belongs to this step may end in the next one.
    own_jobs = steps.jobs[end_before + 1 : end_of_last + 1]
    for job in own_jobs:
        lane = LANES.get(job.lane, job.lane)
        alone[lane] += job.amount / lanes[job.lane].rate
        moves_bytes = "_to_" in lane or lane == "ranks"
        if moves_bytes:
            moved[lane] = moved.get(lane, 0.0) + job.amount

    return Forecast(
        seconds=stop - start,
        busy_seconds=busy,
        alone_seconds=alone,
        moved_bytes=moved,
        spans=tuple(spans),
    )


def floor(
    accesses: Sequence[Access],
    compute_seconds: ComputeSeconds,
    units: Sequence[UnitSpec],
    placement: Placement,
    policy: Policy,
    rates: Rates,
) -> float:
    """Return the seconds that the forecast of a step has at least, counted and not simulated.

    All that a step waits for begins when the step before is over; that is counted. Moves and updates that a step leaves
    to the next one (last writes, the exchange, updates in the backward) are not. Arguments and errors are those of
    `forecast`.
    """
    steps, _, later, lanes = _simulation(accesses, compute_seconds, units, placement, policy, rates)
    steps.follow_a_step()
    steps.step(later)
    return least_seconds(steps.jobs, lanes, "compute")


def _simulation(
    accesses: Sequence[Access],
    compute_seconds: ComputeSeconds,
    units: Sequence[UnitSpec],
    placement: Placement,
    policy: Policy,
    rates: Rates,
) -> tuple[StepJobs, Timeline, Timeline, dict[str, Lane]]:
    """Return the jobs, timelines and lanes that are simulated; see `forecast`.

    Returns:
        The jobs of no step yet, of a rank or of a process that is alone; the timelines of the first step and of every
        later one, in which updates in the backward are not void; and the lanes.
    """
    kind = RankJobs if policy.ranks > 1 else StepJobs
    per_flop = rates.gpu_update_parameters_per_s / rates.flops_per_s
    steps = kind(compute_seconds, units, placement, policy, per_flop)

    # In the immediate mode all updates run in the backward, and none is left to the next step.
    due: set[str] = set()
    if policy.deferred:
        due = placement.grad_homes.keys() - set(placement.speculative)

    scatters = scatters_of(accesses, units, policy)
    first = build(accesses, placement, scatters=scatters)
    later = build(
        accesses,
        placement,
        due=due,
        ahead=placement.streamed,
        scatters=scatters,
    )

    # Products of matrices in updates on the GPU share the processors with compute.
    multiplies = any(spec.update_flops for spec in units)
    lanes = lanes_of(rates, policy.ranks, multiplies=multiplies, locked=_locked_shares(units, placement, rates))
    return steps, first, later, lanes


def _locked_shares(units: Sequence[UnitSpec], placement: Placement, rates: Rates) -> tuple[float, float]:
    """Return how much of RAM is page-locked: of weights, gradients, activations and slots, and of other state."""
    weights = [spec for spec in units if placement.homes[spec.name, Kind.WEIGHT] is Tier.RAM]
    weight_bytes = sum(block_bytes(spec, Kind.WEIGHT) for spec in weights)
    other_state = placement.state_bytes.get(Tier.RAM, 0) - weight_bytes
    return rates.locked_shares(weight_bytes + placement.other_bytes.get(Tier.RAM, 0), other_state)
