"""The experts of a fused module as several nodes: one for each range, and their sum.

transformers skips what a router sends to the expert behind the last one (expert parallelism uses it). A node runs the
module on rows of its parameters, with indices counted from its first expert, and those of others mapped to that one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from megatier.engine.node import Node
from megatier.engine.stage import Stage
from megatier.errors import UnsupportedModelError
from megatier.guards.unbound import Guarded
from megatier.models.decoder import Binding
from megatier.tier import Activations


class ExpertsNode(Node):
    """A range of the experts of a fused module, streamed. `join` makes one forward of all ranges."""

    def __init__(
        self,
        stage: Stage,
        unit: str,
        module: nn.Module,
        bindings: Sequence[Binding],
        experts: tuple[int, int],
        *,
        activations: Activations,
    ) -> None:
        """The module's forward stays as it is.

        Raises:
            UnsupportedModelError: it does not know of experts that are elsewhere.
        """
        check_knows_of_others(module)
        forward = module.forward
        super().__init__(stage, unit, unit, module, bindings, activations=activations)
        module.forward = forward
        self._experts = experts
        guard(self)

    def run(self, leaves: Sequence[Tensor], args: Any, kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """What these experts add, [tokens, hidden], for (hidden states, indices, weights) of all experts."""
        hidden, index, weights = args
        start, stop = self._experts
        local = torch.where((index >= start) & (index < stop), index - start, stop - start)
        with self._alone():
            return super().run(leaves, (hidden, local, weights), kwargs)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """The module has these experts only, and is told that others are elsewhere."""
        start, stop = self._experts
        settings = {"num_experts": stop - start, "_is_expert_parallel": True}
        before = {name: getattr(self.module, name) for name in settings if hasattr(self.module, name)}
        for name in before:
            setattr(self.module, name, settings[name])

        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self.module, name, value)


def guard(node: Node) -> None:
    """Refuse what computes with the node's weights past its module."""
    for parameters, leaf, _ in node.bindings:
        unbound = parameters[leaf]
        assert unbound is not None
        unbound.__class__ = Guarded


def check_knows_of_others(module: nn.Module) -> None:
    """Older versions of transformers know of experts elsewhere in their grouped product alone.

    Raises:
        UnsupportedModelError: this module does not, with the product that its config asks for.
    """
    config = getattr(module, "config", None)
    implementation = getattr(config, "_experts_implementation", None)
    if implementation in ("eager", "batched_mm") and not hasattr(module, "_is_expert_parallel"):
        raise UnsupportedModelError(
            f"{type(module).__name__} of transformers {transformers.__version__} computes all of its experts or none "
            f"with {implementation!r}. Set model.expert_parts to 1, or take a newer version of transformers."
        )


def join(nodes: Iterable[Node]) -> None:
    """Replace the forward of each module whose experts are among the nodes by the sum over its ranges, in order."""
    ranges: dict[nn.Module, list[ExpertsNode]] = {}
    for node in nodes:
        if isinstance(node, ExpertsNode):
            ranges.setdefault(node.module, []).append(node)
    for module, found in ranges.items():
        module.forward = _sum(found)


def _sum(nodes: Sequence[ExpertsNode]) -> Callable[..., Tensor]:
    """In the dtype of the hidden states, as every implementation of transformers gives it."""

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        total: Tensor = nodes[0](hidden_states, top_k_index, top_k_weights)
        for node in nodes[1:]:
            total = total + node(hidden_states, top_k_index, top_k_weights)
        return total

    return forward
