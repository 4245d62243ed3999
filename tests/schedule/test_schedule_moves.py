"""Moves: the bytes that each part of a step takes from tier to tier, and their sums."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from small_timelines import SIZE, accesses, placement

from megatier.schedule.demand import Demand
from megatier.schedule.moves import Move, Moves, by_queue
from megatier.schedule.placement import Placement
from megatier.schedule.policy import Policy
from megatier.schedule.timeline import Access, Update, build
from megatier.schedule.unit_spec import UnitSpec
from megatier.tier import Phase, Tier

UNITS = {name: UnitSpec(name=name, num_elements=SIZE * (number + 1)) for number, name in enumerate("abc")}


def of_pass(where: Placement, policy: Policy, order: str, *, trains: bool, updates: bool) -> dict[str, int]:
    timeline = build(accesses(order), where, due=UNITS if updates else ())
    moves = Moves(UNITS, where, policy)
    made = [move for item in timeline.items for move in moves.of(item)]
    return by_queue([*made, *(move for unit in UNITS if trains for move in moves.gradients(unit))])


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
    assert by_queue(moves.update("a")) == {"nvme_to_ram": 14 * SIZE, "ram_to_nvme": 12 * SIZE}
    shipped = moves.gradient("a", 0).shipped
    assert shipped == (Move("gpu_to_ram", 2 * SIZE), Move("ram_to_nvme", 2 * SIZE))


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


def test_items_of_streamed_units_move_their_state_and_weights() -> None:
    where = replace(placement("abc", 1, ram="abc"), streamed=("a", "b"))
    moves = Moves(UNITS, where, Policy())
    found = [by_queue(moves.of(item)) for item in build(accesses("abc"), where, due="ab", ahead="a").items]
    assert found == [
        {"state_to_gpu": 20 * SIZE},  # b has to come before its update
        {"ram_to_gpu": 2 * SIZE, "gpu_to_ram": 2 * SIZE},
        {"ram_to_gpu": 4 * SIZE, "gpu_to_ram": 4 * SIZE},
        {"ram_to_gpu": 6 * SIZE},
        {"state_to_ram": 30 * SIZE, "state_to_gpu": 30 * SIZE},
    ]


@pytest.mark.parametrize("deferred", [True, False])
def test_gradient_of_the_last_group_is_final_and_updated_unless_the_norm_is_waited_for(deferred: bool) -> None:
    moves = Moves(UNITS, placement("abc", 3), Policy(groups=2, deferred=deferred))
    first, last = (moves.gradient("a", group) for group in range(2))
    assert (first.is_final, last.is_final) == (False, True)
    assert first.sums_in_ram
    assert last.sums_in_ram
    assert first.update is None
    assert last.update == (None if deferred else Update(unit="a"))


def test_gradient_of_a_unit_that_speculates_is_updated_at_once() -> None:
    where = replace(placement("abc", 3), spilled=("a", "b", "c"), speculative=("a",))
    moves = Moves(UNITS, where, Policy(generations=2))
    made = [moves.gradient(unit, 0).update for unit in "ab"]
    assert made == [Update(unit="a"), None]


def test_sums_are_fetched_ahead_if_they_left_the_gpu_after_the_group_before() -> None:
    order = [Access(unit, Phase.BACKWARD, group) for group in range(2) for unit in "abc"]
    homes = {"a": Tier.NVME, "b": Tier.RAM, "c": Tier.GPU}
    where = replace(placement("abc", 1, gpu="abc"), grad_homes=homes, sums_on_gpu=True)
    moves, timeline = Moves(UNITS, where, Policy(groups=2)), build(order, where)
    assert moves.sums_ahead(timeline) == {3, 4}
    assert [bool(moves.gradient(unit, 1).fetched) for unit in "abc"] == [True, True, False]
    assert not moves.gradient("a", 0).fetched
    in_ram = Moves(UNITS, replace(where, sums_on_gpu=False), Policy(groups=2))
    assert in_ram.sums_ahead(timeline) == frozenset()


def test_demand_of_several_threads_loses_no_move() -> None:
    demand = Demand()
    with ThreadPoolExecutor(4) as threads:
        for _ in range(2000):
            threads.submit(demand.add, [Move("ram_to_gpu", 3), Move("gpu_to_ram", 4)])
    assert demand.moved == {"ram_to_gpu": 6000, "gpu_to_ram": 8000}
