"""The watchdog: what it takes for a hang, what it reports, and how a run ends by it."""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from from_outside import FAULTS
from small_commands import leftovers, metrics
from warm_python import WarmPython

from megatier.errors import StallError
from megatier.play.gate import Gate
from megatier.schedule.timeline import Access
from megatier.store.queue import Queue
from megatier.tier import Phase
from megatier.train.watchdog import (
    MULTIPLE,
    QUEUES_TITLE,
    SHOWN_MAX,
    SIGNAL,
    Patience,
    Tally,
    Watchdog,
    progress,
    report,
)

STALL_TIMEOUT_S = 10


# ---------------------------------------------------------------------- patience


def looks(patience: Patience, seen: object) -> int:
    """Looks of one second, at what stays the same from now on, until the patience ends."""
    assert not patience.ends(seen, 1.0)
    count = 1
    while not patience.ends(seen, 1.0):
        count += 1
    return count


def test_patience_ends_when_the_least_time_has_passed_without_progress() -> None:
    assert looks(Patience(10.0, 0.0), "seen") == 10


def test_patience_never_ends_while_something_moves_on() -> None:
    patience = Patience(10.0, 0.0)
    assert not any(patience.ends(number // 9, 1.0) for number in range(1000))


def test_patience_lasts_a_multiple_of_the_longest_time_before() -> None:
    patience = Patience(10.0, 0.0)
    for _ in range(9):
        patience.ends("slow", 1.0)
    assert looks(patience, "seen") == MULTIPLE * 8


def test_patience_lasts_a_multiple_of_the_predicted_step() -> None:
    assert looks(Patience(10.0, 60.0), "seen") == MULTIPLE * 60


def test_watchdog_takes_the_corrected_step(tmp_path: Path) -> None:
    watchdog = Watchdog(tmp_path / "stall.txt", 10.0, 60.0)
    watchdog.expect(90.0)
    assert looks(watchdog._patience, "seen") == MULTIPLE * 90


def test_patience_counts_nothing_between_passes() -> None:
    patience = Patience(10.0, 0.0)
    assert not any(patience.ends(None, 1.0) for _ in range(1000))
    assert looks(patience, "seen") == 10


# ---------------------------------------------------------------------- what it sees


class Never:
    """A move that does not end before it is told."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def wait(self) -> None:
        self.ended.wait()

    def done(self) -> bool:
        return self.ended.is_set()

    def span_ns(self) -> tuple[int, int]:
        return 1, 2


@dataclass
class Scene:
    """A player with two queues, the second of which waits for the first; and the means to end that."""

    player: Any
    move: Never

    @property
    def queues(self) -> tuple[Queue, ...]:
        queues: tuple[Queue, ...] = self.player.queues
        return queues


@pytest.fixture
def scene() -> Iterator[Scene]:
    queues, move = (Queue("source"), Queue("target")), Never()
    accesses = [Access(f"unit{number}", Phase.FORWARD, 0) for number in range(3)]
    player = SimpleNamespace(
        queues=queues,
        gate=Gate(),
        busy={"target": "slot"},
        accesses=accesses[:1],
        timeline=SimpleNamespace(accesses=tuple(accesses)),
    )
    yield Scene(player, move)
    move.ended.set()
    for queue in queues:
        queue.close()


def test_progress_is_every_item_begun_every_move_ended_and_every_access(scene: Scene) -> None:
    seen = [progress(scene.player)]
    moved = scene.queues[0].submit("block", 1, lambda: scene.move)
    assert moved.has_started(60)
    seen.append(progress(scene.player))
    scene.move.ended.set()
    seen.append(progress(scene.player))
    scene.player.accesses.append(Access("unit1", Phase.FORWARD, 0))
    seen.append(progress(scene.player))
    scene.player.gate.open_to(1)
    seen.append(progress(scene.player))
    assert all(before != after for before, after in itertools.pairwise(seen))
    assert progress(scene.player) == seen[-1]


def test_report_says_what_each_queue_is_at_and_what_it_waits_for(scene: Scene) -> None:
    source, target = scene.queues
    moves = [source.submit(f"block{number}", 1, lambda: scene.move) for number in range(SHOWN_MAX + 2)]
    assert moves[-1].has_started(60)
    waiting = target.submit("unit1/weight", 1, lambda: None, requires=moves[:1], follows=moves[1:2])
    target.submit("unit2/weight", 1, lambda: None)
    while target.state().current is None:
        assert not waiting.has_started(0.001)
    thread = threading.Thread(target=scene.player.gate.wait_for, args=(2,), name="somebody")
    thread.start()
    while not scene.player.gate.wanted:
        assert not waiting.has_started(0.001)
    lines = re.sub(r"for \d+ s", "for N s", report(scene.player, 7.0)).splitlines()
    scene.player.gate.open_to(2)
    thread.join()
    flying = [f"    in flight: source block{number}, for N s" for number in range(SHOWN_MAX)]
    assert lines[: lines.index("") + 7 + SHOWN_MAX] == [
        "megatier: nothing has moved on for N s",
        "",
        QUEUES_TITLE,
        f"  source: idle, after {SHOWN_MAX + 2} items",
        *flying,
        "    in flight: 2 more",
        "  target: at unit1/weight (slot) for N s; 1 wait behind it",
        "    after source block0, for N s",
        "    behind source block1, for N s",
    ]
    assert "compute: 1 accesses begun, the last is unit0 (forward, group 0); 0 are over" in lines
    assert "  the gate: somebody waits for the end of access 2, unit1 (forward, group 0)" in lines
    assert "thread megatier-target:" in lines
    assert "thread megatier-source:" not in lines


# ---------------------------------------------------------------------- how it acts


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


def test_watch_between_passes_waits_for_ever(scene: Scene, tmp_path: Path) -> None:
    with Watchdog(tmp_path / "stall.txt", 0.02, 0.0) as watchdog:
        with watchdog.watch(scene.player):
            pass
        assert not threading.Event().wait(0.2)
    assert not list(tmp_path.iterdir())


def test_watch_of_pieces_begins_with_the_first_and_goes_on_while_others_follow(scene: Scene, tmp_path: Path) -> None:
    done = Tally()
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
