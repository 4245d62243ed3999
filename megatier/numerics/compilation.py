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
"""The most variants of one forward that are compiled: for kinds of layers and batch shapes. torch's default is 8."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """The way to compile. One setting at a time holds in a process."""

    saved_share: float = 1.0
    """The share of a layer's activations that its forward saves, 0 to 1."""

    def __call__(self, function: Callable[P, R], name: str) -> Compiled[P, R]:
        """Return the function, to be compiled at its first call for fixed shapes.

        If the compiler refuses, the function runs as it is from then on, and a warning says so.
        """
        self._adopt()
        return Compiled(function, name, saves_inputs_alone=self.saved_share == 0)

    def _adopt(self) -> None:
        """Set torch's compiler, whose settings are those of the process."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        wanted = (self.saved_share, deterministic)
        if (torch._functorch.config.activation_memory_budget, _inductor_is_deterministic()) != wanted:
            # Code that was compiled under other settings would be used again.
            torch.compiler.reset()

        torch._functorch.config.activation_memory_budget = self.saved_share
        torch._inductor.config.deterministic = deterministic
        torch.compiler.config.recompile_limit = RECOMPILES_MAX
        flop_counter.sdpa_flop_count = _attention_flops


class Compiled(Generic[P, R]):
    """A compiled function or, if the compiler refuses it, the function itself.

    Attributes:
        saves_inputs_alone: whether its backward computes everything again.
    """

    def __init__(self, function: Callable[P, R], name: str, *, saves_inputs_alone: bool) -> None:
        """Note the function, which is compiled at the first call. The name is for the warning."""
        self._name = name
        self._function = function
        self.saves_inputs_alone = saves_inputs_alone

        # With `fullgraph` code that cannot be compiled raises an error, instead of running uncompiled without a word.
        # Shapes are taken as fixed, as those of training are.
        self._run: Callable[P, R] = torch.compile(function, dynamic=False, fullgraph=True)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function, and fall back to the uncompiled one if it cannot be compiled."""
        try:
            return self._run(*args, **kwargs)
        except TorchDynamoException as error:
            # It runs uncompiled already, so nothing is left to fall back to.
            if self._run is self._function:
                raise

            reason = _cause(str(error))
            warnings.warn(f"{self._name} runs uncompiled, because torch.compile refuses it: {reason}", stacklevel=2)
            self._run = self._function
            self.saves_inputs_alone = False
            return self._function(*args, **kwargs)


# Kept, since `Compilation` puts `_attention_flops` in its place.
_counted_flops = flop_counter.sdpa_flop_count


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Count the FLOPs of attention, for the choice of what to save. Shapes are [B, heads, T, D].

    If a key and value head serves several query heads, torch 2.11 refuses to count, and so to compile at all.
    """
    batch, heads, *_ = query
    return int(_counted_flops(query, (batch, heads, *key[2:]), (batch, heads, *value[2:])))  # type: ignore[no-untyped-call]


def _inductor_is_deterministic() -> bool:
    return bool(torch._inductor.config.deterministic)


def _cause(message: str) -> str:
    """Return the reason in one line. A backend's own error begins on the second line, after "backend=... raised:"."""
    first, *rest = (line.strip() for line in message.splitlines() if line.strip())
    return f"{first} {rest[0]}" if first.endswith("raised:") and rest else first
