"""Compilation of units and of the loss, with kernels chosen by rule and never by a stopwatch.

All units of one class share one compilation, since their modules differ in nothing that the code reads. The training
graph alone is compiled: keep, recompute and offload run the same one, so that they agree bit for bit. Evaluation runs
uncompiled.

A compiled layer may save only part of its activations and compute the rest again in its backward, cheapest first
(products with an activation function and norms cost next to nothing; attention more; matrix products most). That is
chosen inside the compiled graph, so nothing runs again that the backward does not need: at 0 the layer saves its
inputs alone, and its last projection is still not repeated.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, ParamSpec, TypeVar

import torch
import torch._functorch.config
import torch._inductor.config
import torch.compiler.config
from torch._dynamo.exc import TorchDynamoException
from torch.utils import flop_counter

P = ParamSpec("P")
R = TypeVar("R")

RECOMPILES_MAX = 64
"""Variants of one forward: kinds of layers, batch shapes."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """How to compile. One setting at a time holds in a process."""

    saved_share: float = 1.0
    """Share of a layer's activations that its forward saves, 0 to 1."""

    def __call__(self, function: Callable[P, R], name: str) -> Compiled[P, R]:
        """The function, compiled at its first call for fixed shapes; as it is, with a warning, where that fails."""
        self._adopt()
        return Compiled(function, name, saves_inputs_alone=self.saved_share == 0)

    def _adopt(self) -> None:
        deterministic = torch.are_deterministic_algorithms_enabled()
        wanted = (self.saved_share, deterministic)
        if (torch._functorch.config.activation_memory_budget, _inductor_is_deterministic()) != wanted:
            torch.compiler.reset()  # what is compiled already was compiled under other settings
        torch._functorch.config.activation_memory_budget = self.saved_share
        torch._inductor.config.deterministic = deterministic
        torch.compiler.config.recompile_limit = RECOMPILES_MAX
        flop_counter.sdpa_flop_count = _attention_flops


class Compiled(Generic[P, R]):
    """A compiled function and, where the compiler refuses, the function itself.

    Attributes:
        saves_inputs_alone: its backward computes everything again.
    """

    def __init__(self, function: Callable[P, R], name: str, *, saves_inputs_alone: bool) -> None:
        """Compiles at the first call. The name is for the warning."""
        self._name = name
        self._function = function
        self.saves_inputs_alone = saves_inputs_alone
        self._run: Callable[P, R] = torch.compile(function, dynamic=False, fullgraph=True)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it."""
        try:
            return self._run(*args, **kwargs)
        except TorchDynamoException as error:
            if self._run is self._function:
                raise
            reason = _cause(str(error))
            warnings.warn(f"{self._name} runs uncompiled, because torch.compile refuses it: {reason}", stacklevel=2)
            self._run = self._function
            self.saves_inputs_alone = False
            return self._function(*args, **kwargs)


_counted_flops = flop_counter.sdpa_flop_count


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """FLOPs of attention, for the choice of what to save; shapes [B, heads, T, D].

    torch 2.11 refuses to count where fewer key and value heads serve several query heads, and so to compile at all.
    """
    batch, heads, *_ = query
    return int(_counted_flops(query, (batch, heads, *key[2:]), (batch, heads, *value[2:])))  # type: ignore[no-untyped-call]


def _inductor_is_deterministic() -> bool:
    return bool(torch._inductor.config.deterministic)


def _cause(message: str) -> str:
    """One line that says why. What a backend raised begins on the second line, after "backend=... raised:"."""
    first, *rest = (line.strip() for line in message.splitlines() if line.strip())
    return f"{first} {rest[0]}" if first.endswith("raised:") and rest else first
