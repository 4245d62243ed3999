"""Compilation of units and of the loss, with kernels chosen by rule and never by a stopwatch.

All units of one class share one compilation, since their modules differ in nothing that the code reads. The training
graph alone is compiled: keep, recompute and offload run the same one, so that they agree bit for bit. Evaluation runs
uncompiled.

A compiled layer may save only part of its activations and compute the rest again in its backward, cheapest first
(products with an activation function and norms cost next to nothing; attention more; matrix products most). That is
chosen inside the compiled graph, so nothing runs again that the backward does not need: at 0 the layer saves its
inputs alone, and its last projection is still not repeated. Attention's output may be saved there as well.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch
import torch._functorch.config
import torch._inductor.config
import torch.compiler.config
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph
from torch.utils import flop_counter
from torch.utils.checkpoint import CheckpointPolicy

from megatier.numerics.attention import FLEX, is_attention

P = ParamSpec("P")
R = TypeVar("R")

LEAST_SHARE = 1e-9
"""The saved share that stands for 0 if attention is saved. At 0 itself torch saves inputs alone, whatever is marked."""
RECOMPILES_MAX = 64
"""The most variants of one forward that are compiled: for kinds of layers and batch shapes. torch's default is 8."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """The way to compile. One setting at a time holds in a process."""

    saved_share: float = 1.0
    """The share of a layer's activations that its forward saves, 0 to 1."""
    keeps_attention: bool = False
    """At a share of 0: whether attention's output and log-sum-exp are saved besides the inputs. At other shares they
    compete with products for the room, by what they save; torch cannot tell what flex attention's are worth, so these
    are always saved."""

    def __call__(self, function: Callable[P, R], name: str) -> Compiled[P, R]:
        """Return the function, to be compiled at its first call for fixed shapes.

        If the compiler refuses, the function runs as it is from then on, and a warning says so.
        """
        self._adopt()
        return Compiled(function, name, saves_inputs_alone=self.saved_share == 0)

    def of_tile(self, function: Callable[P, R], name: str) -> Compiled[P, R]:
        """Return the function, to be compiled so that it saves all its activations: a tile has a short life."""
        self._adopt()
        return Compiled(function, name, saves_inputs_alone=False, saves_all=True)

    def _adopt(self) -> None:
        """Set torch's compiler, whose settings are those of the process."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        share = self.saved_share
        marking: Marking | None = None
        if share or self.keeps_attention:
            marking = Marking(flex_alone=share > 0)
            share = share or LEAST_SHARE

        wanted = (share, deterministic, marking)
        if (torch._functorch.config.activation_memory_budget, _inductor_is_deterministic(), _marking()) != wanted:
            # Code that was compiled under other settings would be used again.
            torch.compiler.reset()

        torch._functorch.config.activation_memory_budget = share
        torch._inductor.config.deterministic = deterministic
        torch._inductor.config.joint_custom_post_pass = marking
        torch.compiler.config.recompile_limit = RECOMPILES_MAX
        flop_counter.sdpa_flop_count = _attention_flops


@dataclass(frozen=True, slots=True)
class Marking(CustomGraphPass):
    """Marks attention in the graph of forward and backward as what the forward has to save."""

    flex_alone: bool
    """Whether this is flex attention alone, or every kernel."""

    def __call__(self, graph: Graph) -> None:
        """Mark its nodes. The compiler then cuts the graph so that the backward does not repeat them."""
        for node in graph.nodes:
            if node.target is FLEX or (not self.flex_alone and is_attention(node.target)):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    def uuid(self) -> str:
        """The name under which torch stores what it has compiled so."""
        return f"megatier attention {self.flex_alone}"


class Compiled(Generic[P, R]):
    """A compiled function or, if the compiler refuses it, the function itself.

    Attributes:
        saves_inputs_alone: whether its backward computes everything again, but for attention if that is saved.
    """

    def __init__(
        self, function: Callable[P, R], name: str, *, saves_inputs_alone: bool, saves_all: bool = False
    ) -> None:
        """Note the function, which is compiled at the first call, and with all saved if that is asked for.

        The name is for the warning.
        """
        self._settings: dict[str, Any] = {"activation_memory_budget": 1.0} if saves_all else {}
        self._name = name
        self._function = function
        self.saves_inputs_alone = saves_inputs_alone

        # With `fullgraph` code that cannot be compiled raises an error, instead of running uncompiled without a word.
        # Shapes are taken as fixed, as those of training are.
        self._run: Callable[P, R] = torch.compile(function, dynamic=False, fullgraph=True)

    @property
    def is_refused(self) -> bool:
        """Whether the function runs uncompiled."""
        return self._run is self._function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function, and fall back to the uncompiled one if it cannot be compiled."""
        try:
            # torch reads the share when it compiles, in a call that nobody knows beforehand.
            with torch._functorch.config.patch(**self._settings) if self._settings else contextlib.nullcontext():
                return self._run(*args, **kwargs)
        except TorchDynamoException as error:
            # It runs uncompiled already, so nothing is left to fall back to.
            if self.is_refused:
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


def _marking() -> object:
    return torch._inductor.config.joint_custom_post_pass


def _cause(message: str) -> str:
    """Return the reason in one line. A backend's own error begins on the second line, after "backend=... raised:"."""
    first, *rest = (line.strip() for line in message.splitlines() if line.strip())
    return f"{first} {rest[0]}" if first.endswith("raised:") and rest else first
