"""Short runs of Hugging Face's Trainer: rows, arguments, a streamed model on small tiers, and what was logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_runs import exactness_config, plain_model
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import megatier
from megatier.config.schema import TiersConfig
from megatier.integrations.streamed import Streamed

STEPS = 10


class Rows(Dataset[dict[str, Tensor]]):
    """Sequences of random tokens, a few of which do not count."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self._ids = torch.randint(3, 160, (count, 16), generator=generator)
        self._labels = self._ids.masked_fill(torch.rand(self._ids.shape, generator=generator) < 0.2, -100)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._ids[index], "labels": self._labels[index]}


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    """Accumulation, warm-up, cosine, clipping that fires, and decay groups."""
    chosen: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "weight_decay": 0.1,
        "max_grad_norm": 1.5,
        "adam_beta2": 0.95,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(output_dir=str(folder), **{**chosen, **options})


def logged(trainer: Trainer, key: str) -> list[float]:
    return [float(entry[key]) for entry in trainer.state.log_history if key in entry]


def open_streamed(tmp_path: Path, device: Any = "cpu", **options: Any) -> Streamed:
    """The plain model on tiers: state at home in RAM and on NVMe."""
    mount = tmp_path / "mount"
    mount.mkdir(exist_ok=True)
    tiers = TiersConfig(
        device=device, gpu=1 << 20, ram=1 << 20, nvme=(f"{mount}:16MiB",), update_threads=2, io_threads=2
    )
    chosen = {"tiers": tiers, "accumulation_steps": 2, "compute_dtype": "fp32", **options}
    return megatier.stream(plain_model(exactness_config("plain")), **chosen)
