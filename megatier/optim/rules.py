"""Defines the elementwise update rules (AdamW, Lion), and the settings that they read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatier import _native
from megatier.optim.adamw import StepScalars, begin_adamw, lion_scalars, step_scalars


@dataclass(frozen=True, kw_only=True, slots=True)
class Hyperparameters:
    """The settings of an optimizer that, unlike the learning rate, do not change from step to step."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.95
    """The decay of Muon's momentum."""
    clip: float | None = 1.0
    """The global norm to which gradients are clipped; None: not at all."""
    deferred: bool = True
    """Whether updates wait until the norm is known. Otherwise they run inside the backward, and nothing is clipped."""


@dataclass(frozen=True, slots=True)
class ElementwiseRule:
    """The arithmetic of an optimizer that updates each element by itself."""

    scalars: Callable[[int, float, Hyperparameters], StepScalars]
    """Returns the kernels' scalars of step 1, 2, ... at a learning rate."""
    begin: Callable[..., _native.Batch | None] = begin_adamw
    """Begins the update of a run of elements; see `begin_adamw`, which does AdamW and Lion."""


def _adamw_scalars(step: int, learning_rate: float, hyper: Hyperparameters) -> StepScalars:
    return step_scalars(step, learning_rate, (hyper.beta1, hyper.beta2), hyper.eps)


def _lion_scalars(_: int, learning_rate: float, hyper: Hyperparameters) -> StepScalars:
    return lion_scalars(learning_rate, (hyper.beta1, hyper.beta2))


RULES = {
    "adamw": ElementwiseRule(_adamw_scalars),
    "lion": ElementwiseRule(_lion_scalars),
}
"""The rules, by the names that state schemas use."""
