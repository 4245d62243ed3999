"""The watchdog: what it takes for a hang, what it reports, and how a run ends by it."""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from from_outside import FAULTS
from small_commands import leftovers, metrics
from stalled_scene import Scene, stalled_scene
from warm_python import WarmPython

from megatier.errors import StallError
from megatier.schedule.timeline import Access
from megatier.tier import Phase
from megatier.watch import watchdog as watchdog_module
from megatier.watch.watchdog import SIGNAL, Watchdog, read_progress
from megatier.watch.work_count import WorkCount

STALL_TIMEOUT_S = 10
HANGS_S = 20.0
"""Seconds that a hang may take in which a watchdog ought to act."""


# ---------------------------------------------------------------------- what it sees


@pytest.fixture
def scene() -> Iterator[Scene]:
    with stalled_scene() as scene:
        yield scene


def test_progress_is_every_item_begun_every_move_ended_and_every_access(scene: Scene) -> None:
    seen = [read_progress(scene.player)]
    moved = scene.queues[0].submit("block", 1, lambda: scene.move)
    assert moved.has_started(60)
    seen.append(read_progress(scene.player))
    scene.move.ended.set()
    seen.append(read_progress(scene.player))
    scene.player.accesses.append(Access("unit1", Phase.FORWARD, 0))
    seen.append(read_progress(scene.player))
    scene.player.gate.open_to(1)
    seen.append(read_progress(scene.player))
    assert all(before != after for before, after in itertools.pairwise(seen))
    assert read_progress(scene.player) == seen[-1]


# ---------------------------------------------------------------------- how it acts


def test_watchdog_takes_the_corrected_step(tmp_path: Path) -> None:
    watchdog = Watchdog(tmp_path / "stall.txt", 10.0, 60.0)
    watchdog.expect(90.0)
    assert watchdog._stall_timer.expected_s == 90.0


def test_watch_where_nothing_moves_raises_in_the_thread_that_waits(
    scene: Scene, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handler, path = signal.getsignal(SIGNAL), tmp_path / "stall.txt"
    with (
        pytest.raises(StallError, match=f"{path} says what each queue waits for") as raised,
        Watchdog(path, 0.1, 0.0) as watchdog,
        watchdog.watch(scene.player),
    ):
        threading.Event().wait()
    assert raised.value.quiet_s >= 0.1
    assert path.read_text() == capsys.readouterr().err
    assert signal.getsignal(SIGNAL) == handler


def refuse(*_: object, **__: object) -> Any:
    raise RuntimeError("out of order")


def test_watch_whose_count_or_progress_raises_still_ends_a_run_that_hangs(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for done, look in ((refuse, read_progress), (lambda: 1, refuse)):
        monkeypatch.setattr(watchdog_module, "read_progress", look)
        with (
            pytest.raises(StallError),
            Watchdog(tmp_path / "stall.txt", 0.1, 0.0) as watchdog,
            watchdog.watch(scene.player, done),
        ):
            threading.Event().wait(HANGS_S)


def test_watch_whose_count_raises_sees_queues_move(scene: Scene, tmp_path: Path) -> None:
    watchdog = Watchdog(tmp_path / "stall.txt", 10.0, 0.0)
    watchdog._done = refuse
    before = watchdog._look(scene.player)
    assert before is not None
    assert watchdog._look(scene.player) == before
    scene.player.gate.open_to(1)
    assert watchdog._look(scene.player) != before


def test_stall_whose_report_cannot_be_made_says_why_and_ends_the_run(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watchdog_module, "describe_stall", refuse)
    path = tmp_path / "stall.txt"
    with pytest.raises(StallError), Watchdog(path, 0.1, 0.0) as watchdog, watchdog.watch(scene.player):
        threading.Event().wait(HANGS_S)
    assert "Its report could not be made:" in path.read_text()
    assert "RuntimeError: out of order" in path.read_text()
    assert path.read_text() == capsys.readouterr().err


@pytest.mark.parametrize("place", ["stderr", "thread"])
def test_stall_whose_report_cannot_be_written_ends_the_run(
    place: str, scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "stall.txt"
    with pytest.raises(StallError), Watchdog(path, 0.1, 0.0) as watchdog, watchdog.watch(scene.player):
        if place == "stderr":
            monkeypatch.setattr(sys, "stderr", None)
        else:
            monkeypatch.setattr(threading.Thread, "start", refuse)
        threading.Event().wait(HANGS_S)
    assert path.exists() == (place == "stderr")


def test_watch_between_passes_waits_for_ever(scene: Scene, tmp_path: Path) -> None:
    with Watchdog(tmp_path / "stall.txt", 0.02, 0.0) as watchdog:
        with watchdog.watch(scene.player):
            pass
        assert not threading.Event().wait(0.2)
    assert not list(tmp_path.iterdir())


def test_watch_of_pieces_begins_with_the_first_and_goes_on_while_others_follow(scene: Scene, tmp_path: Path) -> None:
    done = WorkCount()
    piece = done.counting(lambda: None)
    with (
        pytest.raises(StallError),
        Watchdog(tmp_path / "stall.txt", 0.2, 0.0) as watchdog,
        watchdog.watch(scene.player, lambda: done.begun),
    ):
        assert not threading.Event().wait(0.5)
        for _ in range(50):
            piece()
            assert not threading.Event().wait(0.01)
        assert not list(tmp_path.iterdir())
        threading.Event().wait()


def test_watchdog_that_is_off_leaves_threads_and_signals_alone(scene: Scene, tmp_path: Path) -> None:
    found = threading.active_count(), signal.getsignal(SIGNAL)
    with Watchdog(tmp_path / "stall.txt", 0.0, 0.0) as watchdog, watchdog.watch(scene.player):
        assert (threading.active_count(), signal.getsignal(SIGNAL)) == found


# ---------------------------------------------------------------------- whole runs, see faults/stall.py


@dataclass
class Ended:
    """How a run ended."""

    folder: Path
    code: int
    errors: str

    @property
    def report(self) -> str:
        return (self.folder / "run" / "stall.txt").read_text()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, python: WarmPython) -> dict[str, Ended]:
    """Every scenario, in a process each, all at once."""
    names = ("drive", "queue", "slot", "compute", "checkpoint", "slow", "fill", "load", "export", "slow_load")
    folders = {name: tmp_path_factory.mktemp(name) for name in names}
    found = {}
    with contextlib.ExitStack() as started:
        processes = {
            name: started.enter_context(python.start([FAULTS / "stall.py", name, folders[name], str(STALL_TIMEOUT_S)]))
            for name in names
        }
        for name, process in processes.items():
            _, errors = process.communicate()
            found[name] = Ended(folders[name], process.wait(), errors)
    return found


@pytest.mark.parametrize("name", ["drive", "queue", "slot", "compute", "checkpoint"])
def test_run_that_hangs_ends_with_an_error_and_the_state_of_every_queue(name: str, runs: dict[str, Ended]) -> None:
    ended = runs[name]
    assert ended.code == 2, ended.errors
    assert ended.errors.startswith(ended.report)
    assert "megatier: error: no transfer, update or use of weights moved on for" in ended.errors
    assert f"{ended.folder}/run/stall.txt says what each queue waits for" in ended.errors
    assert "thread MainThread:" in ended.report
    steps = [1, 2, 3] if name == "checkpoint" else [1, 2]  # a checkpoint holds up the step after the next
    assert [record["step"] for record in metrics(ended.folder)] == steps


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("drive", r"    in flight: nvme_to_ram model.embed_tokens/weight, for"),
        ("queue", r"  ram_to_gpu: at model.embed_tokens/weight for"),
        ("slot", r"in _wait_for_slot"),
        ("compute", r"in measure"),
        ("checkpoint", "  checkpoint: at model.embed_tokens for"),
        ("checkpoint", "    behind checkpoint model.embed_tokens, not started"),
        ("checkpoint", "thread megatier-checkpoint_0:"),
    ],
)
def test_run_that_hangs_says_where(name: str, found: str, runs: dict[str, Ended]) -> None:
    assert found in runs[name].report


@pytest.mark.parametrize("name", ["drive", "queue", "slot", "checkpoint"])
def test_run_whose_lane_hangs_leaves_its_block_files_and_says_so(name: str, runs: dict[str, Ended]) -> None:
    assert "block files (megatier-<run id> on each mount of tiers.nvme) stay" in runs[name].errors
    assert len(list(runs[name].folder.glob("megatier-*/blocks"))) == 1


def test_run_whose_queues_can_end_is_closed(runs: dict[str, Ended]) -> None:
    assert "block files" not in runs["compute"].errors
    assert not list(leftovers(runs["compute"].folder))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("fill", r" in fill"),
        ("load", "thread megatier-fill"),
        ("export", "    in flight: nvme_to_ram model.embed_tokens/"),
    ],
)
def test_run_that_hangs_before_its_first_step_or_after_its_last_one_says_where(
    name: str, found: str, runs: dict[str, Ended]
) -> None:
    ended = runs[name]
    assert ended.code == 2, ended.errors
    assert ended.errors.startswith(ended.report)
    assert "megatier: error: no transfer, update or use of weights moved on for" in ended.errors
    assert found in ended.report
    assert not (ended.folder / "run" / "model").exists()


def test_run_whose_first_weights_are_merely_slow_goes_on(runs: dict[str, Ended]) -> None:
    ended = runs["slow_load"]
    assert (ended.code, ended.errors) == (0, "")
    assert not (ended.folder / "run" / "stall.txt").exists()


def test_run_that_is_merely_slow_goes_on(runs: dict[str, Ended]) -> None:
    ended = runs["slow"]
    assert (ended.code, ended.errors) == (0, "")
    assert sum(record.get("seconds", 0) for record in metrics(ended.folder)) > STALL_TIMEOUT_S
    assert not (ended.folder / "run" / "stall.txt").exists()
