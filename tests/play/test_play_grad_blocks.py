"""Gradients, and sums of groups, that RAM does not take: they wait on NVMe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from from_outside import check_invariants
from integer_runs import (
    BROKEN,
    UNITS,
    Run,
    check_broken_for_good,
    fail_moves,
    starter,
    within,
)

from megatier.tier import Tier


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts runs by placement; closes them."""
    with starter(tmp_path) as start_run:
        yield start_run


@pytest.mark.parametrize(
    ("split", "generations", "ram"),
    [
        (False, 1, 120),
        (False, 1, 170),
        (False, 2, 180),
        (False, 2, 220),
        (True, 1, 100),
        (True, 1, 120),
        (True, 2, 160),
        (None, 1, 150),
    ],
)
def test_gradients_that_ram_does_not_take_wait_on_nvme(
    start: Callable[..., Run], split: bool | None, generations: int, ram: int
) -> None:
    run = start("nvme", ram=ram << 10, split=split, generations=generations)
    assert Tier.NVME in run.placement.grad_homes.values()
    before = run.store.moved_bytes.copy()
    for clipped in (False, True, False, False):
        within(partial(run.train_step, clipped=clipped))
    run.evaluate()
    assert run.store.moved_bytes - before == run.player.demanded
    run.check_state()
    assert run.placement.state_bytes.get(Tier.RAM, 0) + run.placement.other_bytes[Tier.RAM] <= ram << 10


@pytest.mark.parametrize(
    ("name", "split", "ram", "choices"),
    [
        ("nvme", False, 120, {}),
        ("nvme", True, 94, {}),
        ("nvme", True, 150, {}),
        ("nvme", True, 170, {"generations": 2}),
        ("nvme", False, 130, {"deferred": False}),
        ("mixed", True, 110, {"deferred": False}),
        ("nvme", None, 130, {}),
    ],
)
def test_sums_of_groups_that_ram_does_not_take_pass_through_the_gpu(
    start: Callable[..., Run], name: str, split: bool | None, ram: int, choices: dict[str, int]
) -> None:
    """Some lie on NVMe, others in RAM."""
    run = start(name, ram=ram << 10, split=split, groups=3, **choices)
    homes = set(run.placement.grad_homes.values())
    assert run.placement.sums_on_gpu
    assert Tier.NVME in homes
    before = run.store.moved_bytes.copy()
    for clipped in (False, run.policy.deferred, False):
        within(partial(run.train_step, clipped=clipped))
        run.evaluate()
    within(run.train_step)
    run.player.drain()
    assert run.store.moved_bytes - before == run.player.demanded
    run.check_state()
    assert run.placement.state_bytes.get(Tier.RAM, 0) + run.placement.other_bytes[Tier.RAM] <= ram << 10


@pytest.mark.parametrize("groups", [2, 3])
def test_sums_on_nvme_move_4_bytes_each_way_per_further_group_and_2_at_the_end(
    start: Callable[..., Run], groups: int
) -> None:
    run = start("nvme", ram=94 << 10, split=True, groups=groups)
    assert set(run.placement.grad_homes.values()) == {Tier.NVME}
    moved = run.moved_in_a_step()
    num_elements = sum(unit.num_elements for unit in UNITS)
    sums = 4 * (groups - 1) + 2
    assert moved["ram_to_nvme"] == (12 + sums) * num_elements
    assert moved["gpu_to_ram"] == sums * num_elements


def test_a_step_given_up_between_groups_leaves_nothing_of_its_sums(start: Callable[..., Run]) -> None:
    run = start("nvme", ram=150 << 10, split=True, groups=3)
    assert run.placement.sums_on_gpu
    within(run.train_step)
    within(run.train_step)
    for stop in (12, 17, 19):
        run.player.begin("train")
        for access in run.order()[:stop]:
            run.use(*access)
        within(run.player.cancel)
    within(run.train_step)
    run.check_state()


def test_gradients_on_nvme_move_once_each_way(start: Callable[..., Run]) -> None:
    run = start("nvme", ram=120 << 10)
    moved = run.moved_in_a_step()
    state = sum(12 * unit.num_elements for unit in UNITS)
    grads = sum(4 * unit.num_elements for unit in UNITS if run.placement.grad_homes[unit.name] is Tier.NVME)
    assert grads
    assert moved["ram_to_nvme"] == state + grads


def test_failing_write_of_a_gradient_stops_the_run(start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run = start("nvme", ram=120 << 10)
    run.train_step()
    run.player.drain()
    fail_moves(monkeypatch, "write", "u1/grad", BROKEN)
    check_broken_for_good(run)
    check_invariants(run.store)
