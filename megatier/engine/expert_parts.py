"""Splits the experts of a fused module into several nodes, one for each range, and adds up their results.

transformers has expert parallelism: a module that owns some of the experts skips tokens whose expert has the number one
past its last. A node uses that. It runs the module on rows of the parameters, with indices counted from its first
expert, and gives this number to all other experts.
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
    """A node for a range of the experts of a fused module. `install_sums` makes one forward of all ranges."""

    def _install(self) -> None:
        """Leave the module's forward as it is, for `install_sums`, since this module has several nodes.

        Raises:
            UnsupportedModelError: the module does not know of experts that are elsewhere.
        """
        check_knows_of_others(self.module)
        guard(self)

    @property
    def can_stay_bound(self) -> bool:
        """Whether its weights may stay bound: not, since other ranges of the module have them in the same places."""
        return False

    def run(self, weights: Sequence[Tensor], args: Any, kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Compute what these experts add, [tokens, hidden], from (hidden states, indices, weights) of all experts."""
        hidden, expert, router_weights = args
        with self._alone() as (start, stop):
            is_own = (expert >= start) & (expert < stop)
            # The number behind the last expert says that a token goes elsewhere.
            elsewhere = stop - start
            local = torch.where(is_own, expert - start, elsewhere)
            local_args = (hidden, local, router_weights)
            return super().run(weights, local_args, kwargs)

    @contextlib.contextmanager
    def resumed(self) -> Iterator[None]:
        """Yield a context for the backward of a graph of the module, which has these experts only."""
        with super().resumed(), self._alone():
            yield

    @contextlib.contextmanager
    def _alone(self) -> Iterator[tuple[int, int]]:
        """Give the module these experts only, for a while, as if others were elsewhere; yields their range."""
        assert self.experts is not None
        start, stop = self.experts
        settings = {"num_experts": stop - start, "_is_expert_parallel": True}
        # Older versions of transformers have not both of them, and a name that nobody reads is not left in a module.
        for name in list(settings):
            if not hasattr(self.module, name):
                del settings[name]
        with patched(vars(self.module), **settings):
            yield start, stop


def guard(node: Node) -> None:
    """Refuse from now on what computes with the node's weights past its module."""
    for parameters, leaf, _ in node.bindings:
        unbound = parameters[leaf]
        assert unbound is not None
        unbound.__class__ = Guarded


def check_knows_of_others(module: nn.Module) -> None:
    """Check that a module can compute with some of its experts.

    Raises:
        UnsupportedModelError: it cannot, with the product that its config asks for.
    """
    # Older versions of transformers know of experts elsewhere in their grouped product alone.
    config = getattr(module, "config", None)
    implementation = getattr(config, "_experts_implementation", None)
    if implementation in ("eager", "batched_mm") and not hasattr(module, "_is_expert_parallel"):
        raise UnsupportedModelError(
            f"{type(module).__name__} of transformers {transformers.__version__} computes all of its experts or none "
            f"with {implementation!r}. Set model.expert_parts to 1, or take a newer version of transformers."
        )


def install_sums(nodes: Iterable[Node]) -> None:
    """Replace the forward of each module whose experts are among the nodes by the sum over its ranges, in order."""
    ranges: dict[nn.Module, list[ExpertsNode]] = {}
    for node in nodes:
        if isinstance(node, ExpertsNode):
            ranges.setdefault(node.module, []).append(node)

    for module, of_module in ranges.items():
        module.forward = _sum(of_module)


def _sum(nodes: Sequence[ExpertsNode]) -> Callable[..., Tensor]:
    """Return the forward of a whole module. Its output has the dtype of the hidden states, as in transformers."""

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        # In the order of the ranges, always: a sum in another order has other bits.
        first, *others = nodes
        total: Tensor = first(hidden_states, top_k_index, top_k_weights)
        for node in others:
            total = total + node(hidden_states, top_k_index, top_k_weights)
        return total

    return forward
