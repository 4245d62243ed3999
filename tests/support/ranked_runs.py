"""A tiny run of `megatier train` on several ranks of one host, each of which is a process of the pool."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
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


def write_run(folder: Path) -> Path:
    """Write the config and the text of a run into a folder, and return the folder."""
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "text.txt").write_text("\n".join(f"line {n} of a text that says little" for n in range(400)))
    return folder


def train_in(folder: Path, words: tuple[str, ...] = (), resumes: bool = False) -> str:
    """Run the config of a folder on this rank, or go on with its run; returns what it says."""
    os.chdir(folder)
    path = folder / ("run/config.yaml" if resumes else "run.yaml")
    said = io.StringIO()
    loaded, given = file.load_given(path, words)
    train(loaded, Console(file=said, width=1000), given, resumes=resumes)
    return said.getvalue()


def figures(run: Path) -> list[tuple[object, object, object]]:
    """Loss, norm and held-out loss of each record."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [(r.get("loss"), r.get("grad_norm"), r.get("heldout_loss")) for r in records]
    return [row for row in found if any(row)]


sizes = pytest.mark.parametrize("shared", [2, pytest.param(4, marks=pytest.mark.slow)])
"""Numbers of ranks of which each is compared with one process."""
