"""A simulation of lanes that share links, drives and memory, event by event. Pure.

A lane does its jobs in order, one at a time. A job begins when the jobs that it waits for are over. Jobs that run at
the same time share resources by max-min fairness: the speeds of all lanes, as shares of their own rates, rise from zero
together, and each stops at its own rate, or when a resource that it uses is full. Speeds change only when a job ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

TOLERANCE = 1e-12
"""Remaining seconds of a job, and remaining shares of a resource, count as zero up to this size because of rounding."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A queue, compute or the host, which does one job at a time."""

    rate: float
    """Amount a second if no other lane works."""
    uses: Mapping[str, float] = field(default_factory=dict)
    """Share of each resource that the lane uses at its full rate; 1 is all of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job of a lane."""

    lane: str
    """Name of the lane."""
    name: str
    """Block or unit that the job is about."""
    amount: float
    """Bytes, parameters or seconds, whichever the lane's rate counts."""
    after: tuple[int, ...] = ()
    """Indices of the jobs that must be over before. All are smaller than the job's own."""


def simulate(jobs: Sequence[Job], lanes: Mapping[str, Lane]) -> list[tuple[float, float]]:
    """Return when each job begins and ends, in seconds from the start.

    Args:
        jobs: in the order of their lanes.
        lanes: the lanes, by name.
    """
    # The first job of a lane runs if the lane is in `left`, else it waits.
    to_do: dict[str, deque[int]] = {name: deque() for name in lanes}
    for index, job in enumerate(jobs):
        to_do[job.lane].append(index)
    starts = [0.0] * len(jobs)
    ends = [0.0] * len(jobs)
    is_over = [False] * len(jobs)
    waiting: dict[int, list[str]] = {}
    """By job, the lanes whose first job waits for it."""
    left: dict[str, float] = {}
    """Seconds that the job of each running lane still takes at the lane's full rate."""
    speeds: dict[frozenset[str], Mapping[str, float]] = {}
    """Speeds of each set of lanes that has run together so far."""
    able = list(lanes)
    """Lanes whose first job may begin, because it has just become the first or a job that it waited for is over."""
    now = 0.0

    while True:
        # Begin all jobs that can begin. A lane waits for one unfinished job at a time, and then looks for the next.
        for name in able:
            if not to_do[name]:
                continue
            index = to_do[name][0]
            missing = next((other for other in jobs[index].after if not is_over[other]), None)
            if missing is None:
                starts[index] = now
                left[name] = jobs[index].amount / lanes[name].rate
            else:
                waiting.setdefault(missing, []).append(name)

        if not left:
            break

        # Run until the first job ends. The same lanes often run together, and then have the same speeds.
        together = frozenset(left)
        if together not in speeds:
            speeds[together] = _share_lanes(together, lanes)
        speed = speeds[together]
        step = min([seconds / speed[name] for name, seconds in left.items()])
        now += step
        able = []

        for name in together:
            left[name] -= step * speed[name]
            if left[name] <= TOLERANCE:
                del left[name]
                index = to_do[name].popleft()
                ends[index] = now
                is_over[index] = True
                able += [name, *waiting.pop(index, ())]

    assert not any(to_do.values()), "a job waits for a later one of its lane"
    return list(zip(starts, ends, strict=True))


def least_seconds(jobs: Sequence[Job], lanes: Mapping[str, Lane], spine: str) -> float:
    """Return a lower bound of the seconds until the last job ends, without a simulation.

    A job begins when its lane's earlier jobs and all jobs that it waits for, directly or not, are over. So it begins no
    sooner than the last of them would end without competition, and no sooner than each resource could have carried
    all of them. The load of resources is added up for one lane, because it only grows from job to job.

    For job j with amount a on a lane of rate r, end(j) = start(j) + a / r, and start(j) is the largest of end(k) over
    all k that j waits for and, on the spine, of the seconds that each resource needs for all before j.

    Args:
        jobs: in the order of their lanes.
        lanes: the lanes, by name.
        spine: a lane all of whose jobs the last job waits for. The load of resources is added up for these jobs.
    """
    ends = [0.0] * len(jobs)
    needed: list[tuple[int, ...]] = []
    """The jobs that each job waits for, the one before it on its lane included."""
    latest: dict[str, int] = {}
    """The last job of each lane so far."""
    is_carried = [False] * len(jobs)
    """Whether each job is counted in `carried`."""
    carried: dict[str, float] = {}
    """Seconds that each resource needs for the jobs that the spine has waited for so far."""

    for index, job in enumerate(jobs):
        before = (latest[job.lane],) if job.lane in latest else ()
        latest[job.lane] = index
        needed.append((*job.after, *before))
        start = max([ends[other] for other in needed[index]], default=0.0)

        # Walk back to all jobs that are not counted yet. Each job is visited once, so the time is linear.
        is_last = index == len(jobs) - 1
        if job.lane == spine or is_last:
            stack = list(needed[index])
            while stack:
                other = stack.pop()
                if is_carried[other]:
                    continue

                is_carried[other] = True
                stack += needed[other]
                lane = lanes[jobs[other].lane]
                for resource, share in lane.uses.items():
                    seconds = share * jobs[other].amount / lane.rate
                    carried[resource] = carried.get(resource, 0.0) + seconds

            start = max([start, *carried.values()])

        ends[index] = start + job.amount / lanes[job.lane].rate

    return ends[-1] if ends else 0.0


def _share_lanes(together: Collection[str], lanes: Mapping[str, Lane]) -> dict[str, float]:
    """Return the speeds of lanes that run at once, as shares of their own rates."""
    # Sums of floats depend on their order, and the order of a set differs from process to process.
    speeds = dict.fromkeys(sorted(together), 0.0)
    rising = list(speeds)
    room = {resource: 1.0 for name in rising for resource in lanes[name].uses}
    level = 0.0

    while rising:
        # `pull` is what the rising lanes use of each resource when their level rises by 1.
        pull = dict.fromkeys(room, 0.0)
        for name in rising:
            for resource, share in lanes[name].uses.items():
                pull[resource] += share

        # All rise together until they reach their own rates or a resource is full, whose users stay at that level.
        limits = [room[key] / pull[key] for key in room if pull[key] > 0]
        rise = min([1.0 - level, *limits])
        level += rise
        full = set()

        for key in room:
            room[key] -= rise * pull[key]
            if pull[key] > 0 and room[key] <= TOLERANCE:
                full.add(key)

        for name in list(rising):
            if level >= 1.0 - TOLERANCE or not full.isdisjoint(lanes[name].uses):
                rising.remove(name)
                speeds[name] = level

    return speeds
