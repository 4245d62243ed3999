"""Generations that a savepoint keeps: no update overwrites them, and the run has the bits that it has without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from crossed import crossed
from integer_runs import UNITS, Run, starter, within
from torch import Tensor

from megatier.errors import PlanError
from megatier.play.generations import Generation
from megatier.schedule.budgets import Budgets
from megatier.schedule.placement import place
from megatier.schedule.policy import Policy
from megatier.tier import Kind, Tier


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts runs by placement; closes them."""
    with starter(tmp_path) as start_run:
        yield lambda name, **choices: start_run(name, savepoints=True, **choices)


class Keeper:
    """Keeps what holds on NVMe, and says whether it is still there."""

    def __init__(self, run: Run) -> None:
        self._run, self._blocks = run, run.blocks
        run.player.drain()
        self._blocks.generations.keep()
        self._generations = {unit: self._blocks.generations.valid[unit] for unit in run.placement.spilled}
        self._planes = self._read()

    def _read(self) -> dict[tuple[str, Kind], Tensor]:
        found = {}
        for unit, generation in self._generations.items():
            for kind in self._blocks.spilled(unit):
                parts = []
                for elements in self._blocks.chunks(unit):
                    with self._blocks.open_state(unit, elements, [kind], generation=generation) as state:
                        parts.append(state.planes[kind].clone())
                found[unit, kind] = torch.cat(parts)
        return found

    def check(self) -> None:
        self._run.player.drain()
        for block, plane in self._read().items():
            assert torch.equal(plane, self._planes[block]), block


@pytest.mark.parametrize(
    ("case", "generations"),
    crossed(
        [
            ("nvme", False, 1, 0),
            ("nvme", True, 3, 0),
            ("nvme", True, 1, 150 << 10),  # gradients of some units on NVMe
            ("mixed", False, 1, 260 << 10),
            ("mixed", True, 1, 180 << 10),  # weights of some units in RAM
            ("mixed", True, 3, 300 << 10),
        ],
        [2, 3],
        by=2,
    ),
)
def test_kept_generation_stays_while_the_run_goes_on_to_the_same_state(
    start: Callable[..., Run], case: tuple[str, bool, int, int], generations: int
) -> None:
    name, split, groups, ram = case
    run = start(name, groups=groups, split=split, ram=ram, generations=generations)
    assert run.placement.spilled
    assert bool(run.placement.speculative) is (generations == 3)
    within(run.train_step)
    for fates in ((False, False, False), (True, True, False), (False, True, False), ()):
        keeper = Keeper(run)
        for clipped in fates:
            within(partial(run.train_step, clipped=clipped))
            if clipped:
                run.evaluate()
        keeper.check()
        run.check_state()


@pytest.mark.parametrize("generations", [2, 3])
def test_kept_generation_moves_what_is_demanded(start: Callable[..., Run], generations: int) -> None:
    run = start("nvme", generations=generations)
    before = run.store.moved_bytes.copy()
    for clipped in (False, True, False, False):
        run.train_step(clipped=clipped)
        run.player.drain()
        run.blocks.generations.keep()
    run.train_step()
    run.player.drain()
    assert run.store.moved_bytes - before == run.player.demanded


def test_second_of_two_generations_is_written_once_and_then_in_place(start: Callable[..., Run]) -> None:
    run = start("nvme", generations=2)
    blocks = run.blocks
    assert blocks.generations.advance("u0") == (Generation(0), Generation(0))
    blocks.generations.keep()
    assert blocks.generations.advance("u0") == (Generation(0), Generation(1))
    assert blocks.generations.advance("u0") == (Generation(1), Generation(1))
    assert blocks.generations.spare("u0") is None
    blocks.generations.keep()
    assert blocks.generations.advance("u0") == (Generation(1), Generation(0))


def test_speculation_goes_on_beside_a_kept_generation_where_there_are_three(start: Callable[..., Run]) -> None:
    run = start("nvme", generations=3)
    for _ in range(3):
        run.player.drain()
        run.blocks.generations.keep()
        for _ in range(3):
            run.train_step()
            assert run.speculation.outcome == "confirmed"
            held = {run.blocks.generations.valid[unit.name].nvme for unit in UNITS}
            assert held.isdisjoint(run.blocks.generations.kept.values())
    run.check_state()


def test_speculation_rests_while_the_other_generation_is_kept(tmp_path: Path) -> None:
    """A run that goes on from a savepoint without making any."""
    with starter(tmp_path) as start_run:
        run = start_run("nvme", generations=2)
        run.blocks.generations.keep()
        run.train_step()
        assert run.speculation.updated == {unit.name for unit in UNITS}
        run.train_step()
        assert run.speculation.updated == frozenset()
        run.blocks.generations.release()
        run.train_step()
        assert run.speculation.updated == {unit.name for unit in UNITS}
        run.check_state()


# ---- placement ----


@pytest.mark.parametrize(("generations", "savepoints"), [(2, True), (3, True), (3, False)])
def test_generations_take_their_space_on_nvme_alone_but_for_speculation(generations: int, savepoints: bool) -> None:
    policy = Policy(state=(Tier.RAM, Tier.NVME), chunk_elements=2048, align_elements=2048)
    policy = replace(policy, generations=generations, savepoints=savepoints)
    placement = place(UNITS, Budgets(160 << 10, 220 << 10, 1 << 20), policy)
    spilled = placement.state_bytes[Tier.NVME]
    assert placement.other_bytes[Tier.NVME] == (generations - 1) * spilled
    slots = sum(plan.slot_bytes * plan.num_slots for plan in placement.slots if plan.tier is Tier.RAM)
    gradients = sum(2 * unit.num_elements for unit in UNITS)
    second = sum(
        2 * unit.num_elements
        for unit in UNITS
        if unit.name in placement.spilled and placement.homes[unit.name, Kind.WEIGHT] is Tier.RAM
    )
    assert placement.other_bytes[Tier.RAM] == slots + gradients + second * (generations - savepoints > 1)
    assert bool(placement.speculative) is (generations - savepoints > 1)


def test_generations_that_do_not_fit_name_the_next_smaller_number() -> None:
    policy = Policy(state=(Tier.NVME,), generations=3, savepoints=True, chunk_elements=2048, align_elements=2048)
    state = sum(12 * unit.num_elements for unit in UNITS)
    with pytest.raises(PlanError, match=r"Set tiers\.generations to 2\."):
        place(UNITS, Budgets(160 << 10, 1 << 20, 3 * state - 1), policy)
    with pytest.raises(PlanError) as caught:
        place(UNITS, Budgets(160 << 10, 1 << 20, 2 * state - 1), replace(policy, generations=2))
    assert "tiers.generations" not in str(caught.value)


class Pending:
    """A reader that is not over."""

    def done(self) -> bool:
        return False


@pytest.mark.parametrize("generations", [2, 3])
def test_reader_is_waited_for_by_what_writes_to_one_of_its_places(start: Callable[..., Run], generations: int) -> None:
    run = start("mixed", split=True, generations=generations, ram=180 << 10)
    blocks, unit = run.blocks, run.placement.spilled[0]
    blocks.generations.keep()
    pending: Any = Pending()
    blocks.generations.hold(unit, pending)
    assert blocks.generations.readers(unit, blocks.generations.valid[unit]) == [pending]
    _, new = blocks.generations.advance(unit)
    # With two, what lies in RAM is updated in place although another place on NVMe is written.
    assert blocks.generations.readers(unit, new) == ([pending] if generations == 2 else [])
