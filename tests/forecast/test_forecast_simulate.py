"""The simulation of lanes that share resources."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from megatier.forecast import simulate as simulation
from megatier.forecast.simulate import Job, Lane, least_seconds


def simulate(jobs: Sequence[Job], lanes: Mapping[str, Lane]) -> list[tuple[float, float]]:
    """Rounded, so that times can be compared."""
    return [(round(start, 9), round(end, 9)) for start, end in simulation.simulate(jobs, lanes)]


ONE_PROCESS = {"copy": Lane(10.0), "work": Lane(2.0)}


def test_simulate_one_lane_runs_in_order() -> None:
    jobs = [Job(lane="copy", name="a", amount=20), Job(lane="copy", name="b", amount=5)]
    assert simulate(jobs, ONE_PROCESS) == [(0, 2), (2, 2.5)]


def test_simulate_job_after_others_begins_when_the_last_ends() -> None:
    jobs = [
        Job(lane="copy", name="a", amount=20),
        Job(lane="work", name="b", amount=10),
        Job(lane="copy", name="c", amount=10, after=(0, 1)),
    ]
    assert simulate(jobs, ONE_PROCESS)[2] == (5, 6)


def test_simulate_job_of_no_amount_ends_at_once_and_lets_others_begin() -> None:
    jobs = [
        Job(lane="copy", name="a", amount=0),
        Job(lane="work", name="b", amount=0, after=(0,)),
        Job(lane="copy", name="c", amount=10, after=(1,)),
    ]
    assert simulate(jobs, ONE_PROCESS) == [(0, 0), (0, 0), (0, 1)]


def test_simulate_lane_waits_for_its_first_job_even_if_the_next_could_begin() -> None:
    jobs = [
        Job(lane="work", name="a", amount=4),
        Job(lane="copy", name="b", amount=10, after=(0,)),
        Job(lane="copy", name="c", amount=10),
    ]
    assert simulate(jobs, ONE_PROCESS)[1:] == [(2, 3), (3, 4)]


def test_simulate_two_lanes_on_a_full_resource_share_it() -> None:
    lanes = {"read": Lane(10.0, {"disk": 1.0}), "write": Lane(5.0, {"disk": 1.0})}
    assert simulate([Job(lane="read", name="a", amount=10), Job(lane="write", name="b", amount=10)], lanes) == [
        (0, 2),
        (0, 3),
    ]


def test_simulate_lane_off_the_full_resource_keeps_its_rate() -> None:
    lanes = {"a": Lane(1.0, {"disk": 1.0}), "b": Lane(1.0, {"disk": 1.0}), "c": Lane(1.0, {"memory": 0.9})}
    jobs = [Job(lane="a", name="", amount=1), Job(lane="b", name="", amount=1), Job(lane="c", name="", amount=1)]
    assert simulate(jobs, lanes) == [(0, 2), (0, 2), (0, 1)]


def test_simulate_lane_with_its_own_limit_leaves_the_rest_to_others() -> None:
    lanes = {"a": Lane(1.0, {"memory": 0.2}), "b": Lane(1.0, {"memory": 0.9}), "c": Lane(1.0, {"memory": 0.9, "x": 1})}
    times = simulate(
        [Job(lane="a", name="", amount=10), Job(lane="b", name="", amount=0.5), Job(lane="c", name="", amount=0.5)],
        lanes,
    )
    assert times == [(0, 10.5), (0, 1), (0, 1)]


def test_simulate_no_jobs_takes_no_time() -> None:
    assert simulate([], ONE_PROCESS) == []


def test_simulate_job_that_waits_for_a_later_one_of_its_lane_is_refused() -> None:
    with pytest.raises(AssertionError, match="waits for a later one of its lane"):
        simulate([Job(lane="copy", name="a", amount=1, after=(1,)), Job(lane="copy", name="b", amount=1)], ONE_PROCESS)


def test_least_seconds_of_jobs_that_wait_for_each_other_are_the_longest_chain() -> None:
    jobs = [
        Job(lane="copy", name="a", amount=20),
        Job(lane="work", name="b", amount=10),
        Job(lane="copy", name="c", amount=10, after=(0, 1)),
        Job(lane="work", name="d", amount=2, after=(2,)),
    ]
    assert least_seconds(jobs, ONE_PROCESS, "work") == 7


def test_least_seconds_count_what_a_full_resource_must_carry_and_nothing_that_may_be_left() -> None:
    lanes = {"read": Lane(10.0, {"disk": 1.0}), "write": Lane(5.0, {"disk": 1.0}), "work": Lane(1.0)}
    jobs = [
        Job(lane="read", name="a", amount=10),
        Job(lane="write", name="b", amount=10),
        Job(lane="write", name="c", amount=100),
        Job(lane="work", name="d", amount=4, after=(0, 1)),
    ]
    assert least_seconds(jobs, lanes, "work") == 7
    assert least_seconds([], lanes, "work") == 0


def some_jobs(seed: int) -> tuple[list[Job], dict[str, Lane]]:
    """Lanes that share a few resources, and jobs of any order."""
    rng = random.Random(seed)
    lanes = {}
    for number in range(rng.randint(1, 7)):
        uses = {name: rng.choice([1.0, rng.uniform(0.05, 1.0)]) for name in "abc" if rng.random() < 0.5}
        lanes[f"lane{number}"] = Lane(10 ** rng.uniform(-2, 3), uses)
    jobs: list[Job] = []
    for index in range(rng.randint(1, 60)):
        lane = rng.choice(list(lanes))
        after = {rng.randrange(index) for _ in range(rng.randint(0, 3))} if index else set()
        jobs.append(
            Job(
                lane=lane,
                name=str(index),
                amount=lanes[lane].rate * rng.choice([0.0, 1.0, rng.uniform(0, 3)]),
                after=tuple(after),
            )
        )
    return jobs, lanes


@pytest.mark.parametrize("seed", range(50))
def test_least_seconds_of_any_jobs_are_no_more_than_they_take(seed: int) -> None:
    jobs, lanes = some_jobs(seed)
    for spine in lanes:
        latest = max((index for index, job in enumerate(jobs) if job.lane == spine), default=None)
        end = Job(lane="end", name="", amount=0.5, after=() if latest is None else (latest, len(jobs) - 1))
        with_end, with_lane = [*jobs, end], {**lanes, "end": Lane(1.0)}
        assert least_seconds(with_end, with_lane, spine) <= simulation.simulate(with_end, with_lane)[-1][1] + 1e-9


@pytest.mark.parametrize("seed", range(50))
def test_simulate_of_any_jobs_keeps_order_rates_and_resources(seed: int) -> None:
    jobs, lanes = some_jobs(seed)
    times = simulation.simulate(jobs, lanes)
    free = dict.fromkeys(lanes, 0.0)
    for job, (start, end) in zip(jobs, times, strict=True):
        ready = max([free[job.lane], *(times[other][1] for other in job.after)])
        assert start == pytest.approx(ready, abs=1e-9)  # nothing waits that could begin
        assert end - start >= job.amount / lanes[job.lane].rate - 1e-9
        free[job.lane] = end
    for resource in "abc":
        shares = [lanes[job.lane].uses.get(resource, 0.0) * job.amount / lanes[job.lane].rate for job in jobs]
        assert sum(shares) <= max(end for _, end in times) + 1e-9
