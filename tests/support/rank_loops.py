"""Somebody else's loop over a streamed model, on each rank of several."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from tiny_runs import exactness_config, plain_model
from torch import Tensor

import megatier
from megatier.config.schema import TiersConfig
from megatier.integrations.streamed import Streamed

GROUPS = 4
TIERS = TiersConfig(device="cpu", gpu=8 << 20, ram=32 << 20, update_threads=2, io_threads=2)


def open_streamed(nvme: tuple[str, ...] = (), **options: Any) -> Streamed:
    """A tiny model on this rank, of the steps of GROUPS backwards on all ranks."""
    size = int(os.environ["WORLD_SIZE"])
    tiers = replace(TIERS, nvme=nvme, state=("nvme",) if nvme else TIERS.state)
    chosen = {"accumulation_steps": GROUPS // size, "lr": 1e-2, "clip": 0.5, **options}
    return megatier.stream(plain_model(exactness_config("plain")), tiers=tiers, **chosen)


def rows(step: int, group: int) -> Tensor:
    """The rows of a group."""
    return torch.randint(3, 160, (2, 16), generator=torch.Generator().manual_seed(100 * step + group))


def train(streamed: Streamed, first: int, last: int) -> list[tuple[float, float]]:
    """Loss and norm of some steps."""
    figures = []
    for step in range(first, last + 1):
        losses = []
        for group in range(streamed.rank, streamed.groups, streamed.num_ranks):
            tokens = rows(step, group)
            loss = streamed.model(input_ids=tokens, labels=tokens).loss / streamed.groups
            loss.backward()
            losses.append(loss.item())
        streamed.optimizer.step()
        assert streamed.last is not None
        figures.append((math.fsum(chain(*streamed.all_of(losses))), streamed.last.grad_norm))
    # None is an object too, and keeps its place among those of the ranks.
    assert streamed.all_of(streamed.rank or None) == [number or None for number in range(streamed.num_ranks)]
    return figures


def group_loss(streamed: Streamed, step: int, group: int, course: str) -> Tensor:
    """The loss of the forwards of a group."""
    total = torch.zeros(())
    for number, leg in enumerate(course):
        tokens = rows(step, 10 * group + number)
        with torch.set_grad_enabled(leg == "F"):
            total = total + streamed.model(input_ids=tokens, labels=tokens).loss
    return total / streamed.groups
