"""Discrete-event simulation of lanes that share links, drives and memory. Pure.

A lane does its jobs one after the other, in order; a job begins when those that it waits for are over. Jobs that run
at once share resources: all speed up from nothing alike, each up to its lane's own rate, and where a resource is full
those that use it keep the speed they have (max-min fairness on the share of each lane's own rate). Between two events,
ends of jobs, speeds are constant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Lane:
    """What does one job at a time.

    Attributes:
        rate: amount a second with nothing else going on.
        uses: share of each resource that the lane takes at its full rate; 1 is all of it.
    """

    rate: float
    uses: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Job:
    """Something that a lane does.

    Attributes:
        lane: its name.
        name: block or unit.
        amount: bytes, parameters or seconds: what the lane's rate counts.
        after: indices of jobs that must be over; each smaller than the job's own.
    """

    lane: str
    name: str
    amount: float
    after: tuple[int, ...] = ()


@dataclass(slots=True)
class _Run:
    """A job under way."""

    index: int
    left: float
    """Seconds at the lane's own rate."""
    speed: float = 0.0
    """Share of the lane's own rate."""


def simulate(jobs: Sequence[Job], lanes: Mapping[str, Lane]) -> list[tuple[float, float]]:
    """When each job begins and ends, in seconds from the start.

    Args:
        jobs: in the order of their lanes.
        lanes: by name.
    """
    times = [(0.0, 0.0)] * len(jobs)
    waiting: dict[str, list[int]] = {name: [] for name in lanes}
    for index in reversed(range(len(jobs))):
        waiting[jobs[index].lane].append(index)
    is_over = [False] * len(jobs)
    running: dict[str, _Run] = {}
    now = 0.0
    while True:
        _start(jobs, lanes, waiting, is_over, running, times, now)
        if not running:
            break
        _share(running, lanes)
        step = min(run.left / run.speed for run in running.values())
        now += step
        for name, run in list(running.items()):
            run.left -= step * run.speed
            if run.left <= 1e-12:
                times[run.index] = (times[run.index][0], now)
                is_over[run.index] = True
                del running[name]
    assert all(is_over), "a job waits for one behind it on its lane"
    return times


def _start(
    jobs: Sequence[Job],
    lanes: Mapping[str, Lane],
    waiting: Mapping[str, list[int]],
    is_over: list[bool],
    running: dict[str, _Run],
    times: list[tuple[float, float]],
    now: float,
) -> None:
    """Begin whatever can begin; jobs of no amount end at once and may let others begin."""
    has_changed = True
    while has_changed:
        has_changed = False
        for name, queue in waiting.items():
            while name not in running and queue and all(is_over[index] for index in jobs[queue[-1]].after):
                index = queue.pop()
                times[index] = (now, now)
                seconds = jobs[index].amount / lanes[name].rate
                if seconds > 0:
                    running[name] = _Run(index, seconds)
                else:
                    is_over[index] = has_changed = True


def _share(running: Mapping[str, _Run], lanes: Mapping[str, Lane]) -> None:
    """Set every running job's speed."""
    rising = dict(running)
    room: dict[str, float] = {}
    for name in running:
        for resource in lanes[name].uses:
            room[resource] = 1.0
    level = 0.0
    while rising:
        pull = dict.fromkeys(room, 0.0)
        for name in rising:
            for resource, share in lanes[name].uses.items():
                pull[resource] += share
        rise = min([1.0 - level, *(room[key] / pull[key] for key in room if pull[key] > 0)])
        level += rise
        full = set()
        for key in room:
            room[key] -= rise * pull[key]
            if pull[key] > 0 and room[key] <= 1e-12:
                full.add(key)
        for name in list(rising):
            if level >= 1.0 - 1e-12 or not full.isdisjoint(lanes[name].uses):
                rising.pop(name).speed = level
