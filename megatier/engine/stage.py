"""Holds the state that all nodes of a model share, and defines the protocols of what loads their weights (`play`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node as GraphNode
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
        """Give them back. The caller must not read the bytes any more."""


class WeightSource(Protocol):
    """The protocol of an object that loads weights and offloads activations. It knows the tiers, and nodes do not."""

    def enter(self, unit: str, phase: Phase, group: int) -> WeightUse:
        """Wait for a unit's weights, for one use in the forward or backward of a group."""

    def stash(self, unit: str, tensor: Tensor) -> None:
        """Offload a unit's input, which is contiguous."""

    def stash_beside(self, unit: str, tensor: Tensor) -> bool:
        """Offload another tensor after the unit's input. Return False if there is no room, and the tensor stays."""

    def fetch(self, unit: str) -> list[Tensor]:
        """Fetch all offloaded tensors of a unit, in the order in which they were offloaded."""

    def begin_leg(self, leg: Leg) -> None:
        """Announce a leg of a training pass. The backward that trains needs no announcement."""


class UnitPlayer(Protocol):
    """The protocol of an object that plays the timeline of each pass while the engine computes."""

    @property
    def weights(self) -> WeightSource:
        """Loads weights, and offloads activations."""

    @property
    def grad_sink(self) -> GradSink:
        """Takes gradients."""

    def begin(self, name: str, text_groups: Collection[int] = ()) -> None:
        """Start a pass, `train` or an evaluation.

        Args:
            name: the name of the pass.
            text_groups: the groups that are known to have no pixels.
        """

    def end(self) -> None:
        """End the pass."""

    def cancel(self) -> None:
        """Cancel the pass."""

    @property
    def can_sit_out(self) -> bool:
        """Whether one of several ranks can sit out the rest of the pass while the others go on with it."""

    def defer_updates(self, *, clipped: bool) -> None:
        """Apply all gradients, which are final. Each unit is updated before its next use.

        Args:
            clipped: whether the gradients are scaled.
        """

    def drop_updates(self) -> None:
        """Drop the gradients without applying them."""

    def drain_gradients(self) -> None:
        """Wait until every gradient is summed and measured."""

    def own_seconds(self) -> float:
        """Return the seconds that this rank computed or waited for its own queues since the events were last taken."""

    def waiting(self, cause: str) -> contextlib.AbstractContextManager[object]:
        """Count a wait of compute for something outside the player, such as other ranks."""

    def drain(self) -> None:
        """Finish every update and every write-back."""


@dataclass(slots=True, kw_only=True)
class Stage:
    """The state that all nodes of a model share."""

    source: WeightSource
    """Loads weights and offloads activations."""
    gradients: Gradients
    """Collects the gradients of the step."""
    dtypes: Mapping[str, torch.dtype]
    """The dtype of the compute copy of each unit's weights."""
    device: torch.device
    """The device on which units compute."""
    slices: int
    """The number of slices that a group is cut into."""
    anchor: Tensor
    """A scalar that requires a gradient. It is an input of every node, so that autograd calls each node's backward even
    if no other input requires a gradient."""
    compilation: Compilation | None = None
    """How to compile the training forward of each module; None: not at all."""
    tile_tokens: int | None = None
    """The most tokens on which norms, MLPs and experts of a layer work at once; None: on all of a slice."""
    keeps_attention: bool = False
    """Whether attention's results stay until the backward where the rest of an uncompiled forward is recomputed."""
    offloads_attention: bool = False
    """Whether these results are offloaded together with an offloaded input."""
    arithmetic: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    """A context for every forward and backward of a unit: how it multiplies matrices."""
    tower_attention: TowerAttention = field(default_factory=TowerAttention)
    """The attention of towers whose images have any number of patches."""
    is_running: bool = True
    """Whether a forward of the model is running. Only then it is known which step's weights a module needs."""
    alone: Callable[[str], contextlib.AbstractContextManager[None]] | None = None
    """Runs one module outside of the model's forward, as an evaluation with a name; None: that is refused."""
    checks_finite: bool = False
    """Whether to stop at the first unit with a value that is not finite (a diagnosis, not a training mode)."""
    is_learning: bool = False
    """Whether nodes are learning their `Rows`."""
    is_resident: bool = False
    """Whether all weights are resident, and only forwards without gradients run."""
    model: nn.Module = field(default_factory=nn.Module)
    """The model, in which messages look up how a tensor came into a module."""
    end: GraphNode = field(init=False)
    """The autograd node that accumulates the anchor's gradient."""

    def __post_init__(self) -> None:
        """Hold the anchor's accumulation node, which autograd would otherwise recreate."""
        self.end = get_gradient_edge(self.anchor).node


@contextlib.contextmanager
def learning(stage: Stage) -> Iterator[None]:
    """Let nodes learn which arguments and outputs are batched. Run the model inside with one row, then with two."""
    stage.is_learning = True
    try:
        yield
    finally:
        stage.is_learning = False
