"""The forecast of a step: how long it takes on a machine with given rates, and what bounds it. Pure.

The planner compares plans by it, and a run compares its steps with it. The jobs are those that the player would do
(`jobs`, `rank_jobs`). Three steps are simulated in a row, because the updates of a step run during the next one. The
last step counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatier.forecast.jobs import ComputeSeconds, StepJobs
from megatier.forecast.lanes import lanes_of, queue_of
from megatier.forecast.rank_jobs import RankJobs
from megatier.forecast.simulate import Job, Lane, least_seconds, simulate
from megatier.schedule.placement import Placement
from megatier.schedule.policy import Policy
from megatier.schedule.rates import Rates
from megatier.schedule.sizes import block_bytes
from megatier.schedule.timeline import Access, Timeline, build, reduce_scatters_of
from megatier.schedule.unit_spec import UnitSpec
from megatier.tier import Kind, Tier

TimedJob = tuple[Job, tuple[float, float]]
"""A job, with the seconds at which it begins and ends."""
NUM_STEPS = 3
"""The number of steps that are simulated in a row."""
QUEUES_OF_DISK = ("nvme_to_ram", "nvme_to_gpu", "ram_to_nvme")
"""The queues that share the drives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneSpan:
    """A simulated job: its lane, and its time in the step."""

    lane: str
    name: str
    """The block or unit that the job is about."""
    start: float
    """Seconds from the start of the step; less than 0 if the job began in the step before."""
    end: float
    """Seconds from the start of the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """The simulated figures of a step."""

    seconds: float
    """Seconds of one step."""
    busy_seconds: Mapping[str, float]
    """Seconds of the step in which each lane works."""
    alone_seconds: Mapping[str, float]
    """Seconds that the work of each lane would take if no other lane worked."""
    moved_bytes: Mapping[str, float]
    """Bytes that each queue moves."""
    spans: tuple[LaneSpan, ...]
    """All jobs that run in the step, including those of the step before that still run."""

    @property
    def uses_drives(self) -> bool:
        """Whether a step reads or writes NVMe."""
        return any(self.moved_bytes.get(queue) for queue in QUEUES_OF_DISK)

    @property
    def bound_by(self) -> str:
        """The lane whose work takes longest by itself; "nvme" stands for all queues of the drives."""
        # The seconds of the host are the same in every plan.
        needs = dict(self.alone_seconds)
        needs.pop("host", None)

        # The queues of the drives count as one, because they share the drives.
        disk = 0.0
        for queue in QUEUES_OF_DISK:
            disk += needs.pop(queue, 0.0)
        needs["nvme"] = disk
        return max(needs, key=lambda lane: needs[lane])


def forecast(
    accesses: Sequence[Access],
    compute_seconds: ComputeSeconds,
    units: Sequence[UnitSpec],
    placement: Placement,
    policy: Policy,
    rates: Rates,
) -> Forecast:
    """Simulate a step without clipping.

    Args:
        accesses: the order in which a step uses its units.
        compute_seconds: seconds that one group's use of a unit takes, by unit and phase. A missing one takes none.
        units: all units.
        placement: homes and slots.
        policy: groups and clipping.
        rates: the rates of the machine, or the share of them that one of several ranks has.

    Raises:
        PlanError: a unit must be loaded and there is no GPU slot.
    """
    steps, first, later, lanes = _simulation(accesses, compute_seconds, units, placement, policy, rates)

    # The first step has no updates to do. The last writes and the exchange of the second reach into the third, so that
    # the third is like all later ones.
    ends = [steps.step(first)]
    for _ in range(NUM_STEPS - 1):
        end = steps.step(later)
        ends.append(end)
    times = simulate(steps.jobs, lanes)

    *_, end_before, end_of_last = ends
    _, start = times[end_before]
    _, stop = times[end_of_last]
    timed = list(zip(steps.jobs, times, strict=True))
    own_jobs = steps.jobs[end_before + 1 : end_of_last + 1]
    return Forecast(
        seconds=stop - start,
        busy_seconds=_busy_seconds(timed, lanes, start, stop),
        alone_seconds=_alone_seconds(own_jobs, lanes),
        moved_bytes=_moved_bytes(own_jobs),
        spans=_spans(timed, start, stop),
    )


def _busy_seconds(timed: Sequence[TimedJob], lanes: Iterable[str], start: float, stop: float) -> dict[str, float]:
    """Return the seconds from start to stop in which each lane works, by the lane's name in a plan.

    A job counts for the step in which it runs, although it may belong to the step before.
    """
    busy = dict.fromkeys(map(queue_of, lanes), 0.0)
    for job, (begin, end) in timed:
        if _is_within(begin, end, start, stop):
            busy[queue_of(job.lane)] += min(end, stop) - max(begin, start)
    return busy


def _spans(timed: Sequence[TimedJob], start: float, stop: float) -> tuple[LaneSpan, ...]:
    """Return the jobs that run from start to stop, in seconds from the start."""
    spans = []
    for job, (begin, end) in timed:
        if _is_within(begin, end, start, stop):
            lane = queue_of(job.lane)
            span = LaneSpan(lane=lane, name=job.name, start=begin - start, end=end - start)
            spans.append(span)
    return tuple(spans)


def _is_within(begin: float, end: float, start: float, stop: float) -> bool:
    """Return whether a job that takes any time runs between start and stop."""
    return end > start and begin < stop and end > begin


def _alone_seconds(jobs: Iterable[Job], lanes: Mapping[str, Lane]) -> dict[str, float]:
    """Return the seconds that the jobs of each lane would take if no other lane worked.

    A job counts for the step to which it belongs, although it may end in the next one.
    """
    alone = dict.fromkeys(map(queue_of, lanes), 0.0)
    for job in jobs:
        seconds = job.amount / lanes[job.lane].rate
        alone[queue_of(job.lane)] += seconds
    return alone


def _moved_bytes(jobs: Iterable[Job]) -> dict[str, float]:
    """Return the bytes that each queue moves for these jobs."""
    moved: dict[str, float] = {}
    for job in jobs:
        queue = queue_of(job.lane)
        moves_bytes = "_to_" in queue or queue == "ranks"
        if moves_bytes:
            moved[queue] = moved.get(queue, 0.0) + job.amount
    return moved


def least_step_seconds(
    accesses: Sequence[Access],
    compute_seconds: ComputeSeconds,
    units: Sequence[UnitSpec],
    placement: Placement,
    policy: Policy,
    rates: Rates,
) -> float:
    """Return a lower bound of `forecast(...).seconds`, without a simulation.

    It counts all work between the end of the step before and the end of this one. Moves and updates that a step leaves
    to the next one (last writes, the exchange, updates in the backward) do not count. Arguments and errors are those
    of `forecast`.
    """
    steps, _, later, lanes = _simulation(accesses, compute_seconds, units, placement, policy, rates)

    # A first step would have no updates.
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
    """Return what is simulated; see `forecast`.

    Returns:
        Jobs without steps; the timelines of the first step and of every later one, in which updates in the backward are
        not void; and the lanes.
    """
    kind = RankJobs if policy.num_ranks > 1 else StepJobs

    # Rates count updates in parameters. A product counts as the parameters that take equally long.
    per_flop = rates.gpu_update_parameters_per_s / rates.flops_per_s
    steps = kind(compute_seconds, units, placement, policy, per_flop)

    # In the immediate mode all updates run in the backward, so none is due in the next step.
    due: set[str] = set()
    if policy.deferred:
        due = placement.grad_homes.keys() - set(placement.speculative)

    scatters = reduce_scatters_of(accesses, units, policy)
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
    lanes = lanes_of(rates, policy.num_ranks, multiplies=multiplies, locked=_locked_shares(units, placement, rates))
    return steps, first, later, lanes


def _locked_shares(units: Sequence[UnitSpec], placement: Placement, rates: Rates) -> tuple[float, float]:
    """Return the pinned share of RAM: that of weights, gradients, activations and slots, and that of other state."""
    weight_bytes = 0
    for spec in units:
        if placement.homes[spec.name, Kind.WEIGHT] is Tier.RAM:
            weight_bytes += block_bytes(spec, Kind.WEIGHT)

    # Compute waits for these bytes, and not for other state.
    awaited_bytes = weight_bytes + placement.other_bytes.get(Tier.RAM, 0)
    state_bytes = placement.state_bytes.get(Tier.RAM, 0)
    return rates.locked_shares(awaited_bytes, state_bytes - weight_bytes)
