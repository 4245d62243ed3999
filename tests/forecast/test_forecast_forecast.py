"""The forecast of a step: bytes as the timeline demands them, and times that follow from rates."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from small_timelines import planned_reduce_scatters

from megatier.forecast.forecast import Forecast, forecast, least_step_seconds
from megatier.forecast.jobs import HOST_SECONDS
from megatier.schedule.budgets import Budgets
from megatier.schedule.drive_rates import DriveRates
from megatier.schedule.moves import Moves, by_queue
from megatier.schedule.placement import Placement, place
from megatier.schedule.policy import Policy
from megatier.schedule.rates import Rates
from megatier.schedule.timeline import Access, Load, ReduceScatter, build, reduce_scatters_of
from megatier.schedule.unit_spec import UnitSpec
from megatier.state import ADAMW, ADAMW_BF16, MUON
from megatier.tier import Kind, Phase, Tier, Transport

MIB = 1 << 20
UNITS = tuple(UnitSpec(name=f"unit{i}", num_elements=MIB) for i in range(6))
SECONDS = {(unit.name, phase): 0.01 * (1 + (phase is Phase.BACKWARD)) for unit in UNITS for phase in Phase}
FAST = Rates(
    drives=(DriveRates(directory="a", read_bytes_per_s=1e15, write_bytes_per_s=1e15, mixed_bytes_per_s=1e15),),
    to_gpu_bytes_per_s=1e15,
    to_ram_bytes_per_s=1e15,
    update_parameters_per_s=1e15,
    memory_bytes_per_s=1e18,
    gpu_update_parameters_per_s=1e15,
    flops_per_s=1e15,
    gather_bytes_per_s=1e15,
    scatter_bytes_per_s=1e15,
    ranks_slowdown=0.2,
)
PLACES = {
    "gpu": (Budgets(200 * MIB, 0, 0), Policy()),
    "ram": (Budgets(16 * MIB, 200 * MIB, 0), Policy(state=(Tier.RAM,))),
    "streamed": (Budgets(64 * MIB, 200 * MIB, 0), Policy(state=(Tier.RAM,), streamed_share=0.5)),
    "nvme": (Budgets(16 * MIB, 60 * MIB, 200 * MIB), Policy(state=(Tier.NVME,))),
    "past_ram": (Budgets(16 * MIB, 60 * MIB, 200 * MIB), Policy(state=(Tier.NVME,), gpu_direct=True)),
    "mixed": (Budgets(40 * MIB, 36 * MIB, 200 * MIB), Policy(chunk_elements=MIB // 8)),
    "groups": (Budgets(16 * MIB, 100 * MIB, 200 * MIB), Policy(groups=3)),
    "twice": (Budgets(16 * MIB, 60 * MIB, 200 * MIB), Policy(state=(Tier.NVME,), generations=2)),
    "grads": (Budgets(16 * MIB, 12 * MIB, 200 * MIB), Policy(state=(Tier.NVME,), chunk_elements=MIB // 8)),
    "group_grads": (Budgets(24 * MIB, 18 * MIB, 200 * MIB), Policy(groups=3, chunk_elements=MIB // 8)),
    "immediate": (Budgets(16 * MIB, 60 * MIB, 200 * MIB), Policy(state=(Tier.NVME,), deferred=False)),
    "ranks_gpu": (Budgets(250 * MIB, 0, 0), Policy(num_ranks=2)),
    "ranks_ram": (Budgets(70 * MIB, 200 * MIB, 0), Policy(state=(Tier.RAM,), num_ranks=2, groups=2)),
    "ranks_streamed": (
        Budgets(120 * MIB, 200 * MIB, 0),
        Policy(state=(Tier.RAM,), streamed_share=0.5, num_ranks=2, groups=2),
    ),
    "ranks_nvme": (Budgets(80 * MIB, 60 * MIB, 200 * MIB), Policy(state=(Tier.NVME,), num_ranks=3, groups=3)),
    "ranks_twice": (Budgets(60 * MIB, 60 * MIB, 200 * MIB), Policy(state=(Tier.NVME,), num_ranks=2, generations=2)),
}


def accesses(groups: int) -> list[Access]:
    passes = []
    for group in range(groups):
        passes += [Access(unit.name, Phase.FORWARD, group) for unit in UNITS]
        passes += [Access(unit.name, Phase.BACKWARD, group) for unit in reversed(UNITS)]
    return passes


def of(place_name: str, rates: Rates) -> tuple[Forecast, Placement, Policy]:
    budgets, policy = PLACES[place_name]
    placement = place(UNITS, budgets, policy)
    return forecast(accesses(policy.groups), SECONDS, UNITS, placement, policy, rates), placement, policy


@pytest.mark.parametrize("name", PLACES)
def test_forecast_moves_the_bytes_that_the_timeline_demands(name: str) -> None:
    made, placement, policy = of(name, FAST)
    order = accesses(policy.groups)
    scatters = reduce_scatters_of(order, UNITS, policy)
    units = {unit.name: unit for unit in UNITS}
    at_once = units if not policy.deferred else placement.speculative
    due = units.keys() - set(at_once)
    timeline = build(order, placement, due=due, ahead=placement.streamed, scatters=scatters)
    moves = Moves(units, placement, policy)
    parts = [moves.of(item) for item in timeline.items]
    parts += [moves.gradients(unit) for unit in units]
    parts += [moves.update(unit) for unit in at_once]
    demanded = by_queue(move for part in parts for move in part)
    assert {queue: size for queue, size in made.moved_bytes.items() if size} == pytest.approx(demanded)


@pytest.mark.parametrize("name", PLACES)
def test_forecast_with_links_that_take_no_time_is_compute_alone(name: str) -> None:
    made, _, policy = of(name, FAST)
    assert made.seconds == pytest.approx(6 * 0.03 * policy.groups + HOST_SECONDS, rel=1e-3)
    assert made.bound_by == "compute"


@pytest.mark.parametrize("name", ["nvme", "past_ram"])
def test_forecast_on_a_slow_drive_is_its_bytes_over_its_mixed_rate(name: str) -> None:
    slow = replace(
        FAST, drives=(DriveRates(directory="a", read_bytes_per_s=30e6, write_bytes_per_s=20e6, mixed_bytes_per_s=25e6),)
    )
    made, placement, _ = of(name, slow)
    assert all(home is Tier.NVME for home in placement.homes.values())
    assert made.bound_by == "nvme"
    # The backward reads weights alone, at the rate of reads.
    assert made.seconds == pytest.approx((12 + 12) * 6 * MIB / 25e6 + 2 * 6 * MIB / 30e6, rel=0.1)


def test_forecast_of_sums_in_ram_waits_for_the_slots_that_are_planned() -> None:
    _, placement, policy = of("groups", FAST)
    assert placement.num_slots(Tier.RAM, Kind.GRAD) == 2

    # Sums of a group take longer than its backward, so gradients wait for slots there. The next forward has time.
    slow = replace(FAST, update_parameters_per_s=2.5e7)
    seconds = {(unit.name, phase): 0.001 if phase is Phase.BACKWARD else 0.04 for unit in UNITS for phase in Phase}
    found = []
    for num_slots in (2, 4):
        slots = []
        for plan in placement.slots:
            is_sum = (plan.tier, plan.kind) == (Tier.RAM, Kind.GRAD)
            slots.append(replace(plan, num_slots=num_slots) if is_sum else plan)
        deep = replace(placement, slots=tuple(slots))
        found.append(forecast(accesses(policy.groups), seconds, UNITS, deep, policy, slow).seconds)
    few, many = found
    assert few > 1.02 * many


def test_forecast_of_updates_in_the_backward_keeps_the_drive_busy_there() -> None:
    """Weights lie in RAM: the drive moves state under the forward alone, or under all of compute."""
    drive = DriveRates(
        directory="a", read_bytes_per_s=1e9, write_bytes_per_s=1e9, mixed_bytes_per_s=20 * 6 * MIB / 0.18
    )  # takes as long as compute
    rates = replace(FAST, drives=(drive,))
    found = []
    for generations, ram in ((1, 30), (2, 45)):
        policy = Policy(state=(Tier.RAM, Tier.NVME), generations=generations, chunk_elements=MIB // 8)
        placement = place(UNITS, Budgets(16 * MIB, ram * MIB, 200 * MIB), policy)
        assert {placement.homes[unit.name, Kind.WEIGHT] for unit in UNITS} == {Tier.RAM}
        assert {placement.homes[unit.name, Kind.EXP_AVG_SQ] for unit in UNITS} == {Tier.NVME}
        found.append(forecast(accesses(1), SECONDS, UNITS, placement, policy, rates).seconds)
    assert found[0] > 0.28
    assert found[1] < 0.26


def test_forecast_of_updates_in_the_backward_reads_nothing_before_the_first_gradient() -> None:
    """However long the drive was idle: the run asks for state when its update is due."""
    rates = replace(
        FAST,
        drives=(
            DriveRates(
                directory="a", read_bytes_per_s=1e9, write_bytes_per_s=1e9, mixed_bytes_per_s=20 * 6 * MIB / 0.05
            ),
        ),
    )
    policy = Policy(state=(Tier.RAM, Tier.NVME), generations=2, chunk_elements=MIB // 8)
    placement = place(UNITS, Budgets(16 * MIB, 45 * MIB, 200 * MIB), policy)  # weights in RAM
    made = forecast(accesses(1), SECONDS, UNITS, placement, policy, rates)
    (shipped,) = [span.end for span in made.spans if (span.lane, span.name) == ("gpu_to_ram", "unit5")]
    reads = [span.start for span in made.spans if (span.lane, span.name) == ("nvme_to_ram", "unit5")]
    assert shipped > 0.06
    assert min(reads) >= shipped


@pytest.mark.parametrize("generations", [1, 2])
def test_forecast_of_slow_writes_holds_reads_up_only_where_new_bytes_replace_the_old_ones(generations: int) -> None:
    """A speculative update reads on as soon as the old bytes leave their slot: the new ones have slots of their own."""
    drive = DriveRates(directory="a", read_bytes_per_s=1e9, write_bytes_per_s=1e8, mixed_bytes_per_s=1e9)
    policy = Policy(state=(Tier.RAM, Tier.NVME), generations=generations, chunk_elements=MIB // 8)
    placement = place(UNITS, Budgets(16 * MIB, (30, 45)[generations - 1] * MIB, 200 * MIB), policy)  # weights in RAM
    made = forecast(accesses(1), SECONDS, UNITS, placement, policy, replace(FAST, drives=(drive,)))

    # The unit that is updated first: in the backward, or before the next forward.
    unit = ("unit0", "unit5")[generations - 1]
    reads = [span.start for span in made.spans if (span.lane, span.name) == ("nvme_to_ram", unit)]
    writes = [span.end for span in made.spans if (span.lane, span.name) == ("ram_to_nvme", unit)]
    assert len(reads) == len(writes) == 4
    assert (min(writes) <= max(reads)) is (generations == 1)


SLOW = {
    "links": replace(FAST, to_gpu_bytes_per_s=1e8, to_ram_bytes_per_s=1e8),
    "drive": replace(
        FAST, drives=(DriveRates(directory="a", read_bytes_per_s=30e6, write_bytes_per_s=20e6, mixed_bytes_per_s=25e6),)
    ),
    "updates": replace(FAST, update_parameters_per_s=6 * MIB / 0.2),
    "ranks": replace(FAST, gather_bytes_per_s=5e8, scatter_bytes_per_s=8e8, ranks_slowdown=0.5),
    "memory": replace(FAST, memory_bytes_per_s=1e9, update_parameters_per_s=3e7, to_gpu_bytes_per_s=9e8),
}


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize("name", PLACES)
def test_least_seconds_are_under_the_forecast_and_near_it(name: str, slow: str) -> None:
    made, placement, policy = of(name, SLOW[slow])
    least = least_step_seconds(accesses(policy.groups), SECONDS, UNITS, placement, policy, SLOW[slow])
    assert least <= made.seconds + 1e-9
    # The exchange, and updates in the backward, may run under the next step.
    if name not in ("streamed", "ranks_streamed", "twice", "ranks_twice"):
        assert least >= 0.85 * made.seconds


def test_forecast_with_a_second_drive_of_the_same_rates_halves_the_step() -> None:
    drive = DriveRates(directory="a", read_bytes_per_s=30e6, write_bytes_per_s=20e6, mixed_bytes_per_s=25e6)
    one, two = (of("nvme", replace(FAST, drives=(drive,) * count))[0].seconds for count in (1, 2))
    assert two == pytest.approx(one / 2, rel=0.15)


def test_forecast_with_weights_in_ram_moves_the_other_planes_alone() -> None:
    made, placement, _ = of("mixed", FAST)
    spilled = [kind for (_, kind), home in placement.homes.items() if home is Tier.NVME]
    assert spilled
    assert Kind.WEIGHT not in spilled
    size = sum(ADAMW_BF16.width(kind) * MIB for kind in spilled)
    assert made.moved_bytes["nvme_to_ram"] == made.moved_bytes["ram_to_nvme"] == size


def test_forecast_of_moments_in_bf16_moves_and_updates_a_third_less() -> None:
    budgets, policy = PLACES["nvme"]
    found = []
    for moments in ("fp32", "bf16"):
        units = [replace(unit, schema=ADAMW["bf16", moments]) for unit in UNITS]
        rates = replace(FAST, update_parameters_per_s=6 * MIB / 0.2)
        found.append(forecast(accesses(1), SECONDS, units, place(units, budgets, policy), policy, rates))
    wide, narrow = found
    assert narrow.moved_bytes["ram_to_nvme"] == pytest.approx(8 * 6 * MIB)
    assert wide.moved_bytes["ram_to_nvme"] == pytest.approx(12 * 6 * MIB)
    assert narrow.alone_seconds["update_nvme"] == pytest.approx(wide.alone_seconds["update_nvme"] * 18 / 26)


@pytest.mark.parametrize("home", ["gpu", "ram", "nvme"])
def test_forecast_of_muon_carries_matrices_from_ram_and_takes_the_time_of_their_products(home: str) -> None:
    budgets, policy = PLACES[home]
    found = []
    for flops in (1e6, 1e6 + FAST.flops_per_s / 10):
        units = [replace(unit, schema=MUON["bf16"], update_flops=flops) for unit in UNITS]
        found.append(forecast(accesses(1), SECONDS, units, place(units, budgets, policy), policy, FAST))
    short, long = found
    carried = 0 if home == "gpu" else 6 * MIB
    assert short.moved_bytes.get("state_to_gpu", 0) == pytest.approx(10 * carried)
    assert short.moved_bytes.get("state_to_ram", 0) == pytest.approx(8 * carried)
    assert short.moved_bytes.get("ram_to_nvme", 0) == pytest.approx(8 * 6 * MIB * (home == "nvme"))
    # Compute cannot go on meanwhile.
    assert long.seconds - short.seconds == pytest.approx(6 * 0.1, rel=0.1)


def test_forecast_of_a_unit_frozen_but_for_one_chunk_updates_it_in_one_piece() -> None:
    budgets, policy = PLACES["nvme"]
    policy = replace(policy, chunk_elements=MIB // 8)
    units = [UnitSpec(name=unit.name, num_elements=MIB, frozen_elements=MIB - MIB // 8) for unit in UNITS]
    made = forecast(accesses(1), SECONDS, units, place(units, budgets, policy), policy, SLOW["drive"])
    updates = Counter(span.name for span in made.spans if span.lane == "update_nvme")
    assert updates == Counter(unit.name for unit in units)


def test_forecast_slow_updates_hide_under_the_forward_alone() -> None:
    slow = replace(FAST, update_parameters_per_s=6 * MIB / 0.2)  # the forward takes 0.06 s, the updates 0.2
    made, _, _ = of("ram", slow)
    assert made.seconds == pytest.approx(0.2 + 0.01 + 0.12 + HOST_SECONDS, rel=0.02)


def test_forecast_without_clipping_hides_updates_under_the_backward() -> None:
    slow = replace(FAST, update_parameters_per_s=6 * MIB / 0.1)  # 0.017 s a unit; its backward takes 0.02
    made, _, _ = of("immediate", slow)
    assert made.seconds == pytest.approx(0.18 + 0.1 / 6 + HOST_SECONDS, rel=0.02)


def test_forecast_of_offloaded_activations_brings_each_back_while_the_unit_before_computes() -> None:
    """A copy takes 5 ms each way: all but the first one back, which nothing asks for ahead, hide under 10 ms and 20."""
    units = [replace(unit, activation_bytes=MIB) for unit in UNITS]
    budgets, policy = PLACES["gpu"]
    placement = place(units, replace(budgets, ram=6 * MIB), policy)
    link = replace(FAST, to_gpu_bytes_per_s=MIB / 0.005, to_ram_bytes_per_s=MIB / 0.005)
    made = forecast(accesses(1), SECONDS, units, placement, policy, link)
    # The lowest unit's input needs no gradient: it stays.
    assert made.moved_bytes == {"gpu_to_ram": 5 * MIB, "ram_to_gpu": 5 * MIB}
    assert made.seconds == pytest.approx(6 * 0.03 + 0.005 + HOST_SECONDS, rel=1e-3)
    back = [span for span in made.spans if span.lane == "ram_to_gpu"]
    assert [span.name for span in back] == [f"unit{i}" for i in (5, 4, 3, 2, 1)]
    assert least_step_seconds(accesses(1), SECONDS, units, placement, policy, link) <= made.seconds + 1e-9


@pytest.mark.parametrize(("drive_s", "seconds"), [(0.004, 0.18), (0.03, 0.27)])
def test_forecast_of_activations_on_nvme_waits_for_drives_only_if_they_are_slower_than_compute(
    drive_s: float, seconds: float
) -> None:
    """A unit computes for 10 ms and then 20. Drives of 4 ms each way hide; those of 30 ms hold up every use."""
    units = [replace(unit, activation_bytes=MIB) for unit in UNITS]
    budgets, policy = PLACES["gpu"]
    policy = replace(policy, align_elements=32 << 10)
    placement = place(units, replace(budgets, ram=2 * MIB, nvme=64 * MIB), policy)
    assert Tier.NVME in placement.activation_homes.values()
    spilled = list(placement.activation_homes.values()).count(Tier.NVME)
    drive = replace(FAST.drives[0], read_bytes_per_s=MIB / drive_s, write_bytes_per_s=MIB / drive_s)
    rates = replace(FAST, drives=(drive,))
    made = forecast(accesses(1), SECONDS, units, placement, policy, rates)
    # The lowest unit's input needs no gradient: it stays.
    moved = (spilled - 1) * MIB
    assert made.moved_bytes == {
        "gpu_to_ram": 5 * MIB,
        "ram_to_nvme": moved,
        "nvme_to_ram": moved,
        "ram_to_gpu": 5 * MIB,
    }
    assert made.seconds == pytest.approx(seconds + HOST_SECONDS, rel=0.1)
    assert least_step_seconds(accesses(1), SECONDS, units, placement, policy, rates) <= made.seconds + 1e-9


def test_forecast_of_ranks_loses_the_slowdown_of_what_comes_beside_compute() -> None:
    """One gather of each unit and one scatter: all but the first gather and the last scatter run beside compute."""
    rate = MIB * 2 / 0.002  # bytes of a shard: 2 ms of the 10 or 20 of a use
    rates = replace(FAST, gather_bytes_per_s=rate, scatter_bytes_per_s=rate, ranks_slowdown=0.25)
    budgets, policy = PLACES["ranks_gpu"]
    placement = place(UNITS, budgets, policy)
    assert placement.num_slots(Tier.GPU, Kind.GATHERED) == len(UNITS)
    made = forecast(accesses(1), SECONDS, UNITS, placement, policy, rates)
    assert made.moved_bytes == {"ranks": 6 * 2 * MIB + 6 * 2 * MIB}
    assert made.alone_seconds["ranks"] == pytest.approx(6 * 0.002 + 6 * 0.002)
    alone = 0.18 + HOST_SECONDS
    assert made.seconds == pytest.approx(alone + 2 * 0.002 + 10 * 0.25 * 0.002, rel=1e-3)


def test_forecast_of_ranks_that_share_ram_lets_loads_wait_for_gathers() -> None:
    """Shards come to the GPU over the link by which the others' come from shared RAM."""
    rate = MIB * 2 / 0.05
    linked = replace(
        FAST, gather_bytes_per_s=rate, scatter_bytes_per_s=1e15, to_gpu_bytes_per_s=rate, to_ram_bytes_per_s=1e15
    )
    budgets, policy = PLACES["ranks_ram"]
    placement = place(UNITS, budgets, policy)
    apart, shared = (
        forecast(accesses(2), SECONDS, UNITS, placement, policy, replace(linked, ranks_way=way))
        for way in (Transport.KERNELS, Transport.RAM)
    )
    assert shared.moved_bytes == apart.moved_bytes
    assert shared.seconds > 1.2 * apart.seconds


@pytest.mark.parametrize("name", ["ranks_gpu", "ranks_ram", "ranks_nvme", "ranks_twice"])
def test_forecast_of_ranks_works_on_collectives_in_their_order(name: str) -> None:
    made, placement, policy = of(name, SLOW["ranks"])
    order = accesses(policy.groups)
    timeline = build(order, placement, scatters=reduce_scatters_of(order, UNITS, policy))
    moves = Moves({unit.name: unit for unit in UNITS}, placement, policy)
    spans = [span for span in made.spans if span.lane == "ranks"]
    assert [span.name for span in spans] == [
        item.unit for item in timeline.items if isinstance(item, Load | ReduceScatter)
    ]
    assert all(before.end <= after.start + 1e-9 for before, after in pairwise(spans))
    assert len(planned_reduce_scatters(timeline)) == 6 * policy.groups
    received = sum(
        move.num_bytes for scatter in planned_reduce_scatters(timeline) for move in moves.reduce_scatter(scatter)
    )
    assert received == 6 * policy.groups * (policy.num_ranks - 1) * 2 * MIB


def test_forecast_of_ram_beyond_the_limit_of_page_locked_ram_is_slower() -> None:
    rates = replace(FAST, to_gpu_bytes_per_s=1e9, to_ram_bytes_per_s=1e9, ring_to_gpu_bytes_per_s=0.25e9)
    free, placement, _ = of("ram", rates)
    ram_bytes = placement.state_bytes[Tier.RAM] + placement.other_bytes.get(Tier.RAM, 0)
    assert of("ram", rates.with_locked(ram_bytes))[0].seconds == free.seconds
    assert of("ram", rates.with_locked(1))[0].alone_seconds["ram_to_gpu"] == pytest.approx(
        4 * free.alone_seconds["ram_to_gpu"]
    )


def test_forecast_spans_lie_in_the_step_and_fill_its_lanes() -> None:
    made, _, _ = of("streamed", replace(FAST, to_gpu_bytes_per_s=1e9, to_ram_bytes_per_s=1e9))
    compute = [span for span in made.spans if span.lane == "compute"]
    assert len(compute) == 12
    assert sum(span.end - span.start for span in compute) == pytest.approx(made.busy_seconds["compute"])
    assert all(span.start >= 0 and span.end <= made.seconds + 1e-9 for span in compute)
