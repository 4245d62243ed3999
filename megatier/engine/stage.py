"""Holds what all nodes of a model share, and defines the protocols of what brings their weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node as Step
from torch.autograd.graph import get_gradient_edge

from megatier.compute.compilation import Compilation
from megatier.engine.grad_sink import GradSink
from megatier.engine.gradient import Gradients
from megatier.models.tower_attention import TowerAttention
from megatier.tier import Leg, Phase


class WeightUse(Protocol):
    """A unit's weights on the GPU, until `leave`."""

    bytes: Tensor
    """The weights: uint8 [block]."""

    def leave(self) -> None:
        """Give them back. The caller must not look at the bytes any more."""


class WeightSource(Protocol):
    """The protocol of an object that brings weights and takes activations. It knows the tiers; nodes do not."""

    def enter(self, unit: str, phase: Phase, group: int) -> WeightUse:
        """Ask for a unit's weights, for one use in the forward or backward of a group."""

    def stash(self, unit: str, tensor: Tensor) -> None:
        """Take a unit's input, which is contiguous, off the GPU."""

    def stash_beside(self, unit: str, tensor: Tensor) -> bool:
        """Take another tensor off the GPU, after the unit's input; False: there is no room, so it stays."""

    def fetch(self, unit: str) -> list[Tensor]:
        """Bring back all that was taken, in that order."""

    def begin_leg(self, leg: Leg) -> None:
        """Say that a leg of a training pass follows. The backward that trains is seen by itself."""


class UnitPlayer(Protocol):
    """The protocol of an object that plays the timeline of each pass under the engine."""

    @property
    def weights(self) -> WeightSource:
        """Brings weights, and takes activations."""

    @property
    def grad_sink(self) -> GradSink:
        """Takes gradients."""

    def begin(self, name: str, text_groups: Collection[int] = ()) -> None:
        """Start a pass, `train` or one of evaluations.

        Args:
            name: the name of the pass.
            text_groups: the groups of which it is known that they have no pixels.
        """

    def end(self) -> None:
        """End the pass."""

    def cancel(self) -> None:
        """Leave the pass half-way."""

    @property
    def can_sit_out(self) -> bool:
        """Whether one of several ranks can leave out what is left of the pass, while the others go on with it."""

    def defer_updates(self, *, clipped: bool) -> None:
        """Apply all gradients, which are final: each unit is updated before its next use.

        Args:
            clipped: the gradients are to be scaled.
        """

    def drop_updates(self) -> None:
        """Never apply the gradients, which are final."""

    def drain_gradients(self) -> None:
        """Wait until every gradient is summed and measured."""

    def own_seconds(self) -> float:
        """Return the seconds that this rank computed, or waited for its own queues, since events were taken."""

    def waiting(self, cause: str) -> contextlib.AbstractContextManager[object]:
        """Count a wait of compute for something that the player does not know, such as other ranks."""

    def drain(self) -> None:
        """Finish every update and every write-back."""


@dataclass(slots=True, kw_only=True)
class Stage:
    """The parts that all nodes of a model share."""

    source: WeightSource
    """Brings weights and takes activations."""
    gradients: Gradients
    """Collects the gradients of the step."""
    dtypes: Mapping[str, torch.dtype]
    """The dtype of the compute copy of each unit's weights."""
    device: torch.device
    """The device on which units compute."""
    slices: int
    """The number of slices that a group is cut into."""
    anchor: Tensor
    """A scalar that requires a gradient. It is an input of every node, so that autograd gives each one a backward, even
    if no other input requires a gradient."""
    compilation: Compilation | None = None
    """How to compile the forward of each module in training; None: not at all."""
    tile_tokens: int | None = None
    """The most tokens on which norms, MLPs and experts of a layer work at once; None: on all of a slice."""
    keeps_attention: bool = False
    """Whether what attention gave stays until the backward where the rest of an uncompiled forward is made again."""
    offloads_attention: bool = False
    """Whether that goes off the GPU with an offloaded input."""
    arithmetic: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    """A context for every forward and backward of a unit: how its products are taken."""
    tower_attention: TowerAttention = field(default_factory=TowerAttention)
    """The attention of towers whose images have any number of patches."""
    is_running: bool = True
    """Whether a forward of the model runs. Only then is it known which step's weights a module is to have."""
    alone: Callable[[str], contextlib.AbstractContextManager[None]] | None = None
    """Runs one module outside of a forward of the model, as an evaluation with a name; None: that is refused."""
    checks_finite: bool = False
    """Stop at the first unit with a value that is not finite (a diagnosis, not a training mode)."""
    is_learning: bool = False
    """Whether nodes learn their rows."""
    is_resident: bool = False
    """Whether all weights stay where they are, and only forwards without gradients are made."""
    model: nn.Module = field(default_factory=nn.Module)
    """The model: messages name the attribute of a module by which a tensor came."""
    end: Step = field(init=False)
    """The step of autograd that would add to the anchor's gradient."""

    def __post_init__(self) -> None:
        """Hold the anchor's end, which autograd makes anew if nobody does."""
        self.end = get_gradient_edge(self.anchor).node


@contextlib.contextmanager
def learning(stage: Stage) -> Iterator[None]:
    """Let nodes learn which arguments and outputs are batched. Run the model inside, with one row and then with two."""
    stage.is_learning = True
    try:
        yield
    finally:
        stage.is_learning = False
