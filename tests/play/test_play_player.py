"""The player's passes: the right weights in every one, stalls, another order, and what stops them half-way."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from crossed import crossed
from from_outside import check_invariants
from integer_runs import BROKEN, HANG_S, PLACES, STREAMED, UNITS, Run, close, fail_moves, starter, within
from interrupts import python_locks
from late_reads import slow_reads
from small_timelines import planned_loads, planned_updates

from megatier.errors import IntegrityError, TimelineError
from megatier.play.unit_blocks import block_key
from megatier.schedule.timeline import Access, Timeline, build
from megatier.schedule.unit_spec import UnitSpec
from megatier.tier import Kind, Phase, Tier
from megatier.trace.events import stall_seconds


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts runs by placement; closes them."""
    with starter(tmp_path) as start_run:
        yield start_run


# ---- right bytes, everywhere ----


@pytest.mark.parametrize(
    ("name", "deferred", "groups", "split"),
    crossed(PLACES, [True, False], [1, 3], [False, True, None], by=2),
)
def test_steps_give_the_same_bytes_wherever_the_state_lies(
    start: Callable[..., Run], name: str, deferred: bool, groups: int, split: bool | None
) -> None:
    tight = 180 << 10 if name == "mixed" and split is not False and groups == 1 else 0
    run = start(name, ram=tight, deferred=deferred, groups=groups, split=split)
    for step in range(4):
        run.train_step()
        if step % 2:
            run.evaluate()
    run.check_state()
    assert run.store.moved_bytes - run_in_moves(run) == run.player.demanded
    homes = set(run.placement.homes.values())
    assert homes == set(PLACES[name][0])
    assert run.placement.streamed == (STREAMED if name == "streamed" and deferred else ())


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("name", list(PLACES))
def test_steps_that_are_left_out_leave_the_state_and_the_next_step_works(
    start: Callable[..., Run], name: str, groups: int, split: bool
) -> None:
    run = start(name, ram=180 << 10 if name == "mixed" and split and groups == 1 else 0, groups=groups, split=split)
    for skipped in (True, False, True, True, False, False, True, False):
        within(partial(run.train_step, skipped=skipped))
    run.player.drain()
    assert run.store.moved_bytes - filled(run) == run.player.demanded
    for skipped in (True, False):
        run.train_step(skipped=skipped)
        run.check_state()
        run.evaluate()


def filled(run: Run) -> Counter[str]:
    """Bytes that filling the whole state before the passes moved."""
    return Counter({"ram_to_nvme": run_in_moves(run)["ram_to_nvme"]})


def run_in_moves(run: Run) -> Counter[str]:
    """Bytes that filling and reading the whole state around the passes moved: each spilled plane once each way."""
    spilled = sum(
        plane.numel() * plane.element_size()
        for (unit, kind), plane in run.model.planes.items()
        if run.placement.homes[unit, kind] is Tier.NVME
    )
    return Counter({"ram_to_nvme": spilled, "nvme_to_ram": spilled})


def test_order_is_learnt_in_the_first_pass_and_planned_from_then_on(start: Callable[..., Run]) -> None:
    run = start("ram")
    played: list[Timeline | None] = []
    for _ in range(2):
        run.train_step()
        played.append(run.player.timeline)
    order = [Access(*access) for access in run.order()]
    assert played == [None, build(order, run.placement, due=run.blocks.units)]
    run.check_state()


def test_trace_of_later_passes_equals_the_timeline(start: Callable[..., Run]) -> None:
    run = start("ram")
    for _ in range(3):
        run.train_step()
        run.player.take_events()
        run.player.drain()
        run.player.take_events()
        run.train_step()
        events = run.player.take_events()
        timeline = run.player.timeline
        assert timeline is not None

        # A use in which compute waits is two spans.
        compute = [name for name, _ in itertools.groupby(event.name for event in events if event.lane == "compute")]
        assert compute == [f"{a.unit} {a.phase} {a.group}" for a in timeline.accesses]
        loads = [event.name for event in events if event.lane == "ram_to_gpu"]
        assert loads == [block_key(load.unit, Kind.WEIGHT) for load in planned_loads(timeline)]
        assert [event for event in events if event.start_ns > event.end_ns] == []


def test_loads_run_ahead_of_compute_as_far_as_there_are_slots(start: Callable[..., Run]) -> None:
    run = start("ram")
    run.evaluate()
    run.player.begin("evaluate")
    num_slots = run.placement.num_slots(Tier.GPU, Kind.WEIGHT)
    assert 2 <= num_slots < len(UNITS)
    deadline = time.monotonic() + HANG_S
    while sum(resident(run)) < num_slots and time.monotonic() < deadline:
        time.sleep(0.001)
    assert resident(run) == [True] * num_slots + [False] * (len(UNITS) - num_slots)
    for unit in UNITS:
        run.use(unit.name, Phase.FORWARD, 0)
    run.player.end()
    assert not any(resident(run))


def resident(run: Run) -> list[bool]:
    return [Tier.GPU in run.store.residency(block_key(unit.name, Kind.WEIGHT)) for unit in UNITS]


def test_activation_comes_back_as_it_was_stashed(start: Callable[..., Run]) -> None:
    run = start("ram", units=[UnitSpec(name="u0", num_elements=4096, activation_bytes=4096), *UNITS[1:]])
    tensor = torch.randn(32, 32)
    run.player.weights.stash("u0", tensor)
    [found] = run.player.weights.fetch("u0")
    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    assert torch.equal(found, tensor)


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (0, 1, 2, 3), (1, 3, 2, 0)])
def test_activations_come_back_in_any_order_each_once(start: Callable[..., Run], order: Sequence[int]) -> None:
    run = start(
        "ram", units=[UnitSpec(name=f"u{number}", num_elements=4096, activation_bytes=4096) for number in range(4)]
    )
    run.player.begin("train")
    tensors = [torch.randn(32, 32), torch.randn(8, 4, 32), torch.randn(64, 32).bfloat16(), torch.randn(32, 32)]
    for number, tensor in enumerate(tensors):
        run.player.weights.stash(f"u{number}", tensor.clone())
    before = run.store.moved_bytes["ram_to_gpu"]
    for count, number in enumerate(order, 1):
        [found] = run.player.weights.fetch(f"u{number}")
        assert torch.equal(found, tensors[number])
        if order[0] == 3:  # as in a backward, in which the next one is asked for after the weights of this one
            assert run.store.moved_bytes["ram_to_gpu"] - before == 4096 * count
    assert run.store.moved_bytes["ram_to_gpu"] - before == 4 * 4096


# ---- stalls ----


def test_slow_disk_makes_stalls_whose_cause_is_named(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("nvme")
    run.evaluate()
    slow_reads(monkeypatch, 0.03)
    run.player.take_events()
    started = time.perf_counter_ns()
    run.evaluate()
    events = run.player.take_events()
    stalls = [event for event in events if event.lane == "stall"]
    assert {event.name for event in stalls} <= {unit.name for unit in UNITS}

    # Nothing is compared with waits of other causes: on a busy machine a queue's thread may come late to a free slot.
    waited_s = stall_seconds(events)["nvme_to_ram"]
    assert 0.03 < waited_s < (time.perf_counter_ns() - started) / 1e9
    reads = [event for event in events if event.lane == "nvme_to_ram"]
    assert sum(event.num_bytes for event in reads) == sum(4 * unit.num_elements for unit in UNITS)
    assert all(event.seconds > 0.025 for event in reads)
    computed = {event.name.split()[0]: event.start_ns for event in events if event.lane == "compute"}
    assert all(event.end_ns == computed[event.name] for event in stalls)


# ---- another order ----


def test_unit_out_of_order_is_refused_by_name(start: Callable[..., Run]) -> None:
    run = start("nvme")
    run.train_step()
    run.player.begin("train")
    run.use("u1", Phase.FORWARD, 0)
    with pytest.raises(TimelineError, match=r"use 2 of this pass is u0 \(forward, group 0\)"):
        run.player.weights.enter("u0", Phase.FORWARD, 0)
    assert len(run.player.accesses) == 2, "nothing was used on the way to the error"


@pytest.mark.parametrize(
    ("name", "deferred", "groups", "split"),
    crossed(PLACES, [True, False], [1, 3], [False, True], by=2),
)
def test_units_that_a_step_leaves_out_are_not_updated_and_the_next_steps_have_them_again(
    start: Callable[..., Run], name: str, deferred: bool, groups: int, split: bool
) -> None:
    tight = 180 << 10 if name == "mixed" and split and groups == 1 else 0
    run = start(name, ram=tight, deferred=deferred, groups=groups, split=split)
    for left_out in ((), ("u0", "u1"), ("u1", "u2"), (), ("u4",), ("u0", "u1", "u2", "u3", "u4"), ()):
        within(partial(run.train_step, left_out=left_out))
    run.evaluate()
    run.check_state()
    assert run.store.moved_bytes - run_in_moves(run) == run.player.demanded


@pytest.mark.parametrize(
    ("name", "deferred", "groups", "generations"),
    crossed(PLACES, [True, False], [1, 3], [1, 2], by=2),
)
def test_units_that_groups_without_pixels_leave_out_are_not_loaded_for_them(
    start: Callable[..., Run], name: str, deferred: bool, groups: int, generations: int
) -> None:
    run = start(name, deferred=deferred, groups=groups, generations=generations)
    tower = ("u0", "u1")
    every = tuple(range(groups))
    for text_groups in ((), every, every, (), every[:1], every[1:], (), every, every):
        within(partial(run.train_step, left_out=tower, text_groups=text_groups))
    timeline = run.player.timeline
    assert timeline is not None

    # The updates of the step before have run, so nothing brings the tower any more.
    assert not {load.unit for load in planned_loads(timeline)}.intersection(tower)
    assert not {update.unit for update in planned_updates(timeline)}.intersection(tower)
    run.evaluate()
    run.check_state()
    assert run.store.moved_bytes - run_in_moves(run) == run.player.demanded


def test_layer_that_a_group_without_pixels_leaves_out_is_loaded_for_the_next(start: Callable[..., Run]) -> None:
    units = [replace(unit, is_layer=unit.name == "u1") for unit in UNITS]
    run = start("ram", units)
    for left_out in ((), ("u0", "u1"), ("u0",)):
        within(partial(run.train_step, left_out=left_out, text_groups=[0]))
    run.check_state()


def test_unit_that_is_used_without_pixels_after_all_is_refused_once(start: Callable[..., Run]) -> None:
    run = start("nvme")
    for left_out in ((), ("u0",), ("u0",)):
        within(partial(run.train_step, left_out=left_out, text_groups=[0]))
    with pytest.raises(TimelineError, match="u0 is used in group 0, which has no pixels"):
        run.train_step(text_groups=[0])
    run.player.cancel()
    within(partial(run.train_step, text_groups=[0]))
    run.check_state()


def test_unit_used_in_a_forward_but_not_in_its_backward_is_refused(start: Callable[..., Run]) -> None:
    run = start("ram")
    run.train_step()
    run.player.begin("train")
    for access in run.order()[:-1]:
        run.use(*access)
    with pytest.raises(TimelineError, match=r"ended before u0 \(backward, group 0\)"):
        run.player.end()
    run.player.drain()
    within(run.train_step)
    run.check_state()


def test_unit_that_the_first_step_left_out_is_refused_with_a_remedy(start: Callable[..., Run]) -> None:
    run = start("ram")
    run.train_step(left_out=("u1",))
    with pytest.raises(TimelineError, match=r"use 1 of this pass is u1 .* image into each batch of the first step"):
        run.train_step()


def test_more_uses_than_recorded_are_refused(start: Callable[..., Run]) -> None:
    run = start("ram")
    run.evaluate()
    run.evaluate()
    with pytest.raises(TimelineError, match="use 5 of this pass is u0"):
        run.player.weights.enter("u0", Phase.FORWARD, 0)


def test_pass_that_ends_early_is_refused_and_the_next_one_works(start: Callable[..., Run]) -> None:
    run = start("nvme")
    run.evaluate()
    run.train_step()
    run.player.begin("train")
    run.use("u0", Phase.FORWARD, 0)
    with pytest.raises(TimelineError, match=r"ended before u0 \(backward, group 0\)"):
        run.player.end()
    within(run.evaluate)
    within(run.train_step)
    run.check_state()


# ---- cancel, close ----


@pytest.mark.parametrize("uses", [1, 3])
@pytest.mark.parametrize("name", ["ram", "nvme", "mixed", "streamed"])
@pytest.mark.parametrize("deferred", [True, False])
def test_cancel_half_way_leaves_a_run_that_goes_on(
    start: Callable[..., Run], name: str, deferred: bool, uses: int
) -> None:
    run = start(name, deferred=deferred)
    for _ in range(2):
        run.train_step()
    run.player.begin("train")
    for access in run.order()[:uses]:
        run.use(*access)
    within(run.player.cancel)
    run.check_state()  # the updates that were due have run
    within(run.train_step)
    within(run.evaluate)
    run.check_state()


@pytest.mark.parametrize("name", ["nvme", "streamed"])
@pytest.mark.parametrize("uses", [0, 1, 4, 7])
def test_close_in_the_middle_of_a_pass_ends(start: Callable[..., Run], uses: int, name: str) -> None:
    run = start(name)
    run.train_step()
    run.player.begin("train")
    for access in run.order()[:uses]:
        run.use(*access)
    close(run)


def test_close_while_compute_holds_a_unit_ends(start: Callable[..., Run]) -> None:
    run = start("mixed")
    run.train_step()
    run.player.begin("train")
    run.player.weights.enter("u0", Phase.FORWARD, 0)
    close(run)


# ---- errors in the queues ----


DAMAGED = IntegrityError("u3", "/mnt/blocks", 4096, 1, 2)


@pytest.mark.parametrize("error", [BROKEN, DAMAGED], ids=["io", "checksum"])
@pytest.mark.parametrize("deferred", [True, False])
def test_failing_read_reaches_compute_and_nothing_hangs(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, error: Exception, deferred: bool
) -> None:
    run = start("nvme", deferred=deferred)
    run.train_step()
    fail_moves(monkeypatch, "read", "u3", error)
    with pytest.raises(type(error)) as caught:
        within(run.train_step)
    assert caught.value is error
    if deferred:  # in the immediate mode no update was under way
        with pytest.raises(type(error)):
            within(run.player.drain)
    check_invariants(run.store)


def test_planned_timeline_is_one_of_the_recorded_order(start: Callable[..., Run]) -> None:
    run = start("mixed")
    run.evaluate()
    run.evaluate()
    timeline = run.player.timeline
    assert timeline is not None
    assert [access.unit for access in timeline.accesses] == [unit.name for unit in UNITS]


@pytest.mark.parametrize("name", list(PLACES))
def test_step_takes_no_lock_by_python_code_in_the_thread_that_trains(start: Callable[..., Run], name: str) -> None:
    run = start(name)
    run.train_step()
    with python_locks() as called:
        run.train_step()
        run.player.drain()
    assert called == []
