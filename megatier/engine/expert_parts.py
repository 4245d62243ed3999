"""Splits the experts of a fused module into several nodes, one for each range, and adds up their results.

This uses transformers' expert parallelism: a module that owns some of the experts skips tokens whose expert index is
one past its last. A node runs the module on rows of the parameters, with indices relative to its first expert, and
gives all other experts that index.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from megatier.engine.node import Node
from megatier.errors import UnsupportedModelError
from megatier.guards.unbound_weights import Guarded
from megatier.patch import patched


class ExpertsNode(Node):
    """A node for a range of a fused module's experts. `install_sums` makes one forward of all ranges."""

    def _install(self) -> None:
        """Leave the module's forward alone: the module has several nodes, and `install_sums` replaces it once.

        Raises:
            UnsupportedModelError: the module cannot compute with some of its experts alone.
        """
        check_knows_of_others(self.module)
        guard(self)

    @property
    def can_stay_bound(self) -> bool:
        """False: the other ranges of the module bind their weights in the same places."""
        return False

    def run(self, weights: Sequence[Tensor], args: Any, kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Compute what these experts contribute, [tokens, hidden], from (hidden states, indices, weights) of all."""
        hidden, expert, router_weights = args
        with self._alone() as (start, stop):
            is_own = (expert >= start) & (expert < stop)
            # The index past the last expert means that a token goes elsewhere.
            elsewhere = stop - start
            local = torch.where(is_own, expert - start, elsewhere)
            local_args = (hidden, local, router_weights)
            return super().run(weights, local_args, kwargs)

    @contextlib.contextmanager
    def resumed(self) -> Iterator[None]:
        """Provide a context for the backward of the module's graph, which has these experts only."""
        with super().resumed(), self._alone():
            yield

    @contextlib.contextmanager
    def _alone(self) -> Iterator[tuple[int, int]]:
        """Let the module have only these experts inside, as in expert parallelism. Yield their range."""
        assert self.experts is not None
        start, stop = self.experts
        settings = {"num_experts": stop - start, "_is_expert_parallel": True}
        # Older versions of transformers lack one of them, and no unused attribute is left in a module.
        for name in list(settings):
            if not hasattr(self.module, name):
                del settings[name]
        with patched(vars(self.module), **settings):
            yield start, stop


def guard(node: Node) -> None:
    """Make computing with the node's weights outside its module an error."""
    for parameters, leaf, _ in node.bindings:
        unbound = parameters[leaf]
        assert unbound is not None
        unbound.__class__ = Guarded


def check_knows_of_others(module: nn.Module) -> None:
    """Check that a module can compute with some of its experts.

    Raises:
        UnsupportedModelError: it cannot, with the experts implementation that its config asks for.
    """
    # Older versions of transformers support this only in their grouped implementation.
    config = getattr(module, "config", None)
    implementation = getattr(config, "_experts_implementation", None)
    if implementation in ("eager", "batched_mm") and not hasattr(module, "_is_expert_parallel"):
        raise UnsupportedModelError(
            f"{type(module).__name__} of transformers {transformers.__version__} computes all of its experts or none "
            f"with {implementation!r}. Set model.expert_parts to 1, or take a newer version of transformers."
        )


def install_sums(nodes: Iterable[Node]) -> None:
    """Replace the forward of each module whose experts are split by the sum over its ranges, in order."""
    ranges: dict[nn.Module, list[ExpertsNode]] = {}
    for node in nodes:
        if isinstance(node, ExpertsNode):
            ranges.setdefault(node.module, []).append(node)

    for module, of_module in ranges.items():
        module.forward = _sum(of_module)


def _sum(nodes: Sequence[ExpertsNode]) -> Callable[..., Tensor]:
    """Return the forward of a whole module. Its output has the dtype of the hidden states, as in transformers."""

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        # Always in the order of the ranges, since the order changes the bits of a sum.
        first, *others = nodes
        total: Tensor = first(hidden_states, top_k_index, top_k_weights)
        for node in others:
            total = total + node(hidden_states, top_k_index, top_k_weights)
        return total

    return forward
