"""The simulation of lanes that share resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatier.schedule import simulate as simulation
from megatier.schedule.simulate import Job, Lane


def simulate(jobs: Sequence[Job], lanes: Mapping[str, Lane]) -> list[tuple[float, float]]:
    """Rounded, so that times can be compared."""
    return [(round(start, 9), round(end, 9)) for start, end in simulation.simulate(jobs, lanes)]


ALONE = {"copy": Lane(10.0), "work": Lane(2.0)}


def test_simulate_one_lane_runs_in_order() -> None:
    jobs = [Job("copy", "a", 20), Job("copy", "b", 5)]
    assert simulate(jobs, ALONE) == [(0, 2), (2, 2.5)]


def test_simulate_job_after_others_begins_when_the_last_ends() -> None:
    jobs = [Job("copy", "a", 20), Job("work", "b", 10), Job("copy", "c", 10, (0, 1))]
    assert simulate(jobs, ALONE)[2] == (5, 6)


def test_simulate_job_of_no_amount_ends_at_once_and_lets_others_begin() -> None:
    jobs = [Job("copy", "a", 0), Job("work", "b", 0, (0,)), Job("copy", "c", 10, (1,))]
    assert simulate(jobs, ALONE) == [(0, 0), (0, 0), (0, 1)]


def test_simulate_lane_waits_for_its_first_job_even_if_the_next_could_begin() -> None:
    jobs = [Job("work", "a", 4), Job("copy", "b", 10, (0,)), Job("copy", "c", 10)]
    assert simulate(jobs, ALONE)[1:] == [(2, 3), (3, 4)]


def test_simulate_two_lanes_on_a_full_resource_share_it() -> None:
    lanes = {"read": Lane(10.0, {"disk": 1.0}), "write": Lane(5.0, {"disk": 1.0})}
    assert simulate([Job("read", "a", 10), Job("write", "b", 10)], lanes) == [(0, 2), (0, 3)]


def test_simulate_lane_off_the_full_resource_keeps_its_rate() -> None:
    lanes = {"a": Lane(1.0, {"disk": 1.0}), "b": Lane(1.0, {"disk": 1.0}), "c": Lane(1.0, {"memory": 0.9})}
    jobs = [Job("a", "", 1), Job("b", "", 1), Job("c", "", 1)]
    assert simulate(jobs, lanes) == [(0, 2), (0, 2), (0, 1)]


def test_simulate_lane_with_its_own_limit_leaves_the_rest_to_others() -> None:
    lanes = {"a": Lane(1.0, {"memory": 0.2}), "b": Lane(1.0, {"memory": 0.9}), "c": Lane(1.0, {"memory": 0.9, "x": 1})}
    times = simulate([Job("a", "", 10), Job("b", "", 0.5), Job("c", "", 0.5)], lanes)
    assert times == [(0, 10.5), (0, 1), (0, 1)]


def test_simulate_no_jobs_takes_no_time() -> None:
    assert simulate([], ALONE) == []
