"""Moves: the bytes that each part of a step takes from tier to tier, and their sums."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from small_timelines import SIZE, accesses, placement

from megatier.schedule.demand import Demand
from megatier.schedule.moves import Move, Moves, by_lane
from megatier.schedule.placement import Placement
from megatier.schedule.sizes import Policy, UnitSpec
from megatier.schedule.timeline import build
from megatier.tier import Tier

UNITS = {name: UnitSpec(name=name, num_elements=SIZE * (number + 1)) for number, name in enumerate("abc")}


def of_pass(where: Placement, policy: Policy, order: str, *, trains: bool, updates: bool) -> dict[str, int]:
    timeline = build(accesses(order), where, updates=updates)
    moves = Moves(UNITS, where, policy)
    return by_lane(moves.of_pass(timeline, gradients=UNITS if trains else (), updated=UNITS if updates else ()))


def test_moves_of_an_evaluation_are_its_loads() -> None:
    where = placement("abc", 1, ram="b")
    found = of_pass(where, Policy(), "abc", trains=False, updates=False)
    assert found == {"ram_to_gpu": 2 * 6 * SIZE, "nvme_to_ram": 2 * 4 * SIZE}


@pytest.mark.parametrize("groups", [1, 3])
def test_moves_of_a_deferred_step_read_state_once(groups: int) -> None:
    found = of_pass(placement("abc", 3), Policy(groups=groups), "abccba", trains=True, updates=True)
    assert found == {
        "nvme_to_ram": 12 * 6 * SIZE,  # the update feeds the loads
        "ram_to_nvme": 12 * 6 * SIZE,
        "ram_to_gpu": 2 * 6 * SIZE,
        "gpu_to_ram": groups * (2 if groups == 1 else 4) * 6 * SIZE,
    }


def test_moves_of_a_backward_that_reloads() -> None:
    found = of_pass(placement("abc", 1), Policy(), "abccba", trains=True, updates=True)
    assert found["nvme_to_ram"] == 12 * 6 * SIZE + 2 * (1 + 2) * SIZE  # a and b once more
    assert found["ram_to_gpu"] == 2 * 6 * SIZE + 2 * 3 * SIZE


def test_moves_of_a_backward_that_reloads_past_ram() -> None:
    found = of_pass(placement("abc", 1), Policy(gpu_direct=True), "abccba", trains=True, updates=True)
    assert found["nvme_to_ram"] == 12 * 6 * SIZE
    assert found["nvme_to_gpu"] == 2 * (1 + 2) * SIZE  # a and b once more
    assert found["ram_to_gpu"] == 2 * 6 * SIZE  # the update feeds the loads


def test_moves_past_ram_are_those_of_what_is_on_nvme_alone() -> None:
    where = placement("abc", 1, ram="b")
    found = of_pass(where, Policy(gpu_direct=True), "abc", trains=False, updates=False)
    assert found == {"ram_to_gpu": 2 * 2 * SIZE, "nvme_to_gpu": 2 * 4 * SIZE}


def test_moves_with_everything_on_the_gpu_are_none() -> None:
    assert of_pass(placement("abc", 0, gpu="abc"), Policy(), "abccba", trains=True, updates=True) == {}


@pytest.mark.parametrize(
    ("where", "size"),
    [(placement("abc", 1), 12), (placement("abc", 1, ram="a"), 10), (placement("abc", 1, gpu="a"), 0)],
    ids=["nvme", "weights in ram", "gpu"],
)
def test_update_reads_and_writes_the_planes_on_nvme_alone(where: Placement, size: int) -> None:
    moves = Moves(UNITS, where, Policy())
    assert moves.read_state("a") == (Move("nvme_to_ram", size * SIZE),)
    assert moves.write_state("a") == (Move("ram_to_nvme", size * SIZE),)


def test_update_reads_a_gradient_on_nvme_once() -> None:
    where = replace(placement("abc", 1), grad_homes=dict.fromkeys("abc", Tier.NVME))
    moves = Moves(UNITS, where, Policy())
    assert by_lane(moves.update("a")) == {"nvme_to_ram": 14 * SIZE, "ram_to_nvme": 12 * SIZE}
    assert moves.ship("a", is_last=True) == (Move("gpu_to_ram", 2 * SIZE), Move("ram_to_nvme", 2 * SIZE))


@pytest.mark.parametrize("gpu_direct", [False, True])
def test_sums_that_come_to_the_gpu_again_move_up_for_each_group_but_the_first(gpu_direct: bool) -> None:
    policy = Policy(groups=3, gpu_direct=gpu_direct, align_elements=SIZE)
    homes = {"a": Tier.NVME, "b": Tier.RAM, "c": Tier.GPU}
    where = replace(placement("abc", 1, gpu="abc"), grad_homes=homes, sums_on_gpu=True)
    a, b = (UNITS[name].num_elements for name in "ab")
    assert of_pass(where, policy, "abccba", trains=True, updates=False) == {
        "gpu_to_ram": 10 * (a + b),
        "ram_to_nvme": 10 * a,
        ("nvme_to_gpu" if gpu_direct else "nvme_to_ram"): 8 * a,
        "ram_to_gpu": 8 * b + (0 if gpu_direct else 8 * a),
    }


def test_state_of_a_streamed_unit_goes_home_and_comes_again_but_for_its_weights() -> None:
    moves = Moves(UNITS, placement("abc", 1, ram="abc"), Policy())
    assert moves.return_weights("b") == (Move("gpu_to_ram", 2 * 2 * SIZE),)
    assert moves.return_state("b") == (Move("state_to_ram", 10 * 2 * SIZE),)
    assert moves.fetch_state("b") == (Move("state_to_gpu", 10 * 2 * SIZE),)


@pytest.mark.parametrize("deferred", [True, False])
def test_demand_of_a_pass_takes_back_what_it_left_out(deferred: bool) -> None:
    where, policy = placement("abc", 3), Policy(deferred=deferred)
    timeline = build(accesses("abccba"), where, updates=deferred)
    moves = Moves(UNITS, where, policy)
    demand = Demand(moves, where, policy)
    demand.begin_pass(timeline, trains=True)
    whole = demand.moved
    demand.end_pass(timeline, {"a", "c"}, trains=True)
    expected = by_lane(moves.gradients("b")) if deferred else by_lane((*moves.gradients("b"), *moves.update("b")))
    assert dict(whole - demand.moved) == expected


def test_demand_of_several_threads_loses_no_move() -> None:
    where = placement("abc", 3)
    demand = Demand(Moves(UNITS, where, Policy()), where, Policy())
    with ThreadPoolExecutor(4) as threads:
        for _ in range(2000):
            threads.submit(demand.add, [Move("ram_to_gpu", 3), Move("gpu_to_ram", 4)])
    assert demand.moved == {"ram_to_gpu": 6000, "gpu_to_ram": 8000}
