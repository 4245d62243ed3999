"""The Trainer's options for loaders on two ranks: the losses of the plain Trainer under DDP, or a refusal by name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_loops import GROUPS, open_streamed
from rank_pool import POOL
from tiny_runs import exactness_config, plain_model
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset
from trainer_runs import Rows, arguments, logged
from transformers import Trainer

from megatier.errors import ConfigError

state = pytest.importorskip("accelerate.state")

from megatier.integrations.transformers_trainer import MegatierTrainer  # noqa: E402 - needs accelerate


class Endless(IterableDataset[dict[str, torch.Tensor]]):
    """Rows that do not say how many they are."""

    def __init__(self, count: int) -> None:
        self._rows = Rows(count)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self._rows[number] for number in range(len(self._rows)))


class Uneven(Rows):
    """Rows of several lengths."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: value[: 16 - index % 4] for name, value in super().__getitem__(index).items()}


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch of rows, to the right of which nothing counts."""
    fill = {"input_ids": 0, "labels": -100}
    return {
        name: pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)
        for name, value in fill.items()
    }


DATA = {"rows": Rows, "endless": Endless, "uneven": Uneven}


def losses_of(folder: Path, options: dict[str, Any], kind: str, count: int, trainer: str) -> Any:
    """The logged losses of six steps on this rank, or what the Trainer refuses."""
    state.AcceleratorState._reset_state(reset_partial_state=True)
    steps = GROUPS // int(os.environ["WORLD_SIZE"])
    args = arguments(folder, **{"gradient_accumulation_steps": steps, "max_steps": 6, **options})
    if trainer == "plain":
        model = plain_model(exactness_config("plain"))
        plain = Trainer(model, args, train_dataset=DATA[kind](count), data_collator=padded)
        plain.train()
        return logged(plain, "loss")
    with open_streamed(compute_dtype="fp32") as streamed:
        try:
            streams = MegatierTrainer(streamed, args, train_dataset=DATA[kind](count), data_collator=padded)
            streams.train()
        except ConfigError as error:
            return str(error)
        return logged(streams, "loss")


CASES: dict[str, tuple[dict[str, Any], str, int, str]] = {
    "dispatched": ({"accelerator_config": {"dispatch_batches": True}}, "rows", 64, ""),
    "dispatched, dropped": (
        {"accelerator_config": {"dispatch_batches": True}, "dataloader_drop_last": True},
        "rows",
        27,
        "",
    ),
    "dispatched, cut": ({"accelerator_config": {"dispatch_batches": True}}, "rows", 27, "a step of a streamed model"),
    "split": ({"accelerator_config": {"split_batches": True}}, "rows", 64, "split_batches cuts a batch over the ranks"),
    "not even": ({"accelerator_config": {"even_batches": False}}, "rows", 64, ""),
    "not even, cut": ({"accelerator_config": {"even_batches": False}}, "rows", 30, "a step of a streamed model"),
    "not even, dropped": (
        {"accelerator_config": {"even_batches": False}, "dataloader_drop_last": True},
        "rows",
        27,
        "",
    ),
    "dropped": ({"dataloader_drop_last": True}, "rows", 27, ""),
    "by length": ({"train_sampling_strategy": "group_by_length"}, "uneven", 64, ""),
    "in order": ({"train_sampling_strategy": "sequential"}, "rows", 64, ""),
    "not seedable": ({"accelerator_config": {"use_seedable_sampler": False}}, "rows", 64, ""),
    "endless": ({}, "endless", 64, ""),
    "endless, apart": ({"accelerator_config": {"dispatch_batches": False}}, "endless", 64, ""),
    "endless, cut": ({}, "endless", 30, ""),
    "endless, apart, cut": ({"accelerator_config": {"dispatch_batches": False}}, "endless", 30, ""),
    "endless, dropped": ({"dataloader_drop_last": True}, "endless", 30, ""),
}


QUICK = ("split", "by length", "endless, cut", "endless, apart, cut")


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_trainer_on_ranks_deals_rows_as_the_plain_trainer_or_refuses_by_name(case: str, tmp_path: Path) -> None:
    options, kind, count, refusal = CASES[case]
    first, second = POOL.run(losses_of, 2, tmp_path, options, kind, count, "streamed")
    if refusal:
        assert refusal in first
        assert refusal in second
        return
    assert first == second
    plain, _ = POOL.run(losses_of, 2, tmp_path, options, kind, count, "plain")
    assert first == pytest.approx(plain, rel=1e-4)
