"""Small runs of `megatier train`: their command lines, and what they leave behind."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from megatier.train.record_writers import Figures, RecordWriters

LINES = 300
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "tie_word_embeddings": False,
}
SETTINGS: dict[str, Any] = {
    "model.compute_dtype": "fp32",
    "data.tokenizer": "bytes",
    "data.sequence_length": 32,
    "data.holdout_fraction": 0.2,
    "tiers.device": "cpu",
    "tiers.gpu": "4MiB",
    "tiers.ram": "8MiB",
    "tiers.io_threads": 2,
    "tiers.update_threads": 1,
    "train.steps": 3,
    "train.batch": 4,
    "train.learning_rate": 1e-2,
    "train.evaluate_batches": 2,
}
PLACES: dict[str, dict[str, Any]] = {
    "gpu": {"tiers.state": "gpu"},
    "ram": {"tiers.state": "ram", "tiers.gpu": "512KiB"},
    "ram_streamed": {"tiers.state": "ram", "tiers.gpu": "16MiB", "tiers.streamed_share": 0.7},
    "nvme": {"tiers.state": "nvme", "tiers.gpu": "512KiB"},
    "gpu_ram": {"tiers.state": "gpu,ram", "tiers.gpu": "640KiB"},
    "ram_nvme": {"tiers.state": "ram,nvme", "tiers.gpu": "512KiB", "tiers.ram": None},
    "gpu_ram_nvme": {"tiers.gpu": "640KiB", "tiers.ram": None},
}
"""Tiers that hold state; a RAM budget of None stands for little more than the least there is."""
IMMEDIATE = {"train.clip": "null", "numerics.guard": False}
"""Updates run inside the backward."""
EVERY_TWO: dict[str, Any] = {"train.steps": 6, "output.checkpoint_every": 2}


def command(folder: Path, settings: Mapping[str, Any] | None = None) -> list[str]:
    """Words of a run in `folder/run` on a small text.

    Args:
        folder: an existing directory.
        settings: go on top of SETTINGS, by dotted name; None takes one away. With `model.path`, no MODEL is given.
    """
    given = {"data.files": str(write_text(folder)), "output.directory": str(folder / "run"), **(settings or {})}
    model = {} if given.get("model.path") else {f"model.config.{key}": value for key, value in MODEL.items()}
    words = {**model, **SETTINGS, **given}
    # A small budget is a number of bytes only with its unit.
    for name in ("tiers.gpu", "tiers.ram"):
        if isinstance(words.get(name), int):
            words[name] = f"{words[name]}B"
    return ["train", *(f"--{name}={written(value)}" for name, value in words.items() if value is not None)]


def written(value: object) -> str:
    """A value as the command line takes it."""
    return json.dumps(value) if isinstance(value, bool) else str(value)


def write_text(folder: Path) -> Path:
    """A folder of ten short texts."""
    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    for number in range(10):
        lines = (
            f"line {line * 7 % 31} of text {number} has {line * number % 17} words\n" for line in range(LINES // 10)
        )
        (texts / f"{number}.txt").write_text("".join(lines))
    return texts


def write_chats(folder: Path) -> str:
    """A dataset of thirty short conversations, as an entry of `data.files`."""
    records = [
        {"conversations": [{"from": "human", "value": f"{n}?"}, {"from": "gpt", "value": "so " * (n % 5 + 1)}]}
        for n in range(30)
    ]
    (folder / "chats.json").write_text(json.dumps(records))
    info = folder / "dataset_info.json"
    info.write_text(json.dumps({"chats": {"file_name": "chats.json", "formatting": "sharegpt"}}))
    return f"{info}#chats"


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Records of steps, evaluations and checkpoints of the run in `folder/run`."""
    return [record for record in all_records(folder) if "run" not in record]


def all_records(folder: Path) -> list[dict[str, Any]]:
    """All records of the run in `folder/run`: also how its processes began and ended."""
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def outcome(run: Path) -> dict[str, Any]:
    """Losses and a digest of the weights of a whole run."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    weights = (run / "model" / "model.safetensors").read_bytes()
    losses = [record["loss"] for record in records if "loss" in record]
    return {"losses": losses, "weights": hashlib.blake2b(weights).hexdigest()}


def leftovers(folder: Path) -> Iterator[Path]:
    """Block directories and locks that are still there."""
    yield from (path for path in folder.rglob("*") if path.name.startswith("megatier-") or path.name == "lock")


@contextlib.contextmanager
def after_step(step: int, harm: Callable[[], None]) -> Iterator[None]:
    """When the step is recorded, before its checkpoint. An error of `harm` ends the step, and not only its record."""
    real = RecordWriters.__call__

    def write(self: RecordWriters, figures: Figures) -> None:
        real(self, figures)

        # Of several ranks the first alone has writers.
        if self._writers and figures["step"] == step and "loss" in figures:
            harm()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordWriters, "__call__", write)
        yield


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
