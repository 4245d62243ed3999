"""Small runs of `megatier train` on conversations with images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from small_commands import command
from tiny_processors import chats, model_folder

from megatier.data.shuffle import permute

LENGTH = 64
RATE = 1e-2
STEPS = 3
COUNTS = (1, 0, 2, 1, 0, 3)
"""Images of each conversation."""


def order(count: int) -> list[int]:
    """Numbers of conversations in the order of the first epoch."""
    return [permute(place, count, (0, 0)) for place in range(count)]


LATE = tuple(0 if chat in order(6)[:2] else chat % 3 for chat in range(6))
"""Images of each conversation, none of them in the first step."""


def run_command(
    folder: Path, family: str, settings: Mapping[str, Any] | None = None, counts: Sequence[int] = COUNTS
) -> list[str]:
    """Words of a run on conversations with so many images, by a tiny model of a family."""
    model = folder / "model"
    if not model.exists():
        model_folder(family, model)
    given = {
        "model.path": str(model),
        "model.fused_loss": False,
        "data.files": str(chats(folder / "data", counts)),
        "data.chat": "messages",
        "data.images": True,
        "data.tokenizer": None,
        "data.sequence_length": LENGTH,
        "data.holdout_fraction": 0,
        "tiers.gpu": "8MiB",
        "tiers.ram": "32MiB",
        "tiers.nvme": f"{folder}:64MiB",
        "train.steps": STEPS,
        "train.batch": 2,
        "train.learning_rate": RATE,
        "train.schedule": "constant",
        "train.warmup_steps": 0,
        "train.weight_decay": 0.1,
        "train.beta2": 0.999,
        "train.clip": 1.0,
        "output.export_dtype": "fp32",
        **(settings or {}),
    }
    return command(folder, given)
