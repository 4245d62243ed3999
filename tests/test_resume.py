"""Runs that are killed go on bit by bit, wherever the kill hits and whatever the tiers are afterwards."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from crossed import some
from small_commands import command, metrics, outcome, write_chats
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from warm_python import WarmPython

from megatier.checkpoint.drive_space import DriveSpace
from megatier.checkpoint.run_directory import checkpoints, last_checkpoint
from megatier.cli import main
from megatier.engine.step import Engine

KILLED_RUNS = Path(__file__).parent / "support" / "killed_runs.py"
TIERS_OF_BAD_STEPS: list[dict[str, Any]] = [
    {"tiers.state": "gpu"},
    {"tiers.state": "ram", "tiers.gpu": "512KiB"},
    {"tiers.state": "ram", "tiers.gpu": "16MiB", "tiers.streamed_share": 0.7},
]


def check_killed_runs(python: WarmPython, folder: Path, seed: int, count: int, *words_of_runs: str) -> dict[str, Any]:
    """Kill runs at `count` places; every one goes on to the end of the run that nobody stopped."""
    sys.stdout.write(f"seed {seed}\n")
    done = python.run([KILLED_RUNS, folder, str(seed), str(count), *words_of_runs], timeout=60 + 30 * count)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    whole: dict[str, Any] = found["whole"]
    for run in found["runs"]:
        assert run["killed"] == -signal.SIGKILL, run
        assert run["resumed"] == 0, (run, done.stderr)
        assert not run["left"], "block files of the kill are taken over, or removed"
        assert {key: run[key] for key in whole} == whole, run
    assert len(found["runs"]) == count
    return whole


def test_run_killed_at_two_places_goes_on_to_the_same_bits(tmp_path: Path, python: WarmPython) -> None:
    whole = check_killed_runs(python, tmp_path, 20261121, 2)
    assert whole["checkpoints"] == ["step-00000004", "step-00000006"]


def test_run_with_savepoints_that_is_killed_goes_on_to_the_same_bits(tmp_path: Path, python: WarmPython) -> None:
    whole = check_killed_runs(python, tmp_path, 20261122, 1, "savepoints")
    assert whole["checkpoints"] == ["step-00000003", "step-00000006"]
    assert "savepoints" not in whole["run"]


@pytest.mark.slow
def test_run_with_adapters_that_is_killed_goes_on_to_the_same_bits(tmp_path: Path, python: WarmPython) -> None:
    pytest.importorskip("peft")
    whole = check_killed_runs(python, tmp_path, 20261125, 1, "adapters")
    assert whole["checkpoints"] == ["step-00000004", "step-00000006"]


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["savepoints"], ["adapters"]], ids=str)
def test_run_killed_at_two_hundred_places_goes_on_to_the_same_bits(
    words: list[str], tmp_path: Path, python: WarmPython
) -> None:
    check_killed_runs(python, tmp_path, 7, 200, *words)


# ---------------------------------------------------------------------- in this process


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[20] ^= 4
    path.write_bytes(raw)


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with a run whose last step and export are missing, as after a kill; and a copy of that folder."""
    folder, kept = (tmp_path_factory.mktemp("stopped") / name for name in ("folder", "kept"))
    folder.mkdir()
    settings = {"train.schedule": "constant", "output.checkpoint_every": 1, "output.keep_checkpoints": 9}
    assert main(command(folder, settings)) == 0
    shutil.rmtree(folder / "run" / "model")
    shutil.rmtree(folder / "run" / "checkpoints" / "step-00000003")
    shutil.copytree(folder, kept)
    return folder, kept


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The test's folder. That of the stopped run is put back as it was: a run goes on in its own place alone."""
    if "stopped" not in request.fixturenames:
        return tmp_path
    folder, kept = request.getfixturevalue("stopped_once")
    shutil.rmtree(folder)
    return Path(shutil.copytree(kept, folder))


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """The directory of the stopped run."""
    return tmp_path / "run"


def test_resume_that_is_refused_leaves_the_config_as_it_was(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (stopped / "config.yaml").read_text()
    assert main(["resume", str(stopped), "--tiers.gpu=10KiB"]) == 2
    assert main(["resume", str(stopped), "--train.steps=9"]) == 2
    assert "train.steps was 3 and is 9" in capsys.readouterr().err
    assert (stopped / "config.yaml").read_text() == before
    assert main(["resume", str(stopped), "--train.moments=bf16"]) == 2
    assert "train.moments was 'fp32' and is 'bf16'. Go on with what it was, or add" in capsys.readouterr().err
    assert main(["resume", str(stopped), "--train.optimizer=muon", "--accept-changes"]) == 2
    assert "train.optimizer was 'adamw' and is 'muon', whose state step" in capsys.readouterr().err
    words = ["--train.steps=4", "--train.moments=bf16", "--accept-changes"]
    assert main(["resume", str(stopped), *words]) == 0
    assert "steps: 4" in (stopped / "config.yaml").read_text()


def test_resume_after_changes_that_were_accepted_asks_for_them_no_second_time(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["resume", str(stopped), "--train.steps=4", "--accept-changes", "--output.checkpoint_every=0"]
    assert main(words) == 0
    assert main(["resume", str(stopped)]) == 2
    assert "holds a finished run" in capsys.readouterr().err
    assert main(["export", str(stopped), str(tmp_path / "older")]) == 0
    assert "the run went on to step 4, and this checkpoint is of step 2; " in capsys.readouterr().out
    log = stopped / "metrics.jsonl"
    records = log.read_bytes()
    log.write_bytes(b"no record\n" + records)  # of a damaged log nothing is known, and nothing else depends on it
    assert main(["export", str(stopped), str(tmp_path / "still")]) == 0
    whole = (stopped / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(stopped / "model")  # as after a kill
    assert main(["resume", str(stopped), "--train.steps=5"]) == 2
    assert "train.steps was 3 and is 5" in capsys.readouterr().err
    log.write_bytes(records)
    assert main(["resume", str(stopped)]) == 0
    assert (stopped / "model" / "model.safetensors").read_bytes() == whole
    assert main(["report", str(stopped)]) == 0
    assert "numbers changed, as accepted: train.steps was 3 and is 4." in (stopped / "report.html").read_text()


def test_resume_of_a_whole_run_is_refused_and_leaves_its_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path)) == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert main(["resume", str(tmp_path / "run")]) == 2
    assert main(["resume", str(tmp_path / "run"), "--train.steps=9", "--accept-changes"]) == 2
    assert "run holds a finished run: model is there" in capsys.readouterr().err
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_resume_of_a_whole_run_without_a_checkpoint_does_not_say_that_it_could_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command(tmp_path), "--output.checkpoint_every=0"]) == 0
    assert main(["resume", str(tmp_path / "run")]) == 2
    assert "It has no checkpoint to go on from" in capsys.readouterr().err


def test_resume_without_a_checkpoint_begins_again_and_says_so(
    stopped: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.rmtree(stopped / "checkpoints")
    assert main(["resume", str(stopped)]) == 0
    assert "There is no checkpoint yet, so the run begins again." in capsys.readouterr().out
    assert [record["step"] for record in metrics(tmp_path) if "loss" in record] == [1, 2, 3]


def test_resume_drops_damaged_lines_of_the_log_and_says_which(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = stopped / "metrics.jsonl", stopped / "report.html"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 3, "lo')
    assert main(["report", str(stopped)]) == 0
    assert "is cut, as a kill may leave it" in page.read_text()
    first, *rest = whole.splitlines(keepends=True)
    path.write_bytes(first + b"\0" * 9 + b"\n" + b"".join(rest) + b'{"step": 3, "lo')
    capsys.readouterr()
    assert main(["report", str(stopped)]) == 2
    assert "metrics.jsonl, line 2: this is no record of a run. Remove that line" in capsys.readouterr().err
    assert main(["resume", str(stopped)]) == 0
    text = capsys.readouterr().out
    for number in (2, whole.count(b"\n") + 2):
        assert (
            f"metrics.jsonl, line {number}: this is no record, perhaps because a kill cut it. It is dropped.\n" in text
        )
    assert [record["step"] for record in metrics(tmp_path) if "loss" in record] == [1, 2, 3]
    assert main(["report", str(stopped)]) == 0


def test_resume_on_other_text_is_refused_and_where_that_is_accepted_reads_it(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.txt").write_text("abc " * 2000)
    words = ["resume", str(stopped), f"--data.files={other}", "--data.holdout_fraction=0"]
    assert main(words) == 2
    assert "data.files was" in capsys.readouterr().err
    assert main([*words, "--accept-changes"]) == 0
    assert (stopped / "data" / "train.tokens").stat().st_size == 2 * (8000 + 1)


def test_resume_on_conversations_goes_on_bit_by_bit_and_refuses_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"data.files": write_chats(tmp_path), "output.checkpoint_every": 1, "output.keep_checkpoints": 9}
    assert main(command(tmp_path, settings)) == 0
    run, chats = tmp_path / "run", tmp_path / "chats.json"
    whole = outcome(run)
    for folder in ("model", "data", "checkpoints/step-00000002", "checkpoints/step-00000003"):
        shutil.rmtree(run / folder)
    before = chats.read_text()
    chats.write_text(before.replace('"gpt", "value": "so so "', '"gpt", "value": "no so "'))
    assert main(["resume", str(run)]) == 2
    assert "the text is not that of the checkpoint" in capsys.readouterr().err
    chats.write_text(before)
    shutil.rmtree(run / "data")
    assert main(["resume", str(run), "--tiers.state=ram", "--tiers.gpu=512KiB"]) == 0
    assert outcome(run) == whole


@pytest.mark.parametrize("chat", [pytest.param(None, marks=pytest.mark.slow), "messages"])
def test_resume_of_a_stream_goes_on_to_the_same_bits(tmp_path: Path, chat: str | None) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "rows").mkdir()
    for shard in range(2):
        rows = [
            {"text": f"{n * 7 % 31} and {n}", "messages": [{"role": "assistant", "content": f"{n} so " * (n % 3 + 1)}]}
            for n in range(shard, 80, 2)
        ]
        (tmp_path / "rows" / f"{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stream = {"data.files": None, "data.dataset": str(tmp_path / "rows"), "data.streaming": True, "data.chat": chat}
    settings = {**stream, "data.holdout_rows": 9, "data.window_rows": 16, "train.steps": 6}
    assert main(command(tmp_path, {**settings, "output.checkpoint_every": 1, "output.keep_checkpoints": 9})) == 0
    run = tmp_path / "run"
    whole = outcome(run)
    assert any("heldout_loss" in record for record in metrics(tmp_path))
    assert all("data" in record["stall_seconds"] for record in metrics(tmp_path) if "loss" in record)
    for last in (2, 4):
        shutil.rmtree(run / "model")
        for step in range(last + 1, 7):
            shutil.rmtree(run / "checkpoints" / f"step-{step:08}")
        assert main(["resume", str(run), "--tiers.state=ram", "--tiers.gpu=512KiB"]) == 0
        assert outcome(run) == whole


def test_resume_removes_half_a_checkpoint_before_it_asks_for_room(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = stopped / "checkpoints" / ".step-00000003.partial"
    half.mkdir()
    monkeypatch.setattr(DriveSpace, "check", lambda *_: None if not half.exists() else pytest.fail("no room"))
    assert main(["resume", str(stopped)]) == 0
    assert not half.exists()


@pytest.mark.parametrize(
    "name", some(["metrics.jsonl", "data/tokens.json", "data/holdout.tokens", "numbers.json"], by=2)
)
def test_resume_with_a_pipe_in_the_place_of_a_file_is_refused_by_name(
    name: str, stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(stopped / "checkpoints")
    (stopped / name).unlink()
    os.mkfifo(stopped / name)
    assert main(["resume", str(stopped)]) == 2
    assert f"{stopped / name}: it is no regular file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train.tokens", "holdout.tokens", "tokens.json"])
def test_resume_over_a_damaged_token_file_tokenises_again_to_the_same_bits(
    name: str, stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [record["heldout_loss"] for record in metrics(tmp_path) if "heldout_loss" in record]
    flip(stopped / "data" / name)
    assert main(["resume", str(stopped)]) == 0
    assert f"{stopped / 'data' / name} was damaged, so the text was tokenised again." in capsys.readouterr().out
    assert [record["heldout_loss"] for record in metrics(tmp_path) if "heldout_loss" in record] == before


@pytest.mark.parametrize("change", ["edited", "truncated", "removed", "added"])
def test_resume_over_changed_files_of_text_goes_on_with_the_tokens_of_the_start(
    change: str, stopped: Path, tmp_path: Path
) -> None:
    tokens = (stopped / "data" / "train.tokens").read_bytes()
    before = metrics(tmp_path)
    for path in (tmp_path / "texts").iterdir():
        if change == "edited":
            path.write_text(path.read_text().replace("words", "sword"))
        elif change == "truncated":
            os.truncate(path, 1)
        elif change == "removed":
            path.unlink()
        else:
            (path.parent / f"{path.stem}0.txt").write_text("one more")
    assert main(["resume", str(stopped)]) == 0
    assert (stopped / "data" / "train.tokens").read_bytes() == tokens
    found = {record["step"]: record["loss"] for record in metrics(tmp_path) if "loss" in record}
    assert all(found[record["step"]] == record["loss"] for record in before if "loss" in record)


@pytest.mark.parametrize("there", ["link", "file"])
def test_resume_whose_checkpoints_cannot_be_seen_is_refused_and_keeps_its_records(
    there: str, stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a drive that is not mounted: the run would begin again, and drop what it knows of its steps."""
    before = (stopped / "metrics.jsonl").read_bytes()
    folder = stopped / "checkpoints"
    folder.rename(tmp_path / "drive")
    if there == "link":
        folder.symlink_to(tmp_path / "drive")
        (tmp_path / "drive").rename(tmp_path / "gone")
    else:
        folder.touch()
    assert main(["resume", str(stopped)]) == 2
    what = f"a link to {tmp_path}/drive, which is not there" if there == "link" else "no folder"
    assert f"{folder} is {what}. Bring back what was there" in capsys.readouterr().err
    assert (stopped / "metrics.jsonl").read_bytes() == before


def test_resume_in_another_directory_is_refused(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", str(stopped), f"--output.directory={stopped.parent}/other"]) == 2
    assert f"--output.directory: a run goes on in its own directory, {stopped}." in capsys.readouterr().err


def test_resume_without_tokens_and_text_names_what_is_missing(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (stopped / "data" / "train.tokens").unlink()
    texts = tmp_path / "texts"
    texts.rename(tmp_path / "away")
    assert main(["resume", str(stopped)]) == 2
    assert f"data.files: {texts} matches no file or folder." in capsys.readouterr().err
    (tmp_path / "away").rename(texts)
    (texts / "10.txt").write_text("one more shard " * 99)
    assert main(["resume", str(stopped)]) == 2
    assert "the text is not that of the checkpoint" in capsys.readouterr().err


def test_resume_over_a_damaged_hold_out_whose_text_has_changed_is_refused(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(stopped / "data" / "holdout.tokens")
    held_out = (stopped / "data" / "holdout.tokens").read_bytes()
    for path in (tmp_path / "texts").iterdir():
        path.write_text(path.read_text().replace("words", "sword"))
    assert main(["resume", str(stopped)]) == 2
    assert "the text is not that of the checkpoint" in capsys.readouterr().err
    assert (stopped / "data" / "holdout.tokens").read_bytes() != held_out


@pytest.mark.parametrize("name", ["config.yaml", pytest.param("numbers.json", marks=pytest.mark.slow)])
def test_resume_without_a_checkpoint_on_other_numbers_is_refused_unless_accepted(
    name: str, stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(stopped / "checkpoints")
    path = stopped / name
    text = path.read_text()
    seed = re.search(r"train:.*?seed\W+(\d+)", text, re.DOTALL) or re.search(r"train.seed\W+(\d+)", text)
    assert seed is not None
    path.write_text(f"{text[: seed.start(1)]}7{text[seed.end(1) :]}")
    assert main(["resume", str(stopped)]) == 2
    words = "train.seed was 0 and is 7" if name == "config.yaml" else "numbers.json is damaged"
    assert f"these are not the numbers that {stopped} began with: {words}." in capsys.readouterr().err
    assert main(["resume", str(stopped), "--accept-changes", "--output.export=false"]) == 0
    shutil.rmtree(stopped / "checkpoints")
    assert main(["resume", str(stopped)]) == 0, "what was accepted is what the run began with"


def test_resume_of_a_run_of_an_older_version_without_a_checkpoint_begins_again(stopped: Path) -> None:
    shutil.rmtree(stopped / "checkpoints")
    (stopped / "numbers.json").unlink()
    assert main(["resume", str(stopped)]) == 0


@pytest.mark.parametrize("tiers", some(TIERS_OF_BAD_STEPS, by=2, first=1), ids=str)
def test_run_that_ends_on_bad_steps_goes_on_behind_them(
    tiers: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"train.schedule": "constant", "output.checkpoint_every": 1, "output.keep_checkpoints": 1}
    words = command(tmp_path, {**settings, **tiers, "train.steps": 6, "numerics.max_skips": 0})
    folder = tmp_path / "run" / "checkpoints"
    with pytest.MonkeyPatch.context() as patch:
        spoil_outputs(patch, {3})
        assert main(words) == 2
        assert "of step 3 is not finite" in capsys.readouterr().err
        assert [path.name for path in checkpoints(folder)] == ["step-00000003"], "with the weights of step 2"
    with pytest.MonkeyPatch.context() as patch:
        spoil_outputs(patch, {1})
        assert main(["resume", str(tmp_path / "run")]) == 2
        assert "of step 4 is not finite" in capsys.readouterr().err
        assert last_checkpoint(folder) == folder / "step-00000004"
    assert main(["resume", str(tmp_path / "run")]) == 0
    assert [record["step"] for record in metrics(tmp_path) if "loss" in record] == [1, 2, 5, 6]


def spoil_outputs(patch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """In these training steps, and until the run ends, the first norm makes NaN."""
    real, begun = Engine.train_step, itertools.count(1)
    norm, is_bad = LlamaRMSNorm.forward, [False]

    def train_step(self: Engine, *args: Any) -> Any:
        is_bad[0] = next(begun) in steps
        return real(self, *args)

    def forward(self: LlamaRMSNorm, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = norm(self, hidden)
        return found * float("nan") if is_bad[0] else found

    patch.setattr(Engine, "train_step", train_step)
    patch.setattr(LlamaRMSNorm, "forward", forward)
