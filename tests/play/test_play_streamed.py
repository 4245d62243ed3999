"""Streamed state: its way through the GPU, its exchange, and moves of it that fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from integer_runs import (
    BROKEN,
    HANG_S,
    PLACES,
    STREAMED,
    Run,
    check_broken_for_good,
    starter,
    within,
)

from megatier.errors import TransferError
from megatier.play.unit_blocks import block_key
from megatier.schedule.unit_spec import UnitSpec
from megatier.store.tier_queues import TierQueues
from megatier.tier import Kind, Phase, Tier


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts runs by placement; closes them."""
    with starter(tmp_path) as start_run:
        yield start_run


def settle_exchange(run: Run) -> None:
    """Until streamed state has gone home and come again."""
    assert run.player.updates.exchange is not None
    run.player.updates.exchange.wait()
    for copy in [copy for block in run.store._blocks.by_key.values() for copy in block.copies]:
        for transfer in copy.arriving(copy.span):
            transfer.wait_for_end()


def on_gpu(run: Run, kind: Kind) -> set[str]:
    return {name for name in run.blocks.units if Tier.GPU in run.store.residency(block_key(name, kind))}


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("split", [False, True])
def test_streamed_state_passes_through_the_gpu_on_queues_of_its_own(
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
    queues = ["update_gpu", "update_gpu", "update", "update", "update"]
    assert [run.placement.update_queue(unit.name) for unit in units] == queues
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


def fail_queue(monkeypatch: pytest.MonkeyPatch, queue: str, prefix: str, error: Exception) -> None:
    """Moves on one queue of blocks whose key begins so fail."""
    real = TierQueues.submit

    def submit(
        self: TierQueues, name: str, key: str, size: int, start: Callable[[], Any], *rest: Any, **more: Any
    ) -> Any:
        def refuse() -> None:
            time.sleep(0.02)  # a slow failure is noticed late
            raise error

        return real(self, name, key, size, refuse if name == queue and key.startswith(prefix) else start, *rest, **more)

    monkeypatch.setattr(TierQueues, "submit", submit)


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
    fail_queue(monkeypatch, queue, key, BROKEN)
    check_broken_for_good(run)


def test_streamed_state_write_back_that_fails_reaches_drain(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("streamed")
    run.train_step()
    fail_queue(monkeypatch, "state_to_ram", "u2/exp_avg_sq", BROKEN)
    with pytest.raises(TransferError):
        within(run.player.drain)
