"""Checkpoints by time, and runs whose export fails: whole runs, with the test's clock and the test's drive."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crossed import crossed, some
from small_commands import after_step, command, metrics, outcome

from megatier.adapters import adapter_folder
from megatier.checkpoint import chunkfile
from megatier.checkpoint.checkpoint_clock import CheckpointClock
from megatier.checkpoint.checkpoint_writer import CheckpointWriter
from megatier.checkpoint.drive_space import DriveSpace
from megatier.cli import main
from megatier.config.output_section import OutputConfig
from megatier.errors import StallError
from megatier.models import export
from megatier.play.player import Player
from megatier.ranks.channel import SingleRank
from megatier.saving import save_plan, saves
from megatier.saving.save_plan import SavePlan

SIX: dict[str, Any] = {"train.steps": 6}
DUE = (2, 4)
"""Steps behind which the clock has gone on for long; behind the others for a second."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Losses and weights of a run that saves nothing."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(command(folder, {**SIX, "output.checkpoint_every": 0})) == 0
    return outcome(folder / "run")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes on by steps alone; a checkpoint is whole when the loop asks for it first."""
    now = [0.0]
    real = CheckpointClock.note_step

    def step(self: CheckpointClock, seconds: float, *, is_beside: bool) -> None:
        now.append(now[-1] + (1e6 if len(now) in DUE else 1.0))
        real(self, seconds, is_beside=is_beside)

    def is_over(self: CheckpointWriter) -> bool:
        with contextlib.suppress(Exception):
            self.wait()
        return True

    monkeypatch.setattr(CheckpointClock, "note_step", step)
    monkeypatch.setattr(save_plan, "CheckpointClock", functools.partial(CheckpointClock, clock=lambda: now[-1]))
    monkeypatch.setattr(CheckpointWriter, "is_over", is_over)


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "run" / "checkpoints").glob("step-*"))


def free_bytes(patch: pytest.MonkeyPatch, folder: Path, free: int) -> None:
    usage = shutil.disk_usage(folder)
    patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))


# ---------------------------------------------------------------------- by time


@pytest.mark.parametrize(
    "tiers",
    some(
        [
            {},
            {"tiers.state": "nvme", "tiers.generations": 2},
            {"numerics.guard": False, "train.clip": "null", "tiers.state": "ram"},
        ],
        by=2,
        first=1,
    ),
    ids=["gpu", "speculative", "immediate"],
)
@pytest.mark.usefixtures("clock")
def test_checkpoints_by_time_change_no_bit(tiers: dict[str, Any], tmp_path: Path) -> None:
    settings = {**SIX, **tiers, "tiers.nvme": f"{tmp_path}:32MiB"}
    assert main(command(tmp_path, {**settings, "output.checkpoint_every": 0})) == 0
    expected = outcome(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    assert main(command(tmp_path, settings)) == 0
    assert saved_steps(tmp_path) == list(DUE)
    assert outcome(tmp_path / "run") == expected
    assert [record["step"] for record in metrics(tmp_path) if "checkpoint_bytes" in record] == list(DUE)


@pytest.mark.usefixtures("clock")
def test_run_that_ends_by_an_error_goes_on_from_a_checkpoint_that_nobody_asked_for(
    tmp_path: Path, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def harm() -> None:
        (tmp_path / "run" / "data").rename(tmp_path / "away")

    with after_step(5, harm):
        assert main(command(tmp_path, SIX)) == 2
    (tmp_path / "away").rename(tmp_path / "run" / "data")
    assert main(["resume", str(tmp_path / "run")]) == 0
    assert "step-00000004: weights and moments in place" in capsys.readouterr().out
    assert outcome(tmp_path / "run") == whole


def test_short_run_writes_no_checkpoint_and_says_what_a_long_one_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path)) == 0
    assert not (tmp_path / "run" / "checkpoints").exists()
    words = (
        r"A checkpoint \(.* KiB\) is written after about 5 minutes, then about every 30 minutes, for 2 % of the run's "
        r"time at most\. The last 2 are kept\. output\.checkpoint_every: 0 turns this off\.\n"
    )
    assert re.search(words, capsys.readouterr().out)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    "more", [{"output.checkpoint_every": 0}, {"output.savepoint_every": 4, "tiers.generations": 2}], ids=str
)
def test_run_told_otherwise_writes_no_checkpoint_by_time(
    more: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path, {**SIX, **more, "tiers.nvme": f"{tmp_path}:32MiB"})) == 0
    assert saved_steps(tmp_path) == []
    assert "turns that off" not in capsys.readouterr().out


@pytest.mark.usefixtures("clock")
def test_long_run_without_an_export_ends_with_a_checkpoint(tmp_path: Path) -> None:
    assert main(command(tmp_path, {**SIX, "output.export": False})) == 0
    assert saved_steps(tmp_path) == [4, 6]


@pytest.mark.usefixtures("clock")
def test_run_on_a_drive_without_room_for_checkpoints_says_so_and_writes_none(
    tmp_path: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free_bytes(monkeypatch, tmp_path, 1 << 20)  # of a checkpoint, 567 KiB, it takes one
    assert main(command(tmp_path, SIX)) == 0
    found = capsys.readouterr().out
    words = r"No checkpoint is written: \S+ has 1\.0 MiB free, and two of them and the export take 1\.1 MiB\. A"
    assert re.search(words, found)
    assert saved_steps(tmp_path) == []
    assert outcome(tmp_path / "run") == whole


@pytest.mark.usefixtures("clock")
def test_run_on_a_drive_with_room_for_two_checkpoints_keeps_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free_bytes(monkeypatch, tmp_path, 3 << 19)
    assert main(command(tmp_path, SIX)) == 0
    assert "The last one is kept" in capsys.readouterr().out
    assert saved_steps(tmp_path) == [4]


@pytest.mark.usefixtures("clock")
def test_run_whose_drive_has_no_room_when_a_checkpoint_is_due_goes_on_and_tries_again(
    tmp_path: Path, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        after_step(1, lambda: free_bytes(patch, tmp_path, 1000)),
        after_step(3, patch.undo),
    ):
        assert main(command(tmp_path, SIX)) == 0
    words = r"step 2: no checkpoint: \S+ takes 56\d\.\d KiB and has 1000 B free; tried again later"
    assert re.search(words, capsys.readouterr().out)
    assert saved_steps(tmp_path) == [4]
    assert outcome(tmp_path / "run") == whole


@pytest.mark.usefixtures("clock")
def test_run_whose_drive_fills_up_while_a_checkpoint_by_time_is_written_goes_on_and_tries_again(
    tmp_path: Path, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    found_no_room = threading.Event()

    def create(_: object) -> int:
        found_no_room.set()
        return os.open("/dev/full", os.O_WRONLY)

    def mend() -> None:
        # The checkpoint is written beside the steps, and may come to its first file late.
        assert found_no_room.wait(60)
        patch.undo()

    with (
        pytest.MonkeyPatch.context() as patch,
        after_step(1, lambda: patch.setattr(chunkfile, "create", create)),
        after_step(3, mend),
    ):
        assert main(command(tmp_path, SIX)) == 0
    assert re.search(r"step 2: no checkpoint, tried again later: .*No space left", capsys.readouterr().out)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]
    assert outcome(tmp_path / "run") == whole


@pytest.mark.usefixtures("clock")
def test_drive_that_fails_while_a_checkpoint_by_time_is_written_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: Path) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(chunkfile, "create", refuse)
    assert main(command(tmp_path, SIX)) == 2
    assert "Check the drive" in capsys.readouterr().err


def test_best_checkpoint_begins_when_the_cost_of_the_one_on_its_way_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowed: list[int] = []
    real = CheckpointClock.note_end

    def end(self: CheckpointClock, waited_s: float, written_s: float) -> None:
        slowed.append(len(self._beside))
        real(self, waited_s, written_s)

    monkeypatch.setattr(CheckpointClock, "note_end", end)
    monkeypatch.setattr(CheckpointWriter, "is_over", lambda _: False)
    settings = {"train.evaluate_every": 1, "output.load_best_model_at_end": True, "output.export": False}
    assert main(command(tmp_path, settings)) == 0

    # Each evaluation is the best so far, so a checkpoint begins after each step, and the last one has none beside it.
    assert [record["best_step"] for record in metrics(tmp_path) if "heldout_loss" in record] == [1, 2, 3]
    assert slowed == [1, 1, 0]


def test_promise_of_a_dear_checkpoint_waits_for_longer(tmp_path: Path) -> None:
    space = DriveSpace(tmp_path, 96 << 30, 16 << 30)
    found = SavePlan(output=OutputConfig(), space=space, num_kept=2, cost_s=90.0, is_done=False).describe_clock()
    assert found is not None
    assert found.startswith("A checkpoint (96.0 GiB) is written after about 75 minutes, then about every 75 minutes,")


# ---------------------------------------------------------------------- the export


def test_run_whose_export_has_no_room_is_refused_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free_bytes(monkeypatch, tmp_path, 90_000)
    assert main(command(tmp_path)) == 2
    words = r"no room for the export in \S+/run: needs 9\d\.\d KiB, 87\.9 KiB free\. Free space there, or name another"
    found = capsys.readouterr()
    assert re.search(words, found.err), found.err
    assert "step 1" not in found.out
    assert not (tmp_path / "run").exists()
    monkeypatch.undo()
    assert main(command(tmp_path)) == 0


@contextlib.contextmanager
def failing_export(code: int = errno.ENOSPC) -> Iterator[None]:
    """A drive that fails when all but the last files are written."""

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code), "/some/path")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "_write_settings", refuse)
        yield


@pytest.mark.parametrize(("code", "every"), crossed([errno.ENOSPC, errno.EIO], ["auto", 0], by=2))
def test_run_whose_export_fails_ends_with_a_checkpoint_from_which_it_is_written(
    every: object, code: int, tmp_path: Path, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with failing_export(code):
        assert main(command(tmp_path, {**SIX, "output.checkpoint_every": every})) == 2
    found = capsys.readouterr().err
    assert re.search(rf"all 6 steps are done, and the model could not be written: .*: {os.strerror(code)}\.", found)
    kept = run / "checkpoints" / "step-00000006"
    assert f"They are kept in {kept}: `megatier resume {run}` writes the model once that is mended, " in found
    assert f"`megatier export {run} FOLDER` writes it elsewhere." in found
    assert not (run / "model").exists()
    assert main(["export", str(run), str(tmp_path / "elsewhere")]) == 0
    assert main(["resume", str(run)]) == 0
    assert outcome(run) == whole
    weights = [(path / "model.safetensors").read_bytes() for path in (run / "model", tmp_path / "elsewhere")]
    assert weights[0] == weights[1]


def test_run_whose_tokenizer_cannot_be_written_keeps_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokenizers library has no error of its own: it raises Exception."""

    def refuse(*_: object) -> None:
        raise Exception("No space left on device (os error 28)")  # noqa: TRY002

    with monkeypatch.context() as patch:
        patch.setattr(export, "_write_settings", refuse)
        assert main(command(tmp_path, {**SIX, "output.checkpoint_every": 0})) == 2
    found = capsys.readouterr().err
    assert "all 6 steps are done, and the model could not be written: Exception: No space left on device" in found
    assert saved_steps(tmp_path) == [6]
    assert main(["resume", str(tmp_path / "run")]) == 0


def test_run_whose_export_fails_behind_its_last_checkpoint_writes_no_other_and_then_needs_room_for_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with failing_export():
        assert main(command(tmp_path, {**SIX, "output.checkpoint_every": 3})) == 2
    found = capsys.readouterr()
    assert found.out.count("step 6: checkpoint written") == 1
    assert "step-00000006: `megatier resume" in found.err
    assert saved_steps(tmp_path) == [3, 6]
    free_bytes(monkeypatch, tmp_path, 90_000)
    assert main(["resume", str(tmp_path / "run")]) == 2
    assert "the export in" in capsys.readouterr().err
    free_bytes(monkeypatch, tmp_path, 200_000)
    assert main(["resume", str(tmp_path / "run")]) == 0


@pytest.mark.usefixtures("clock")
def test_run_whose_export_fails_without_room_lets_an_older_checkpoint_go_first(
    tmp_path: Path, whole: dict[str, Any]
) -> None:
    with pytest.MonkeyPatch.context() as patch, failing_export():
        real, usage, folder = (
            adapter_folder.export_trained,
            shutil.disk_usage(tmp_path),
            tmp_path / "run" / "checkpoints",
        )

        def room(_: Path) -> Any:
            """It comes with the checkpoint that goes."""
            return usage._replace(free=600 << 10 if len(list(folder.iterdir())) < 2 else 99)

        def fill(*args: Any) -> None:
            patch.setattr(shutil, "disk_usage", room)
            real(*args)

        patch.setattr("megatier.saving.model_folder.export_trained", fill)
        assert main(command(tmp_path, SIX)) == 2
    assert saved_steps(tmp_path) == [4, 6]
    assert main(["resume", str(tmp_path / "run")]) == 0
    assert outcome(tmp_path / "run") == whole


def test_run_whose_export_fails_and_that_cannot_be_saved_says_from_where_it_goes_on(
    tmp_path: Path, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch, failing_export():
        patch.setattr(chunkfile, "create", lambda _: os.open("/dev/full", os.O_WRONLY))
        assert main(command(tmp_path, SIX)) == 2
    found = capsys.readouterr()
    assert re.search(r"step 6: no checkpoint: .*No space left", found.out)
    assert f"Nothing more could be saved; `megatier resume {tmp_path / 'run'}` goes on from its start." in found.err
    assert main(["resume", str(tmp_path / "run")]) == 0
    assert outcome(tmp_path / "run") == whole


SAVEPOINTS: dict[str, Any] = {**SIX, "output.savepoint_every": 4, "tiers.generations": 2, "tiers.state": "nvme"}


@pytest.mark.parametrize("has_room", [True, False], ids=["for a savepoint", "for nothing"])
def test_run_with_savepoints_whose_export_fails_keeps_one_and_its_block_files(
    has_room: bool, tmp_path: Path, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    drive, run = tmp_path / "drive", tmp_path / "run"
    drive.mkdir()
    with pytest.MonkeyPatch.context() as patch, failing_export():
        patch.setattr(CheckpointWriter, "_begin", refuse_for_room)

        def harm() -> None:
            if not has_room:
                patch.setattr(saves, "save_savepoint", refuse_for_room)

        with after_step(5, harm):
            assert main(command(tmp_path, {**SAVEPOINTS, "tiers.nvme": f"{drive}:64MiB"})) == 2
    found = capsys.readouterr()
    assert "step 6: no checkpoint: " in found.out
    step = 6 if has_room else 4
    assert [path.name for path in (run / "savepoints").iterdir()] == [f"step-{step:08d}"]
    assert len(list(drive.glob("megatier-*/blocks"))) == 1
    words = "writes the model once that is mended." if has_room else "goes on from step 4."
    assert words in found.err
    assert main(["resume", str(run)]) == 0
    assert outcome(run) == whole
    assert not list(drive.iterdir())


def test_run_whose_export_fails_and_whose_checkpoint_hangs_tries_no_savepoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hang(_: CheckpointWriter) -> Path:
        raise StallError(9.0, "stall.txt")

    def harm() -> None:
        monkeypatch.setattr(CheckpointWriter, "wait", hang)

    with failing_export(), after_step(5, harm):
        assert main(command(tmp_path, {**SAVEPOINTS, "tiers.nvme": f"{tmp_path}:64MiB"})) == 2
    found = capsys.readouterr()
    assert str(StallError(9.0, "stall.txt")) in " ".join(found.err.split())
    assert "no checkpoint" not in found.out
    assert [path.name for path in (tmp_path / "run" / "savepoints").iterdir()] == ["step-00000004"]


def test_save_that_one_rank_cannot_begin_fails_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank stands for all here: what may fail alone is inside of `failing_together`."""
    inside = [0]
    drained: list[int] = []
    real = Player.drain

    @contextlib.contextmanager
    def failing_together(_: SingleRank) -> Iterator[None]:
        inside[0] += 1
        yield
        inside[0] -= 1

    def drain(self: Player) -> None:
        drained.append(inside[0])
        real(self)

    monkeypatch.setattr(SingleRank, "failing_together", failing_together)
    monkeypatch.setattr(Player, "drain", drain)
    settings = {**SAVEPOINTS, "output.checkpoint_every": 3, "output.export": False, "train.evaluate_every": 0}
    assert main(command(tmp_path, {**settings, "data.holdout_fraction": 0, "tiers.nvme": f"{tmp_path}:64MiB"})) == 0

    # Two checkpoints and a savepoint; the others are the evaluation's at the end, and that of closing.
    assert drained.count(1) >= 3
    assert (tmp_path / "run" / "checkpoints" / "step-00000003").is_dir()


def refuse_for_room(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/some/path")
