"""`megatier train` on several ranks: one directory, one text, one model, and the bytes of one process."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from rank_pool import POOL
from rich.console import Console

from megatier.checkpoint import chunkfile
from megatier.checkpoint.pace import Pace
from megatier.config import file
from megatier.train.loop import Loop
from megatier.train.trainer import train

CONFIG = """
model:
  config:
    model_type: llama
    vocab_size: 320
    hidden_size: 32
    intermediate_size: 48
    num_hidden_layers: 2
    num_attention_heads: 2
    num_key_value_heads: 1
    max_position_embeddings: 64
    bos_token_id: 256
    eos_token_id: 256
    tie_word_embeddings: false
data: {files: [text.txt], tokenizer: bytes, sequence_length: 32, holdout_fraction: 0.1}
train: {steps: 3, batch: 8, learning_rate: 1e-2, warmup_steps: 1, evaluate_batches: 2}
tiers: {device: cpu, gpu: 48MiB, ram: 96MiB, state: [ram], update_threads: 2}
output: {directory: run, checkpoint_every: 0}
"""


def train_in(folder: Path, words: tuple[str, ...]) -> None:
    """Run the config of a folder on this rank."""
    os.chdir(folder)
    path = folder / "run.yaml"
    loaded = file.load(path, words)
    train(loaded, Console(quiet=True), file.given(path, words))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "text.txt").write_text("\n".join(f"line {n} of a text that says little" for n in range(400)))
    return tmp_path


def figures(run: Path) -> list[tuple[object, object, object]]:
    """Loss, norm and held-out loss of each record."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [(r.get("loss"), r.get("grad_norm"), r.get("heldout_loss")) for r in records]
    return [row for row in found if any(row)]


def test_train_on_ranks_writes_the_files_of_one_process(folder: Path) -> None:
    for size in (1, 2, 4):
        POOL.run(train_in, size, folder, ("--train.groups=4", f"--output.directory=run{size}"))

    alone = folder / "run1"
    for size in (2, 4):
        shared = folder / f"run{size}"
        model = "model/model.safetensors"
        assert (shared / model).read_bytes() == (alone / model).read_bytes()
        assert figures(shared) == figures(alone)
        assert {path.name for path in shared.iterdir()} == {path.name for path in alone.iterdir()}


def test_train_on_ranks_without_groups_computes_a_group_on_each(folder: Path) -> None:
    POOL.run(train_in, 2, folder, ())
    POOL.run(train_in, 1, folder, ("--train.groups=2", "--output.directory=alone"))
    assert figures(folder / "run") == figures(folder / "alone")
    assert "groups: 2" in (folder / "run/config.yaml").read_text()


def test_train_on_ranks_that_cannot_share_the_groups_names_the_numbers_that_can(folder: Path) -> None:
    with pytest.raises(AssertionError, match=r"train\.groups is 4, which 3 ranks cannot share equally\. Start 1, 2, 4"):
        POOL.run(train_in, 3, folder, ("--train.groups=4",))


# ---------------------------------------------------------------------- checkpoints

SAVES = ("--train.groups=4", "--train.steps=4", "--output.checkpoint_every=1", "--output.keep_checkpoints=3")


def resume_in(folder: Path, words: tuple[str, ...] = ()) -> None:
    """Go on with the run of a folder on this rank."""
    os.chdir(folder)
    path = folder / "run/config.yaml"
    train(file.load(path, words), Console(quiet=True), file.given(path, words), resumes=True)


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_checkpoints_of_a_run_on_ranks_are_those_of_one_process(folder: Path) -> None:
    for size in (1, 2, 4):
        (folder / str(size)).mkdir()
        for name in ("run.yaml", "text.txt"):
            shutil.copy(folder / name, folder / str(size) / name)
        POOL.run(train_in, size, folder / str(size), SAVES)

    expected = files_of(folder / "1/run/checkpoints")
    assert {name.split("/")[0] for name in expected} == {f"step-{step:08d}" for step in (2, 3, 4)}
    for size in (2, 4):
        found = files_of(folder / f"{size}/run/checkpoints")
        assert found.keys() == expected.keys()
        assert [name for name in found if found[name] != expected[name]] == []


def test_run_on_ranks_goes_on_from_its_checkpoint_with_other_numbers_of_ranks(folder: Path) -> None:
    POOL.run(train_in, 4, folder, SAVES)
    run = folder / "run"
    model = (run / "model/model.safetensors").read_bytes()
    losses = figures(run)
    for size in (2, 1):
        shutil.rmtree(run / "model")
        shutil.rmtree(run / f"checkpoints/step-{4:08d}")
        if size == 1:
            shutil.rmtree(run / f"checkpoints/step-{3:08d}")
        POOL.run(resume_in, size, folder)
        assert (run / "model/model.safetensors").read_bytes() == model
        assert figures(run) == losses


def train_apart(folder: Path) -> None:
    """Run a config in a directory that each rank has for itself."""
    own = folder / os.environ["RANK"]
    own.mkdir()
    for name in ("run.yaml", "text.txt"):
        shutil.copy(folder / name, own / name)
    train_in(own, ())


def test_rank_that_sees_another_run_directory_is_refused(folder: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1 does not see the run that the first rank has in run"):
        POOL.run(train_apart, 2, folder)
    assert not (folder / "0/run").exists()


def test_train_on_ranks_with_savepoints_is_refused(folder: Path) -> None:
    with pytest.raises(AssertionError, match=r"output\.savepoint_every: several ranks make no savepoints yet"):
        POOL.run(train_in, 2, folder, ("--output.savepoint_every=2",))


def fail_in(folder: Path, words: tuple[str, ...]) -> None:
    """Run the config of a folder, and break off after its last step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "report", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train_in(folder, words)


def test_ranks_do_not_go_on_from_a_savepoint(folder: Path) -> None:
    POOL.run(fail_in, 1, folder, ("--train.groups=2", "--train.steps=2", "--output.savepoint_every=2"))
    assert [path.name for path in (folder / "run/savepoints").iterdir()] == ["step-00000002"]
    words = ("--output.savepoint_every=0",)
    with pytest.raises(AssertionError, match="one process made it, and several ranks cannot read it"):
        POOL.run(resume_in, 2, folder, words)
    POOL.run(resume_in, 1, folder)


def train_by_time(folder: Path, full: bool) -> None:
    """Run with checkpoints by a clock that only the first rank has; whose drive may be full."""
    is_first = os.environ["RANK"] == "0"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pace, "is_due", lambda _: is_first)
        patch.setattr(Pace, "is_long", lambda _: is_first)
        if full and is_first:
            patch.setattr(chunkfile, "_create", lambda _: os.open("/dev/full", os.O_WRONLY))
        train_in(folder, ("--output.checkpoint_every=auto", "--output.export=false"))


@pytest.mark.parametrize("full", [False, True])
def test_checkpoint_by_time_is_made_or_left_out_as_the_first_rank_says(full: bool, folder: Path) -> None:
    POOL.run(train_by_time, 2, folder, full)
    checkpoints = [path.name for path in (folder / "run/checkpoints").iterdir()]
    assert ("step-00000003" in checkpoints) is not full
    assert not full or checkpoints == []
