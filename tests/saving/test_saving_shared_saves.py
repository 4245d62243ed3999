"""`megatier train` on several ranks: its checkpoints, and how a run goes on after one rank or all have failed."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from crossed import some
from rank_pool import POOL
from ranked_runs import figures, sizes, train_in, write_run
from rich.console import Console
from small_commands import after_step, files_of

from megatier.checkpoint import chunkfile
from megatier.checkpoint.checkpoint_clock import CheckpointClock
from megatier.checkpoint.plane_writer import PlaneWriter
from megatier.config.schema import RunConfig
from megatier.errors import CapacityError, ExportError, MegatierError, TransferError
from megatier.report import metrics
from megatier.saving import end_export
from megatier.saving.saves import Saves, Say
from megatier.session.session import Session
from megatier.train import trainer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path)


FULL = TransferError("writing", "disk", "/mnt/a", 8, errno.ENOSPC)
SAVES = ("--train.groups=4", "--train.steps=4", "--output.checkpoint_every=1", "--output.keep_checkpoints=3")


@sizes
def test_checkpoints_of_a_run_on_ranks_are_those_of_one_process(shared: int, folder: Path) -> None:
    for size in (1, shared):
        (folder / str(size)).mkdir()
        for name in ("run.yaml", "text.txt"):
            shutil.copy(folder / name, folder / str(size) / name)
        POOL.run(train_in, size, folder / str(size), SAVES)

    expected = files_of(folder / "1/run/checkpoints")
    assert {name.split("/")[0] for name in expected} == {f"step-{step:08d}" for step in (2, 3, 4)}
    found = files_of(folder / f"{shared}/run/checkpoints")
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []


@pytest.mark.parametrize(("before", "after"), some([(2, 1), (4, 2)], by=2))
def test_run_on_ranks_goes_on_from_its_checkpoint_with_another_number_of_ranks(
    before: int, after: int, folder: Path
) -> None:
    POOL.run(train_in, before, folder, SAVES)
    run = folder / "run"
    model = (run / "model/model.safetensors").read_bytes()
    losses = figures(run)
    shutil.rmtree(run / "model")
    for step in (3, 4):
        shutil.rmtree(run / f"checkpoints/step-{step:08d}")
    POOL.run(train_in, after, folder, (), True)
    assert (run / "model/model.safetensors").read_bytes() == model
    assert figures(run) == losses


def train_apart(folder: Path) -> None:
    """Run a config in a directory that each rank has for itself."""
    own = folder / os.environ["RANK"]
    own.mkdir()
    for name in ("run.yaml", "text.txt"):
        shutil.copy(folder / name, own / name)
    train_in(own)


def test_rank_that_sees_another_run_directory_is_refused(folder: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1 does not see the run that the first rank has in run"):
        POOL.run(train_apart, 2, folder)
    assert not (folder / "0/run").exists()


def train_by_time(folder: Path, full: int | None) -> None:
    """Run with checkpoints by a clock that only the first rank has; the drive of one rank may be full."""
    rank = int(os.environ["RANK"])
    is_first = rank == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointClock, "is_due", lambda _: is_first)
        patch.setattr(CheckpointClock, "is_long", lambda _: is_first)
        if rank == full == 0:
            patch.setattr(chunkfile, "create", lambda _: os.open("/dev/full", os.O_WRONLY))
        elif rank == full:  # which has no chunk of so small a model
            patch.setattr(PlaneWriter, "write", refuse)
        train_in(folder, ("--output.checkpoint_every=auto", "--output.export=false"))


@pytest.mark.parametrize("full", [None, 0, 1])
def test_checkpoint_by_time_is_made_or_left_out_by_all_ranks_alike(full: int | None, folder: Path) -> None:
    POOL.run(train_by_time, 2, folder, full)
    checkpoints = [path.name for path in (folder / "run/checkpoints").iterdir()]
    assert ("step-00000003" in checkpoints) is (full is None)
    assert full is None or checkpoints == []


def refuse(*_: object) -> None:
    raise FULL


def train_with_a_checkpoint_that_fails(folder: Path, what: str) -> tuple[str, str]:
    """Train on this rank, with a checkpoint that the second one alone cannot save; return the error with its kind."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(MegatierError) as refused:
        if os.environ["RANK"] == "1":
            patch.setattr(f"megatier.checkpoint.{what}", refuse)
        train_in(folder, ("--output.checkpoint_every=1",))
    return type(refused.value).__name__, str(refused.value)


@pytest.mark.parametrize("what", ["plane_writer.PlaneWriter.write", "checkpoint_writer.sync_tree"])
def test_checkpoint_that_one_rank_alone_cannot_save_ends_all_with_the_cause(what: str, folder: Path) -> None:
    found = POOL.run(train_with_a_checkpoint_that_fails, 2, folder, what)

    # A run that fails leaves its process groups to the end of the process.
    POOL.close()
    assert found == [("TransferError", str(FULL))] * 2
    assert list((folder / "run/checkpoints").iterdir()) == []


def train_on_a_full_drive(folder: Path) -> str:
    """Train on this rank, where no record of a step after the first can be written; return what ends it."""

    def fill() -> None:
        patch.setattr(metrics, "refusing", refuse)

    with after_step(1, fill), pytest.MonkeyPatch.context() as patch:
        try:
            train_in(folder, ("--train.steps=4",))
        except MegatierError as error:
            return str(error)
    return ""


def test_record_that_the_first_rank_cannot_write_ends_all_with_a_checkpoint(folder: Path) -> None:
    first, _ = POOL.run(train_on_a_full_drive, 2, folder)
    POOL.close()
    assert first == str(FULL)
    assert [path.name for path in (folder / "run/checkpoints").iterdir()] == ["step-00000002"]
    POOL.run(train_in, 2, folder, (), True)
    assert (folder / "run/model/model.safetensors").is_file()


def train_with_an_export_that_fails(folder: Path, place: str) -> str:
    """Train on this rank. The first rank cannot write, or the second one's last update fails; return the error."""
    is_second = os.environ["RANK"] == "1"
    before = end_export.export_at_end

    def end(console: Console, config: RunConfig, session: Session, *others: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:

            def fail(*_: object) -> None:
                patch.undo()
                raise CapacityError("the export", 2, 1, "Free space.")

            if place == "write":
                patch.setattr(end_export, "write_model", fail)
            elif is_second:
                patch.setattr(session.player, "drain", fail)
            before(console, config, session, *others)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ExportError) as refused:
        patch.setattr(trainer, "export_at_end", end)
        train_in(folder)
    return str(refused.value)


@pytest.mark.parametrize("place", ["write", "drain"])
def test_export_that_fails_on_one_rank_ends_all_with_a_checkpoint(place: str, folder: Path) -> None:
    first, second = POOL.run(train_with_an_export_that_fails, 2, folder, place)

    # A run that fails leaves its process groups to the end of the process.
    POOL.close()
    assert first == second
    assert "Free space." in first
    assert [path.name for path in (folder / "run" / "checkpoints").iterdir()] == ["step-00000003"]


# ---------------------------------------------------------------------- started again by torchrun

EACH_STEP = ("--output.checkpoint_every=1", "--train.steps=4")


def fail_after(step: int, folder: Path, words: tuple[str, ...]) -> None:
    """Run the config of a folder, and break off on all ranks before a step is saved, when the one before is."""
    with pytest.MonkeyPatch.context() as patch:
        real = Saves.save_after

        def after(self: Saves, now: int, say: Say, **options: Any) -> None:
            if now == step:
                self.finish_checkpoint(say)
                raise ZeroDivisionError
            real(self, now, say, **options)

        patch.setattr(Saves, "save_after", after)
        with pytest.raises(ZeroDivisionError):
            train_in(folder, words)


def train_again(folder: Path, words: tuple[str, ...], failures: tuple[int, ...]) -> str:
    """Run the config of a folder as torchrun does when a rank has failed so often, as its host has seen it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_RESTART_COUNT", str(failures[int(os.environ["RANK"])]))
        return train_in(folder, words)


@pytest.mark.parametrize(("failed_at", "size", "failures"), some([(1, 2, (0, 2)), (3, 2, (1, 1)), (3, 1, (1,))], by=3))
def test_run_that_torchrun_starts_again_goes_on_to_the_same_bits(
    failed_at: int, size: int, failures: tuple[int, ...], folder: Path
) -> None:
    # Nobody gives train.groups, so it is the number of ranks that began the run.
    POOL.run(fail_after, 2, failed_at, folder, EACH_STEP)
    POOL.close()
    said = POOL.run(train_again, size, folder, EACH_STEP, failures)[0]
    begins = "There is no checkpoint yet, so the run begins again."
    assert (begins if failed_at == 1 else "step-00000002: weights and moments in place") in said

    POOL.run(train_in, 1, folder, (*EACH_STEP, "--train.groups=2", "--output.directory=alone"))
    assert figures(folder / "run") == figures(folder / "alone")
    for name in ("run", "alone"):
        assert (folder / name / "model/model.safetensors").is_file()
    model = "model/model.safetensors"
    assert (folder / "run" / model).read_bytes() == (folder / "alone" / model).read_bytes()


def test_run_that_failed_before_it_began_is_begun_when_torchrun_starts_it_again(folder: Path) -> None:
    POOL.run(train_again, 2, folder, (), (1, 1))
    assert (folder / "run/model/model.safetensors").is_file()


def test_restart_does_not_go_on_with_a_run_of_other_numbers(folder: Path) -> None:
    POOL.run(fail_after, 2, 3, folder, EACH_STEP)
    POOL.close()
    before = files_of(folder / "run")
    with pytest.raises(AssertionError, match=r"numbers of this run would change .*: train\.seed was 0 and is 7"):
        POOL.run(train_again, 2, folder, (*EACH_STEP, "--train.seed=7"), (1, 1))
    assert files_of(folder / "run") == before
