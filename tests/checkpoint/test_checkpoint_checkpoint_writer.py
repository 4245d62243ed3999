"""Checkpoints that are written while training goes on: their bits, the run's bits, who waits, and how both end."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crossed import some
from integer_runs import fail_moves
from small_commands import command, leftovers, metrics
from small_commands import outcome as outcome_of_run
from tiny_runs import PLACES, Outcome, Run, exactness_config, opened, outcome, random_groups

from megatier.checkpoint import checkpoint_writer, chunkfile
from megatier.checkpoint.checkpoint_writer import CheckpointWriter
from megatier.checkpoint.chunkfile import ChunkFiles, Staged
from megatier.checkpoint.restore import restore
from megatier.checkpoint.run_directory import checkpoints
from megatier.cli import main
from megatier.config.schema import TrainConfig
from megatier.engine.step import Engine, StepResult
from megatier.errors import MegatierError, StepAbandonedError, TransferError
from megatier.play.player import Player
from megatier.session.session import Session
from megatier.train import stop

SAVED_AFTER = 2
HANG_S = 60.0


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest units have three; of fewer elements, none of a bf16 plane would be a whole checksum chunk."""
    monkeypatch.setattr(checkpoint_writer, "RUN_ELEMENTS", 32768)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No chunk of a checkpoint is filled before this is set."""
    free, stage = threading.Event(), ChunkFiles.stage

    def wait_and_stage(self: ChunkFiles) -> Staged:
        assert free.wait(HANG_S)
        return stage(self)

    monkeypatch.setattr(ChunkFiles, "stage", wait_and_stage)
    yield free
    free.set()


def session_of(run: Run, folder: Path) -> AbstractContextManager[Session]:
    folder.mkdir(parents=True, exist_ok=True)
    return opened(
        exactness_config(run.model),
        folder,
        PLACES[run.place],
        run.train,
        numerics=run.numerics,
        device=run.device,
        compute_dtype=run.dtype,
        compile=run.compile,
    )


def step(session: Session, train: TrainConfig, number: int) -> StepResult:
    vocab = session.model.config.get_text_config().vocab_size
    return session.engine.train_step(number, 1e-2, random_groups(train, vocab, number))


def begin(session: Session, folder: Path, number: int) -> CheckpointWriter:
    session.player.drain()
    return CheckpointWriter(session, folder / "checkpoints", number, {"step": number})


def digest(path: Path) -> str:
    """Of every file of a checkpoint."""
    found = hashlib.blake2b()
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        found.update(str(file.relative_to(path)).encode() + file.read_bytes())
    return found.hexdigest()


def waits_for_checkpoint(session: Session) -> bool:
    """An update does."""
    current = [state.current for state in (queue.state() for queue in session.player.queues)]
    return any(other.queue == "checkpoint" for at in current if at is not None for other in at[0].follows)


def release_when_waited_for(session: Session, held: threading.Event) -> threading.Thread:
    def look() -> None:
        while not held.is_set():
            if waits_for_checkpoint(session):
                held.set()
            time.sleep(0.001)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    return thread


def gone_on(run: Run, folder: Path, held: threading.Event) -> tuple[Outcome, str]:
    """Five steps, and a checkpoint of the second that goes on once an update waits for it: both their bits."""
    with session_of(run, folder) as session:
        results = [step(session, run.train, number) for number in (1, SAVED_AFTER)]
        writer, is_deferred = begin(session, folder, SAVED_AFTER), session.optimizer.hyper.deferred
        if is_deferred:
            results.append(step(session, run.train, 3))
            assert not writer.is_over(), "a step in which no state changes waits for nothing"
        thread = release_when_waited_for(session, held)
        results += [step(session, run.train, number) for number in range(4 if is_deferred else 3, 6)]
        thread.join(HANG_S)
        assert not thread.is_alive(), "no update waited"
        return outcome(session, results), digest(writer.wait())


@pytest.fixture(scope="module")
def expected() -> dict[Run, tuple[Outcome, str]]:
    """Of runs in RAM that were met already."""
    return {}


def waited_for(run: Run, folder: Path) -> tuple[Outcome, str]:
    """Five steps without a checkpoint, and one of the second step that nothing went on beside."""
    with session_of(run, folder) as session:
        for number in (1, SAVED_AFTER):
            step(session, run.train, number)
        path = begin(session, folder, SAVED_AFTER).wait()
    return run(folder), digest(path)


UNTIED, KEPT, IMMEDIATE = Run(model="untied"), Run(model="untied", clip=1e9), Run(model="untied", clip=None)
RUNS = [
    *(replace(UNTIED, place=place) for place in PLACES),
    replace(KEPT, place="nvme_twice"),
    *(replace(IMMEDIATE, place=place) for place in ("gpu", "ram", "nvme", "gpu_ram_nvme")),
    Run(model="moe", groups=2, place="gpu_ram_nvme"),
    Run(model="tied", dtype="fp32", place="gpu_ram"),
]
ON_A_GPU = [pytest.param(replace(run, device="cuda", compile=False), marks=pytest.mark.gpu) for run in RUNS]


def name_of(run: Run) -> str:
    return f"{run.model}-{run.place}-{run.clip}-{run.groups}-{run.device}"


@pytest.mark.parametrize("run", [*some(RUNS, by=4, first=2), *ON_A_GPU], ids=name_of)
def test_checkpoint_written_beside_training_changes_no_bit_of_either(
    run: Run, tmp_path: Path, held: threading.Event, expected: dict[Run, tuple[Outcome, str]]
) -> None:
    alone = replace(run, place="ram")
    if alone not in expected:
        held.set()
        expected[alone] = waited_for(alone, tmp_path / "alone")
        held.clear()
    assert gone_on(run, tmp_path / "beside", held) == expected[alone]


def test_run_restored_from_a_checkpoint_written_beside_training_goes_on_to_the_same_bits(
    tmp_path: Path, held: threading.Event
) -> None:
    run = Run(model="untied", place="gpu_ram_nvme")
    with session_of(run, tmp_path / "before") as session:
        results = [step(session, run.train, number) for number in (1, SAVED_AFTER)]
        writer = begin(session, tmp_path, SAVED_AFTER)
        step(session, run.train, 3)
        thread = release_when_waited_for(session, held)
        step(session, run.train, 4)
        path = writer.wait()
        thread.join(HANG_S)
    with session_of(run, tmp_path / "after") as session:
        restore(session, path)
        results += [step(session, run.train, number) for number in range(3, 6)]
        found = outcome(session, results)
    assert found == run(tmp_path / "before")


# ---------------------------------------------------------------------- what ends it


def test_session_closed_while_a_checkpoint_is_written_leaves_nothing_of_it(
    tmp_path: Path, held: threading.Event
) -> None:
    with session_of(UNTIED, tmp_path / "drive") as session:
        step(session, UNTIED.train, 1)
        writer = begin(session, tmp_path, 1)
        step(session, UNTIED.train, 2)
        closing = threading.Thread(target=session.close)
        closing.start()
        while not session.reader.is_closed:
            time.sleep(0.001)
        held.set()
        closing.join(HANG_S)
        assert not closing.is_alive(), "close hangs"
    with pytest.raises(StepAbandonedError):
        writer.wait()
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("megatier-")]


@pytest.mark.parametrize("what", ["chunk", "block"])
def test_checkpoint_that_a_drive_fails_leaves_the_one_before_and_holds_up_nobody(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(model="untied", place="nvme")
    with session_of(run, tmp_path / "drive") as session:
        results = [step(session, run.train, 1)]
        first = begin(session, tmp_path, 1).wait()
        session.player.drain()
        with monkeypatch.context() as patch:
            if what == "chunk":
                patch.setattr(chunkfile, "create", lambda _: os.open("/dev/full", os.O_WRONLY))
            else:
                fail_moves(patch, "read", "lm_head", TransferError("read", "nvme", "/mnt/blocks", 0, errno.ENOSPC))
            writer = CheckpointWriter(session, tmp_path / "checkpoints", 2, {})
            with pytest.raises(TransferError) as caught:
                writer.wait()
        assert caught.value.errno == errno.ENOSPC
        assert list(first.parent.iterdir()) == [first]
        results.append(step(session, run.train, 2))
        session.player.drain()
        assert begin(session, tmp_path, 2).wait() == first.parent / "step-00000002"


# ---------------------------------------------------------------------- whole runs


EVERY: dict[str, Any] = {
    "train.steps": 5,
    "train.evaluate_every": 2,
    "output.checkpoint_every": 1,
    "output.keep_checkpoints": 5,
}
TIERS: list[dict[str, Any]] = [
    {"tiers.state": "gpu,ram,nvme", "tiers.gpu": "640KiB"},
    {"tiers.state": "nvme", "tiers.gpu": "512KiB", "tiers.generations": 2, "train.clip": 1e9},
    {"tiers.state": "ram", "tiers.gpu": "16MiB", "tiers.streamed_share": 0.7},
    {"tiers.state": "ram", "tiers.gpu": "512KiB", "tiers.generations": 2, "train.clip": 1e9},
    {"tiers.state": "nvme", "tiers.gpu": "512KiB", "train.clip": "null", "numerics.guard": False},
]


@pytest.mark.parametrize("tiers", some(TIERS, by=5), ids=str)
def test_train_with_a_checkpoint_of_every_step_has_the_bits_of_a_run_with_none(
    tiers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for every in (0, 1):
        folder = tmp_path / str(every)
        folder.mkdir()
        settings = {**EVERY, **tiers, "output.checkpoint_every": every, "tiers.nvme": f"{folder}:32MiB"}
        assert main(command(folder, settings)) == 0
        found.append(outcome_of_run(folder / "run"))
        slow_down(monkeypatch)
        output = capsys.readouterr().out
        assert len(re.findall(r"│ \w+ +│ +[\d,]+ │ +[\d,]+ │ +none │", output)) >= 4, "what moved is what was demanded"
    assert found[0] == found[1]
    told = [record for record in metrics(tmp_path / "1") if "checkpoint_bytes" in record]
    assert [record["step"] for record in told] == [1, 2, 3, 4, 5]
    assert all(record["checkpoint_pause_seconds"] > 0 < record["checkpoint_seconds"] for record in told)
    assert [path.name for path in checkpoints(tmp_path / "1" / "run" / "checkpoints")] == [
        f"step-{number:08d}" for number in range(1, 6)
    ]
    assert list(leftovers(tmp_path)) == []


def slow_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk takes a while."""
    write = ChunkFiles.write

    def wait_and_write(self: ChunkFiles, *words: Any) -> int:
        time.sleep(0.002)
        return write(self, *words)

    monkeypatch.setattr(ChunkFiles, "write", wait_and_write)


def test_train_whose_checkpoint_fails_ends_at_the_next_step_with_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, begun = CheckpointWriter._begin, list[int]()

    def begin_and_fail(self: CheckpointWriter) -> None:
        real(self)
        begun.append(self.step)
        if self.step == 2:
            raise OSError(errno.EIO, "Input/output error", str(tmp_path))

    monkeypatch.setattr(CheckpointWriter, "_begin", begin_and_fail)
    assert main(command(tmp_path, {**EVERY, "train.steps": 6})) == 2
    assert "writing a checkpoint failed in " in capsys.readouterr().err
    assert begun == [1, 2]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]
    assert [record["step"] for record in metrics(tmp_path) if "loss" in record][:2] == [1, 2]
    monkeypatch.undo()
    assert main(["resume", str(tmp_path / "run")]) == 0
    assert [record["step"] for record in metrics(tmp_path) if "loss" in record] == list(range(1, 7))


@pytest.fixture
def held_until_closed(held: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are filled again once the run closes."""
    close = Player.close

    def free_and_close(self: Player) -> None:
        threading.Timer(0.05, held.set).start()
        close(self)

    monkeypatch.setattr(Player, "close", free_and_close)


@pytest.mark.usefixtures("held_until_closed")
def test_train_that_fails_while_a_checkpoint_is_written_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Engine.train_step

    def train_step(self: Engine, number: int, *words: Any) -> StepResult:
        if number == 3:
            raise MegatierError("something else")
        return real(self, number, *words)

    monkeypatch.setattr(Engine, "train_step", train_step)
    assert main(command(tmp_path, {**EVERY, "output.checkpoint_every": 2})) == 2
    assert capsys.readouterr().err == "megatier: error: something else\n"
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    assert list(leftovers(tmp_path)) == []


@pytest.mark.usefixtures("held_until_closed")
def test_train_told_twice_to_stop_while_a_checkpoint_is_written_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = CheckpointWriter.wait

    def wait(self: CheckpointWriter) -> Path:
        os.kill(os.getpid(), signal.SIGINT)  # the first one lets the step end and begins the checkpoint
        return real(self)

    def train_step(self: Engine, number: int, *words: Any) -> StepResult:
        os.kill(os.getpid(), signal.SIGINT)
        return step_of(self, number, *words)

    step_of = Engine.train_step
    monkeypatch.setattr(stop, "REPEAT_S", 0.0)
    monkeypatch.setattr(Engine, "train_step", train_step)
    monkeypatch.setattr(CheckpointWriter, "wait", wait)
    with caught_interrupts():
        assert main(command(tmp_path, {**EVERY, "output.checkpoint_every": 0})) == 130
    assert [record["step"] for record in metrics(tmp_path) if "loss" in record] == [1]
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    assert list(leftovers(tmp_path)) == []


@contextmanager
def caught_interrupts() -> Iterator[None]:
    """SIGINT is Python's own, also where whoever started the tests ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_checksums_of_several_ranks_are_joined_in_the_order_of_chunks() -> None:
    found = checkpoint_writer._join_checksums([{"params/a": {2: 20, 0: 0}}, {"params/a": {1: 10}, "params/b": {0: 5}}])
    assert found == {"params/a": [0, 10, 20], "params/b": [5]}
