"""The updates: where and in what order they run, streamed state and its exchange, errors on the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import check_invariants, slow_reads
from integer_runs import (
    BROKEN,
    HANG_S,
    PLACES,
    STREAMED,
    UNITS,
    Run,
    check_broken_for_good,
    fail_moves,
    starter,
    within,
)

from megatier.errors import NonFiniteError, TransferError
from megatier.play.blocks import block_key
from megatier.schedule.moves import Moves, by_lane
from megatier.schedule.sizes import UnitSpec
from megatier.store.lanes import Lanes
from megatier.tier import Kind, Phase, Tier
from megatier.trace.events import stall_seconds


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts runs by placement; closes them."""
    with starter(tmp_path) as start_run:
        yield start_run


def test_updates_run_in_forward_order_and_feed_the_loads(start: Callable[..., Run]) -> None:
    run = start("nvme")
    run.train_step()
    run.store.take_log()
    run.adder.updated.clear()
    before = run.store.moved_bytes.copy()
    run.train_step()
    moved = run.store.moved_bytes - before
    assert run.adder.updated == [unit.name for unit in UNITS]
    timeline = run.player.timeline
    assert timeline is not None
    assert all(update.load is not None for update in timeline.updates)
    moves = Moves(run.blocks.units, run.placement, run.policy)
    demanded = by_lane(moves.of_pass(timeline, gradients=run.blocks.units, updated=run.blocks.units))
    assert moved == demanded
    state = sum(12 * unit.num_elements for unit in UNITS)
    again = sum(4 * run.blocks.units[load.unit].num_elements for load in timeline.loads)
    assert demanded["nvme_to_ram"] == state + again  # state once; weights again only where the backward reloads them


def test_slow_updates_are_named(start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run = start("ram")
    run.train_step()
    run.player.take_events()
    real = run.adder.apply

    def slow(*arguments: object) -> None:
        time.sleep(0.01)
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(run.adder, "apply", slow)
    run.train_step()
    events = run.player.take_events()
    seconds = stall_seconds(events)
    assert max(seconds, key=lambda cause: seconds[cause]) == "update"
    assert seconds["update"] > 0.01
    assert [event.name for event in events if event.lane == "update"][:1] == ["u0"]


def test_slow_disk_under_deferred_updates_is_named_too(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("nvme")
    run.train_step()
    run.player.take_events()
    slow_reads(monkeypatch, 0.01)
    run.train_step()
    seconds = stall_seconds(run.player.take_events())
    assert max(seconds, key=lambda cause: seconds[cause]) == "nvme_to_ram"
    run.check_state()


def test_updates_on_the_gpu_are_in_the_trace(start: Callable[..., Run]) -> None:
    run = start("streamed")
    for _ in range(3):
        run.train_step()
    run.player.drain()
    names = {event.name for event in run.player.take_events() if event.lane == "update_gpu"}
    assert names == set(run.placement.streamed)


@pytest.mark.parametrize("name", PLACES)
def test_update_waits_until_its_units_state_was_read_and_the_stall_says_so(
    name: str, start: Callable[..., Run]
) -> None:
    run, free = start(name), threading.Event()
    run.train_step()
    run.player.drain()

    def read() -> None:
        free.wait(HANG_S)

    for unit in run.blocks.units:
        run.player.reader.submit(unit, read, unit=unit)
    run.train_step()
    run.player.take_events()
    updated = list(run.adder.updated)

    def release() -> None:
        time.sleep(0.1)
        assert run.adder.updated == updated
        free.set()

    thread = threading.Thread(target=release)
    thread.start()
    within(run.train_step)
    thread.join()
    assert "checkpoint" in stall_seconds(run.player.take_events())
    assert len(run.adder.updated) == len(updated) + len(run.blocks.units)
    run.check_state()


def test_work_that_reads_state_is_undone_behind_one_that_failed(start: Callable[..., Run]) -> None:
    run, done = start("ram"), list[str]()

    def fail() -> None:
        raise BROKEN

    failed = run.player.reader.submit("first", fail, unit="u0")
    behind = run.player.reader.submit("second", lambda: done.append("second"), failed, "u1")
    with pytest.raises(TransferError):
        behind.wait()
    assert not done
    for _ in range(2):
        within(run.train_step)
    run.check_state()


def test_drain_completes_every_write_back(start: Callable[..., Run]) -> None:
    run = start("nvme")
    run.train_step()
    run.player.drain()
    for unit in UNITS:
        for kind in run.kinds:
            assert not run.store.is_dirty(block_key(unit.name, kind))
            assert list(run.store.residency(block_key(unit.name, kind))) == [Tier.NVME]
    run.check_state()


# ---- gradients on NVMe ----


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
    ],
)
def test_gradients_that_ram_does_not_take_wait_on_nvme(
    start: Callable[..., Run], split: bool, generations: int, ram: int
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
    ],
)
def test_sums_of_groups_that_ram_does_not_take_pass_through_the_gpu(
    start: Callable[..., Run], name: str, split: bool, ram: int, choices: dict[str, int]
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


# ---- streamed state ----


def settle_exchange(run: Run) -> None:
    """Until streamed state has gone home and come again."""
    assert run.player.updates.exchange is not None
    run.player.updates.exchange.wait()
    for copy in [copy for block in run.store._blocks.by_key.values() for copy in block.copies]:
        for transfer in copy.arriving(copy.span):
            transfer.over()


def on_gpu(run: Run, kind: Kind) -> set[str]:
    return {name for name in run.blocks.units if Tier.GPU in run.store.residency(block_key(name, kind))}


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("split", [False, True])
def test_streamed_state_passes_through_the_gpu_on_lanes_of_its_own(
    start: Callable[..., Run], split: bool, groups: int
) -> None:
    run = start("streamed", split=split, groups=groups)
    size = sum((10 if split else 8) * run.blocks.units[name].num_elements for name in STREAMED)
    run.train_step()
    assert run.player.demanded["state_to_gpu"] == run.store.moved_bytes["state_to_gpu"] == 0  # it only records
    run.train_step()
    settle_exchange(run)
    for step in range(3, 6):
        before = run.store.moved_bytes.copy()
        run.train_step()
        settle_exchange(run)
        moved = run.store.moved_bytes - before
        assert (moved["state_to_gpu"], moved["state_to_ram"]) == (size, size), step
        weights = sum((2 if split else 4) * run.blocks.units[name].num_elements for name in STREAMED)
        shipped = sum(run.blocks.units[name].num_elements for name in ("u1", "u3"))
        grads = groups * shipped * (2 if split and groups == 1 else 4)
        assert moved["gpu_to_ram"] == weights + grads
        assert on_gpu(run, Kind.EXP_AVG) == set(STREAMED)
    run.check_state()
    assert run.store.moved_bytes == run.player.demanded
    assert on_gpu(run, Kind.EXP_AVG) == on_gpu(run, Kind.WEIGHT) == set()


@pytest.mark.parametrize("extra_slots", [0, 3])
def test_streamed_state_steps_drains_and_evaluations_in_any_order_move_what_is_demanded(
    start: Callable[..., Run], extra_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PLACES, "streamed", ((Tier.RAM,), (296 << 10) + extra_slots * (40 << 10), 2 << 20))
    run = start("streamed")
    assert run.placement.num_slots(Tier.GPU, Kind.WEIGHT) == 2 + extra_slots
    drain, step, evaluate = run.player.drain, run.train_step, run.evaluate
    for do in (drain, step, step, drain, step, evaluate, step, step, evaluate, evaluate, drain, drain, step, drain):
        within(do)
    assert run.store.moved_bytes == run.player.demanded
    run.check_state()
    within(step)
    run.check_state()


def test_streamed_state_beside_units_at_home_on_the_gpu(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    units = [UnitSpec(name=f"u{number}", num_elements=4096) for number in range(5)]
    slots, home, passing = 4 * (16 << 10), 64 << 10, 48 << 10
    monkeypatch.setitem(PLACES, "streamed", ((Tier.GPU, Tier.RAM), slots + home + passing, 2 << 20))
    run = start("streamed", units)
    assert [run.placement.updater(unit.name) for unit in units] == [Tier.GPU, Tier.GPU, Tier.RAM, Tier.RAM, Tier.RAM]
    assert run.placement.homes["u0", Kind.WEIGHT] is Tier.GPU
    assert run.placement.streamed == ("u1",)
    for _ in range(3):
        run.train_step()
    run.evaluate()
    run.check_state()
    assert run.store.moved_bytes == run.player.demanded


def test_streamed_state_fetched_ahead_survives_a_step_that_is_not_finite(start: Callable[..., Run]) -> None:
    """Such a step ends without updates; what it fetched serves the next one."""
    run = start("streamed")
    run.train_step()
    run.train_step()
    run.player.begin("train")
    for access in run.order():
        run.use(*access)
    run.player.end()
    run.player.drain_gradients()
    run.evaluate()  # the diagnosis
    assert on_gpu(run, Kind.EXP_AVG) == set(STREAMED)
    before = run.store.moved_bytes["state_to_gpu"]
    run.player.begin("train")
    for access in run.order():
        run.use(*access)
    settle_exchange(run)
    assert run.store.moved_bytes["state_to_gpu"] == before
    run.player.end()
    run.player.drain_gradients()
    run.player.defer_updates(clipped=False)
    run.model.update()
    run.check_state()
    assert run.store.moved_bytes == run.player.demanded


def test_streamed_update_waits_for_no_cpu_update_but_goes_home_after_them(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("streamed")
    run.train_step()
    run.train_step()
    settle_exchange(run)
    before = run.store.moved_bytes["state_to_ram"]
    held, real = threading.Event(), run.adder.apply

    def slow(unit: str, *arguments: object) -> None:
        if unit not in STREAMED:
            held.wait(HANG_S)
        real(unit, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(run.adder, "apply", slow)
    run.adder.updated.clear()
    run.player.begin("train")
    run.use("u0", Phase.FORWARD, 0)
    time.sleep(0.05)
    assert run.adder.updated == ["u0"]  # u2 has no slot yet
    assert run.store.moved_bytes["state_to_ram"] == before
    held.set()
    for access in run.order()[1:]:
        run.use(*access)
    run.player.end()
    run.player.drain_gradients()
    run.player.defer_updates(clipped=False)
    run.model.update()
    run.check_state()


def fail_lane(monkeypatch: pytest.MonkeyPatch, queue: str, prefix: str, error: Exception) -> None:
    """Moves on one lane of blocks whose key begins so fail."""
    real = Lanes.submit

    def submit(self: Lanes, name: str, key: str, size: int, start: Callable[[], Any], *rest: Any, **more: Any) -> Any:
        def refuse() -> None:
            time.sleep(0.02)  # a slow failure is noticed late
            raise error

        return real(self, name, key, size, refuse if name == queue and key.startswith(prefix) else start, *rest, **more)

    monkeypatch.setattr(Lanes, "submit", submit)


@pytest.mark.parametrize(
    ("queue", "key"),
    [("state_to_ram", "u2/exp_avg_sq"), ("state_to_gpu", "u2/exp_avg_sq"), ("gpu_to_ram", "u2/weight")],
)
def test_streamed_state_that_cannot_move_stops_the_run(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, queue: str, key: str
) -> None:
    run = start("streamed")
    run.train_step()
    run.player.drain()
    fail_lane(monkeypatch, queue, key, BROKEN)
    check_broken_for_good(run)


def test_streamed_state_write_back_that_fails_reaches_drain(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("streamed")
    run.train_step()
    fail_lane(monkeypatch, "state_to_ram", "u2/exp_avg_sq", BROKEN)
    with pytest.raises(TransferError):
        within(run.player.drain)


# ---- errors in the lanes ----


def test_failing_read_of_state_reaches_drain_and_nothing_hangs(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("nvme", deferred=False)
    run.train_step()
    run.player.drain()
    fail_moves(monkeypatch, "read", "u3/exp_avg", BROKEN)
    with pytest.raises(TransferError) as caught:
        within(run.train_step)
    assert caught.value is BROKEN
    within(run.player.cancel)
    assert set(run.adder.updated[5:]) == {"u4", "u2", "u1", "u0"}
    check_invariants(run.store)


@pytest.mark.parametrize("deferred", [True, False])
def test_failing_write_back_reaches_drain_and_nothing_hangs(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, deferred: bool
) -> None:
    run = start("nvme", deferred=deferred)
    run.train_step()
    run.player.drain()
    fail_moves(monkeypatch, "write", "u2/exp_avg_sq", BROKEN)
    check_broken_for_good(run)
    check_invariants(run.store)


def test_gradient_that_is_not_finite_stops_its_update_alone(start: Callable[..., Run]) -> None:
    run = start("nvme", deferred=False)
    run.train_step()
    run.adder.refused = "u3"
    run.adder.updated.clear()
    with pytest.raises(NonFiniteError, match="u3"):
        within(run.train_step)  # the gradient slots of later units are not held by the refused one
    within(run.player.cancel)
    assert set(run.adder.updated) == {"u4", "u2", "u1", "u0"}
    with pytest.raises(NonFiniteError, match="u3"):
        within(run.player.drain)
