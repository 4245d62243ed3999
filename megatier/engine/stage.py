"""The stage: what all nodes of a model share, and who brings their weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from megatier.engine.gradient import Gradients, GradSink
from megatier.numerics.compilation import Compilation
from megatier.tier import Phase


class WeightUse(Protocol):
    """Weights on the GPU until `leave`."""

    bytes: Tensor

    def leave(self) -> None:
        """Give them back."""


class WeightSource(Protocol):
    """Who brings weights and takes activations; it knows the tiers."""

    def enter(self, unit: str, phase: Phase, group: int) -> WeightUse:
        """The unit's weights, uint8 [block]."""

    def stash(self, unit: str, tensor: Tensor) -> None:
        """Take a contiguous activation to RAM."""

    def fetch(self, unit: str) -> Tensor:
        """Bring it back."""


class UnitPlayer(Protocol):
    """What plays the timeline under the engine."""

    @property
    def weights(self) -> WeightSource:
        """Brings weights, and takes activations."""

    @property
    def gradients(self) -> GradSink:
        """Takes gradients."""

    def begin(self, name: str) -> None:
        """Start a pass."""

    def end(self) -> None:
        """End it."""

    def cancel(self) -> None:
        """Leave it half-way."""

    def defer_updates(self, *, clipped: bool) -> None:
        """All gradients are final, and known to be clipped or not; update before the next use."""

    def drop_updates(self) -> None:
        """All gradients are final, and never to be applied."""

    def drain_gradients(self) -> None:
        """Wait until every gradient is summed and measured."""

    def drain(self) -> None:
        """Finish every update and write-back."""


@dataclass(slots=True, kw_only=True)
class Stage:
    """What all nodes of a model share."""

    source: WeightSource
    gradients: Gradients
    dtype: torch.dtype
    device: torch.device
    slices: int
    anchor: Tensor
    """A scalar that requires a gradient: input of every node, so that units without a differentiable input have one."""
    compilation: Compilation | None = None
    """How to compile the forward of each module in training; None: not at all."""
    arithmetic: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    """Round every forward and backward of a unit: how its products are taken."""
    checks_finite: bool = False
    """Stop at the first unit with a value that is not finite (a diagnosis, not a training mode)."""
    learnt: dict[str, list[tuple[int, ...] | None]] | None = None
    """While learning: shapes of each module's flat arguments in the run with one row."""
    in_fp32: frozenset[str] = frozenset()
    """Parameters that a forward has in fp32, though their compute copy is bf16."""
    model: nn.Module = field(default_factory=nn.Module)
    """To name in messages by what attribute of a module a tensor came."""


@contextlib.contextmanager
def learning(stage: Stage) -> Iterator[None]:
    """Run the model twice inside, with one row and with two: nodes learn which arguments and outputs are batched."""
    stage.learnt = {}
    try:
        yield
    finally:
        stage.learnt = None
