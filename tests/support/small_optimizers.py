"""Small TieredAdamWs: their parameters, budgets, gradients and steps, and how their numbers are compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatier.tiered_adamw.torch_optimizer import TieredAdamW, TieredOptimizer

Make = Callable[..., TieredAdamW]
TINY, SOME, ALL = "100KiB", "250KiB", "64MiB"
"""RAM for little more than slots, for a part of the state, for all of it."""
SHAPES = ((130, 257), (257,), (), (0, 4), (33, 70, 3))
STEPS = 4
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
placements = pytest.mark.parametrize("ram", [TINY, SOME, ALL])


@contextlib.contextmanager
def optimizers(folder: Path) -> Iterator[Make]:
    """Makes optimizers, closes them, and sees that nothing of them is left."""
    made: list[TieredOptimizer] = []

    def optimizer(parameters: Any, kind: type[Any] = TieredAdamW, **settings: Any) -> Any:
        settings.setdefault("nvme", [f"{folder}:8MiB"])
        made.append(kind(parameters, **settings))
        return made[-1]

    yield optimizer
    for each in made:
        each.close()
    assert not list(folder.glob("megatier-*"))


def parameters_of(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in SHAPES]


def give_gradients(parameters: Iterable[nn.Parameter], step: int) -> None:
    draw = torch.Generator().manual_seed(1000 + step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=draw).to(parameter)


def take_steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: Iterable[int]) -> None:
    for step in steps:
        give_gradients(parameters, step)
        optimizer.step()
        optimizer.zero_grad()


def same(first: Any, second: Any) -> bool:
    """The same structure and the same bits."""
    if isinstance(first, Tensor):
        return first.dtype is second.dtype and torch.equal(first.detach(), second.detach())
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def close(first: Iterable[Tensor], second: Iterable[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(first, second, strict=True))


def close_optimizer(trainer: Any) -> None:
    """Close the TieredAdamW that a plain Trainer has made by its class, which the Trainer itself does not."""
    trainer.optimizer.optimizer.close()
