"""The updates: where and in what order they run, and errors on the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from from_outside import check_invariants
from integer_runs import (
    BROKEN,
    HANG_S,
    PLACES,
    UNITS,
    Run,
    check_broken_for_good,
    fail_moves,
    starter,
    within,
)
from late_reads import slow_reads
from small_timelines import planned_loads, planned_updates

from megatier.errors import NonFiniteError, TornStateError, TransferError
from megatier.play.unit_blocks import block_key
from megatier.schedule.moves import Moves, by_queue
from megatier.store.transfer import Transfer
from megatier.tier import Tier
from megatier.trace.events import stall_seconds
from megatier.trace.recorder import Recorder


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
    assert all(update.load is not None for update in planned_updates(timeline))
    moves = Moves(run.blocks.units, run.placement, run.policy)
    parts = [moves.of(item) for item in timeline.items]
    parts += [moves.gradients(unit) for unit in run.blocks.units]
    demanded = by_queue(move for part in parts for move in part)
    assert moved == demanded
    state = sum(12 * unit.num_elements for unit in UNITS)
    again = sum(4 * run.blocks.units[load.unit].num_elements for load in planned_loads(timeline))
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

    # Nothing is compared with waits of other causes, because a busy machine makes those longer.
    assert seconds["nvme_to_ram"] > 0.01
    run.check_state()


def test_updates_on_the_gpu_are_in_the_trace(start: Callable[..., Run]) -> None:
    run = start("streamed")
    for _ in range(3):
        run.train_step()
    run.player.drain()
    names = {event.name for event in run.player.take_events() if event.lane == "update_gpu"}
    assert names == set(run.placement.streamed)


@pytest.mark.parametrize("name", PLACES)
def test_update_waits_until_its_units_state_was_read_which_is_noted_as_the_cause(
    name: str, start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, free, noted = start(name), threading.Event(), threading.Event()
    cause_of = Recorder.cause_of

    # A stall has the cause of most of its time. How long the drive takes in the same wait is not for a test to say.
    def noting(recorder: Recorder, transfer: Transfer) -> str:
        cause = cause_of(recorder, transfer)
        if cause == "checkpoint":
            noted.set()
        return cause

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
        noted.wait(HANG_S)
        assert run.adder.updated == updated
        free.set()

    monkeypatch.setattr(Recorder, "cause_of", noting)
    thread = threading.Thread(target=release)
    thread.start()
    within(run.train_step)
    thread.join()
    assert noted.is_set()
    assert stall_seconds(run.player.take_events())
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
        for kind in run.blocks.kinds(unit.name):
            assert not run.store.is_dirty(block_key(unit.name, kind))
            assert list(run.store.residency(block_key(unit.name, kind))) == [Tier.NVME]
    run.check_state()


# ---- errors in the queues ----


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
    with pytest.raises(NonFiniteError, match="u3") as caught:
        within(run.train_step)  # the gradient slots of later units are not held by the refused one
    assert caught.value.updated == ("u0", "u1", "u2", "u4")
    within(run.player.cancel)
    assert set(run.adder.updated) == {"u4", "u2", "u1", "u0"}
    with pytest.raises(TornStateError):
        within(run.player.drain)
