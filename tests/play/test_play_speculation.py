"""Speculative updates: kept or void, the weights and the state are those of a run that waits for the norm."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from crossed import crossed, some
from from_outside import check_invariants
from integer_runs import BROKEN, UNITS, Run, check_broken_for_good, fail_moves, starter, within
from late_reads import slow_reads
from small_timelines import planned_loads, planned_updates

from megatier.errors import PlanError
from megatier.play.generations import Generation
from megatier.play.speculation import HISTORY
from megatier.play.unit_blocks import block_key
from megatier.schedule.budgets import Budgets
from megatier.schedule.placement import place
from megatier.schedule.policy import Policy
from megatier.tier import Kind, Tier


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts runs by placement; closes them."""
    with starter(tmp_path) as start_run:
        yield lambda name, **choices: start_run(name, generations=2, **choices)


@pytest.mark.parametrize(
    ("name", "split", "groups", "ram"),
    some(
        [
            ("nvme", False, 1, 0),
            ("nvme", True, 3, 0),
            ("mixed", False, 1, 280 << 10),  # weights of one in RAM, twice
            ("mixed", False, 1, 260 << 10),  # two units all in RAM, two spilled
            ("mixed", True, 3, 300 << 10),
            ("mixed", False, 3, 320 << 10),
            ("nvme", None, 1, 0),
            ("mixed", True, 1, 180 << 10),
            ("mixed", None, 3, 300 << 10),
            ("ram", False, 1, 0),
            ("ram", None, 3, 0),
            ("ram", True, 1, 400 << 10),  # a second place for some
            ("ram", False, 3, 600 << 10),
        ],
        by=2,
    ),
)
def test_speculation_kept_or_void_gives_the_same_state(
    start: Callable[..., Run], name: str, split: bool | None, groups: int, ram: int
) -> None:
    run = start(name, groups=groups, split=split, ram=ram)
    assert run.placement.speculative
    for clipped in (False, False, True, False, True, True, False, False):
        within(partial(run.train_step, clipped=clipped))
    run.check_state()
    for clipped in (True, False):
        run.train_step(clipped=clipped)
        run.evaluate()
        run.check_state()
    run.check_state()


@pytest.mark.parametrize(
    ("fates", "groups"),
    crossed(itertools.product(["confirmed", "clipped", "skipped"], repeat=3), [1, 2], by=2),
)
def test_speculation_moves_what_is_demanded(start: Callable[..., Run], fates: tuple[str, ...], groups: int) -> None:
    run = start("nvme", groups=groups)
    before = run.store.moved_bytes.copy()
    for fate in fates:
        run.train_step(clipped=fate == "clipped", skipped=fate == "skipped")
        assert run.speculation.outcome in ("confirmed" if fate == "confirmed" else "void", None)
    run.player.drain()
    assert run.store.moved_bytes - before == run.player.demanded
    run.check_state()


def test_speculation_that_is_confirmed_updates_in_the_backward_alone(start: Callable[..., Run]) -> None:
    run = start("nvme")
    run.train_step()
    assert run.speculation.outcome == "confirmed"
    assert run.speculation.updated == {unit.name for unit in UNITS}
    run.train_step()
    assert run.player.timeline is not None
    assert planned_updates(run.player.timeline) == []
    run.player.drain()
    names = [unit.name for unit in UNITS]
    assert run.adder.updated == 2 * names[::-1]


def test_speculation_moves_state_once_and_weights_twice(start: Callable[..., Run]) -> None:
    run = start("nvme")
    moved = run.moved_in_a_step()
    assert run.player.timeline is not None
    weights = sum(4 * run.blocks.units[load.unit].num_elements for load in planned_loads(run.player.timeline))
    state = sum(12 * unit.num_elements for unit in UNITS)
    assert moved["nvme_to_ram"] == state + weights
    assert moved["ram_to_nvme"] == state


def test_speculation_that_is_void_updates_again_from_the_old_state(start: Callable[..., Run]) -> None:
    run = start("nvme")
    run.train_step(clipped=True)
    assert run.speculation.outcome == "void"
    assert run.speculation.updated == frozenset()
    run.check_state()
    assert set(run.blocks.generations.valid.values()) == {Generation()}
    assert run.adder.updated[-len(UNITS) :] == [unit.name for unit in UNITS]


def test_speculation_that_is_void_leaves_out_what_has_not_begun(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("nvme")
    run.train_step()
    run.player.drain()
    run.adder.updated.clear()
    slow_reads(monkeypatch, 0.02)
    before = run.store.moved_bytes["ram_to_nvme"]
    run.train_step(clipped=True)
    run.player.drain()
    written = run.store.moved_bytes["ram_to_nvme"] - before
    state = sum(12 * unit.num_elements for unit in UNITS)
    assert state <= written < 2 * state
    run.check_state()


def test_speculation_rests_while_most_steps_are_clipped(start: Callable[..., Run]) -> None:
    run = start("nvme")
    outcomes = []
    for step in range(3 * HISTORY):
        run.train_step(clipped=step < HISTORY)
        outcomes.append(run.speculation.outcome)
    assert outcomes[0] == "void"  # nothing is known yet
    assert outcomes[1 : HISTORY + 4] == [None] * (HISTORY + 3)
    assert outcomes[HISTORY + 4 :] == ["confirmed"] * (2 * HISTORY - 4)
    run.check_state()


def test_speculation_of_a_step_that_is_given_up_is_void(start: Callable[..., Run]) -> None:
    """A norm that is not finite: nothing of the step is written, and the run may be looked at."""
    run = start("nvme")
    run.train_step()
    run.player.begin("train")
    for access in run.order():
        run.use(*access)
    run.player.end()
    run.player.drain_gradients()
    run.evaluate()
    run.check_state()


def test_speculation_of_a_pass_that_is_cancelled_is_void(start: Callable[..., Run]) -> None:
    run = start("nvme")
    run.train_step()
    run.player.begin("train")
    for access in run.order()[:-2]:
        run.use(*access)
    within(run.player.cancel)
    run.check_state()


@pytest.mark.parametrize("ends", ["cancelled", "drained"])
def test_speculation_that_is_void_keeps_no_error_of_a_read_for_later_passes(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    run = start("nvme")
    run.train_step()
    run.player.drain()
    with monkeypatch.context() as patch:
        fail_moves(patch, "read", "u3/exp_avg", BROKEN)
        run.player.begin("train")
        for access in run.order():
            run.use(*access)
        speculative = run.speculation.all()
        assert [transfer.wait_for_end() for transfer in speculative].count(False) == 1
        if ends == "cancelled":
            within(run.player.cancel)
        else:
            run.player.end()
            run.player.drain_gradients()

    # Neither the old state nor the weights were touched, so the run goes on.
    within(run.player.drain)
    within(run.evaluate)
    within(run.train_step)
    run.check_state()
    check_invariants(run.store)


def test_speculation_that_becomes_void_while_the_lane_begins_a_chunk_harms_nothing(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue has seen that the attempt counts, and has not asked for the chunk."""
    run = start("nvme")
    run.train_step()
    run.player.drain()
    read_ahead = run.speculation._read_ahead

    def read_ahead_too_late() -> None:
        run.speculation.abandon()
        read_ahead()

    monkeypatch.setattr(run.speculation, "_read_ahead", read_ahead_too_late)
    within(partial(run.train_step, skipped=True))
    within(run.train_step)
    run.check_state()


def test_speculation_waits_for_no_norm_and_the_norm_for_no_drive(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("nvme")
    run.train_step()
    run.player.drain()
    slow_reads(monkeypatch, 0.05)
    run.player.begin("train")
    for access in run.order():
        run.use(*access)
    run.player.end()
    within(run.player.drain_gradients)
    speculation = run.speculation
    assert not all(transfer.done() for transfer in speculation.all())
    run.player.defer_updates(clipped=False)
    run.model.update()
    run.check_state()


@pytest.mark.parametrize("what", ["read", "write"])
def test_speculation_on_a_broken_drive_stops_the_run(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    run = start("nvme")
    run.train_step()
    run.player.drain()
    fail_moves(monkeypatch, what, "u3/exp_avg", BROKEN)
    check_broken_for_good(run)
    check_invariants(run.store)


def test_speculation_closed_half_way_ends(start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run = start("nvme")
    run.train_step()
    slow_reads(monkeypatch, 0.02)
    run.player.begin("train")
    for access in run.order()[:-1]:
        run.use(*access)


def test_speculation_needs_two_generations(start: Callable[..., Run]) -> None:
    run = start("nvme", deferred=False)
    assert run.placement.speculative == ()
    run.train_step()
    run.check_state()


# ---- placement ----


def test_two_generations_take_twice_the_space_on_nvme() -> None:
    policy = Policy(state=(Tier.NVME,), generations=2, chunk_elements=2048, align_elements=2048)
    state = sum(12 * unit.num_elements for unit in UNITS)
    with pytest.raises(PlanError, match=r"tiers\.generations"):
        place(UNITS, Budgets(160 << 10, 1 << 20, 2 * state - 1), policy)
    placement = place(UNITS, Budgets(160 << 10, 1 << 20, 2 * state), policy)
    assert placement.state_bytes[Tier.NVME] == placement.other_bytes[Tier.NVME] == state
    assert placement.speculative == tuple(unit.name for unit in UNITS)


def test_two_generations_of_a_weight_in_ram_are_in_ram() -> None:
    policy = Policy(state=(Tier.RAM, Tier.NVME), generations=2, chunk_elements=2048, align_elements=2048)
    placement = place(UNITS, Budgets(160 << 10, 280 << 10, 1 << 20), policy)
    spilled = [unit for unit in UNITS if placement.homes[unit.name, Kind.EXP_AVG] is Tier.NVME]
    assert placement.speculative == tuple(unit.name for unit in spilled)
    assert 0 < len(spilled) < len(UNITS)
    for unit in UNITS:  # all in RAM, or weights alone
        homes = {placement.homes[unit.name, kind] for kind in (Kind.REMAINDER, Kind.EXP_AVG, Kind.EXP_AVG_SQ)}
        assert len(homes) == 1
    used = placement.state_bytes[Tier.RAM] + placement.other_bytes[Tier.RAM]
    assert used <= 280 << 10


def test_second_generation_in_ram_is_that_of_the_first_units_for_which_it_has_room() -> None:
    """As many as fit, without a drive: the gradients, and the state of all, come first."""
    policy = Policy(state=(Tier.RAM,), generations=2)
    once = place(UNITS, Budgets(1 << 20, 4 << 20, 0), replace(policy, generations=1))
    least = once.state_bytes[Tier.RAM] + once.other_bytes[Tier.RAM]
    sizes = [12 * unit.num_elements for unit in UNITS]
    for count in range(len(UNITS) + 1):
        budget = least + sum(sizes[:count])
        placement = place(UNITS, Budgets(1 << 20, budget, 0), policy)
        assert placement.speculative == tuple(unit.name for unit in UNITS[:count])
        assert placement.state_bytes[Tier.RAM] + placement.other_bytes[Tier.RAM] == budget
        assert placement.homes == once.homes


def test_second_generation_in_ram_is_none_of_units_with_frozen_weights_or_that_stream() -> None:
    policy = Policy(state=(Tier.RAM,), generations=2)
    half = [replace(unit, frozen_elements=unit.num_elements // 2) for unit in UNITS]
    assert place(half, Budgets(1 << 20, 4 << 20, 0), policy).speculative == ()
    streamed = place(UNITS, Budgets(1 << 20, 4 << 20, 0), replace(policy, streamed_share=1.0))
    assert streamed.streamed
    assert not set(streamed.streamed) & set(streamed.speculative)


def test_speculation_in_ram_moves_nothing_and_updates_in_the_backward_alone(start: Callable[..., Run]) -> None:
    run = start("ram")
    names = [unit.name for unit in UNITS]
    run.train_step()
    run.train_step()
    assert run.player.timeline is not None
    assert planned_updates(run.player.timeline) == []
    run.train_step(clipped=True)
    run.player.drain()
    # Updates that had not begun when the norm was known are left out.
    begun = run.adder.updated[2 * len(names) : -len(names)]
    assert begun == names[::-1][: len(begun)]
    assert run.adder.updated == 2 * names[::-1] + begun + names
    assert run.speculation.void_bytes == 0
    assert not run.store.moved_bytes["nvme_to_ram"]
    run.check_state()


def test_blocks_of_two_generations_have_names_of_their_own(start: Callable[..., Run]) -> None:
    run = start("nvme")
    blocks = run.blocks
    first, spare = Generation(), blocks.generations.spare("u0")
    keys = {blocks.key("u0", kind, generation) for kind in blocks.kinds("u0") for generation in (first, spare)}
    assert len(keys) == 2 * len(blocks.kinds("u0"))
    assert blocks.key("u0", Kind.WEIGHT) == block_key("u0", Kind.WEIGHT)
    assert blocks.key("u0", Kind.WEIGHT, spare) == block_key("u0", Kind.WEIGHT, 1)
