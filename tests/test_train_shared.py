"""`megatier train` on several ranks: one directory, one text, one model, and the bytes of one process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from rank_pool import POOL
from rich.console import Console

from megatier.config import file
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
