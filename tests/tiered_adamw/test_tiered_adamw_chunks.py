"""How an optimizer's state is cut and placed: every element once, inside the budgets, alternating between tiers."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from megatier.errors import PlanError
from megatier.state import ADAMW_BF16, ADAMW_FP32
from megatier.tier import PAGE_BYTES, Kind, Tier, round_up
from megatier.tiered_adamw.chunks import SLOTS, STATE_CHUNK_ELEMENTS_MAX, ChunkPlan, ParameterSize, plan_chunks

MIB = 1 << 20


def sizes_of(*counts: int, is_split: bool = True) -> list[ParameterSize]:
    return [ParameterSize(index, count, ADAMW_BF16 if is_split else ADAMW_FP32) for index, count in enumerate(counts)]


def ram_bytes(plan: ChunkPlan) -> int:
    return plan.num_bytes(Tier.RAM) + plan.num_ram_slots * round_up(plan.slot_bytes)


@pytest.mark.parametrize("seed", range(20))
def test_plan_of_random_parameters_holds_each_element_once_inside_the_budgets(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [
        ParameterSize(
            index,
            draw.choice([0, 1, 127, 128, 5000, 100_000, 9 * MIB]),
            ADAMW_BF16 if draw.random() < 0.5 else ADAMW_FP32,
        )
        for index in range(draw.randint(1, 12))
    ]
    ram = draw.choice([128 << 10, MIB, 300 * MIB, 2000 * MIB])
    plan = plan_chunks(sizes, ram, 2000 * MIB)
    assert ram_bytes(plan) <= ram
    for size in sizes:
        runs = [run for chunk in plan.chunks for run in chunk.runs if run.parameter == size.index]
        edges = [0, *(run.stop for run in runs)]
        assert [run.start for run in runs] == edges[:-1]
        assert edges[-1] == size.num_elements
    for chunk in plan.chunks:
        planes = sorted(span for run in chunk.runs for span in run.planes.values())
        assert all(first[1] <= second[0] for first, second in pairwise(planes))
        assert planes[-1][1] <= chunk.num_bytes <= plan.slot_bytes


def test_planes_of_a_bf16_parameter_are_a_remainder_and_two_moments() -> None:
    (chunk,) = plan_chunks(sizes_of(100), MIB, 0).chunks
    (run,) = chunk.runs
    assert run.planes == {Kind.REMAINDER: (0, 200), Kind.EXP_AVG: (256, 656), Kind.EXP_AVG_SQ: (768, 1168)}
    assert chunk.num_bytes == 10 * 128


def test_small_parameters_share_a_chunk() -> None:
    assert len(plan_chunks(sizes_of(*[500] * 1000), 64 * MIB, 0).chunks) == 1


def test_state_that_fits_ram_takes_no_slots() -> None:
    plan = plan_chunks(sizes_of(2 * STATE_CHUNK_ELEMENTS_MAX), 80 * MIB, 1)
    assert {chunk.home for chunk in plan.chunks} == {Tier.RAM}
    assert plan.num_ram_slots == 0


def test_homes_alternate_as_the_budget_allows() -> None:
    plan = plan_chunks(sizes_of(40 * MIB), 300 * MIB, 400 * MIB)
    homes = [chunk.home for chunk in plan.chunks]
    share = homes.count(Tier.RAM) / len(homes)
    assert 0.3 < share < 0.7
    for start in range(0, len(homes) - 10, 10):
        assert abs(homes[start : start + 10].count(Tier.RAM) - 10 * share) <= 1


@pytest.mark.parametrize(
    ("ram", "nvme", "what", "remedy"),
    [
        (MIB, 0, "optimizer state in RAM", "Raise ram to at least 100.0 MiB, or name a drive"),
        (5 * PAGE_BYTES, 200 * MIB, "RAM slots", "Raise ram to at least 100.0 KiB"),
        (MIB, 50 * MIB, "optimizer state on NVMe", "Give nvme more space"),
    ],
)
def test_state_that_does_not_fit_is_refused_with_figures(ram: int, nvme: int, what: str, remedy: str) -> None:
    with pytest.raises(PlanError, match=remedy) as caught:
        plan_chunks(sizes_of(10 * MIB), ram, nvme)
    assert caught.value.what.startswith(what)
    assert caught.value.needed_bytes > caught.value.had_bytes


def test_least_ram_that_a_refusal_names_is_enough() -> None:
    plan = plan_chunks(sizes_of(10 * MIB), SLOTS * 5 * PAGE_BYTES, 200 * MIB)
    assert {chunk.home for chunk in plan.chunks} == {Tier.NVME}
