"""Refuses models whose units hand on tensors past their modules' arguments and results, losing gradients.

A node runs its module on leaves of its own, so the graph of one forward ends in them. A tensor that another module left
in an attribute, a closure, a global or a context variable brings a graph that ends elsewhere. In a plain model autograd
goes on there; here it would stop, in silence. So the graphs of each module's first forwards, and of the first losses,
are walked once to their ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node as GraphNode
from torch.utils._pytree import tree_leaves

from megatier.errors import UnsupportedModelError

FORWARDS_CHECKED = 2
"""The number of forwards of each module, and of losses, that are looked at. The second one sees what the first one
left."""
TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))
"""The attributes that torch itself keeps in a module: parameters, buffers, hooks."""
OWNER = "_megatier_module"
"""The attribute of a leaf that names the module for which it was made."""


def note_owner(leaf: Tensor, module_name: str) -> Tensor:
    """Note on a leaf the module in whose forward it is used; returns the leaf."""
    setattr(leaf, OWNER, module_name)
    return leaf


def check_inside(
    module_name: str,
    outputs: Iterable[Tensor | None],
    own_leaves: Sequence[Tensor],
    model: nn.Module,
) -> None:
    """Check, after a module's forward, that its graph ends in its own leaves.

    Args:
        module_name: the module.
        outputs: its outputs, with their graphs.
        own_leaves: the leaves that stand for its inputs and weights.
        model: the message names the attribute of a module by which a tensor came.

    Raises:
        UnsupportedModelError: it computed with another tensor that requires a gradient.
    """
    # By identity, since tensors compare element by element.
    own_ids = {id(leaf) for leaf in own_leaves}
    nodes = _graph_nodes(outputs)

    for leaf in _graph_leaves(nodes):
        if id(leaf) in own_ids:
            continue

        maker = getattr(leaf, OWNER, None)
        source = "made outside of it" if maker is None else f"made in the forward of {maker}"
        raise UnsupportedModelError(
            f"{module_name} computes with a tensor that requires a gradient, but is none of its arguments: "
            f"{_name(model, nodes)}, {source}. Its gradient would be lost, so this model cannot be streamed as it is: "
            "pass the tensor as an argument, or in a container that is one."
        )


class OutputCheck:
    """Checks that the graphs of a model's first outputs end in no leaf of a module's own."""

    def __init__(self, model: nn.Module) -> None:
        """Begin before the first output."""
        self._model = model
        self._num_unchecked = FORWARDS_CHECKED
        """The number of outputs that are still to be looked at."""

    def __call__(self, outputs: Any) -> None:  # noqa: ANN401 - whatever the model gives
        """Look at the outputs of a forward with gradients.

        Raises:
            UnsupportedModelError: the model computed with a tensor that a module made and did not return.
        """
        # A walk takes the host's time in each step, so later outputs are believed.
        if not self._num_unchecked:
            return
        self._num_unchecked -= 1
        nodes = _graph_nodes(x for x in tree_leaves(outputs) if torch.is_tensor(x))

        for leaf in _graph_leaves(nodes):
            if (maker := getattr(leaf, OWNER, None)) is not None:
                raise UnsupportedModelError(
                    f"{type(self._model).__name__} computes with a tensor that {maker} made in its forward and did not "
                    f"return: {_name(self._model, nodes)}. Its gradient would be lost, so this model cannot be "
                    "streamed as it is: return the tensor, or leave it in a container that is an argument."
                )


def lost_gradient_error(module_name: str) -> UnsupportedModelError:
    """Make the error of a backward that comes into the graph of a forward by another way than the node's."""
    return UnsupportedModelError(
        f"a tensor that {module_name} made in its forward, but did not return, was used elsewhere, so its gradient is "
        "lost. This model cannot be streamed as it is: return the tensor, or leave it in a container that is an "
        "argument."
    )


def _graph_nodes(outputs: Iterable[Tensor | None]) -> set[GraphNode]:
    """Return all nodes of the graphs that tensors come from."""
    seen: set[GraphNode] = set()
    waiting = [x.grad_fn for x in outputs if x is not None and x.grad_fn is not None]

    while waiting:
        # A list and no recursion, since a graph is deeper than Python's stack.
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(before for before, _ in node.next_functions if before is not None)

    return seen


def _graph_leaves(nodes: Iterable[GraphNode]) -> Iterator[Tensor]:
    """Return the leaves in which a graph ends."""
    # A graph names a leaf by the node that would add to its gradient.
    return (node.variable for node in nodes if type(node).__name__ == "AccumulateGrad")  # type: ignore[attr-defined]


def _name(model: nn.Module, nodes: set[GraphNode]) -> str:
    """Name the tensor that brought a foreign graph, if a module holds it."""
    for module_name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in TORCH_ATTRIBUTES or not isinstance(value, list | tuple | dict | Tensor):
                continue
            for tensor in tree_leaves(value):
                is_source = torch.is_tensor(tensor) and tensor.grad_fn in nodes
                if is_source:
                    # The model itself has the empty name, after which a dot would be left in front.
                    return f"{module_name}.{attribute} {tuple(tensor.shape)}".lstrip(".")

    return "it comes by no attribute of a module, so by a closure, a global or a context variable"
