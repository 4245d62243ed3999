"""Tells what a backward is for that comes to a node: the gradients of a step, or those of inputs alone.

`loss.backward()` trains. `torch.autograd.grad(loss, x)` and `loss.backward(inputs=[x])` ask for gradients of inputs and
leave the weights' own as they are. Autograd tells one from the other by the leaves that it comes to: every node has the
anchor as an input, and only a backward that trains comes to the anchor's end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatier.engine.stage import Stage
from megatier.errors import StreamedModelError
from megatier.tier import Leg

GRAPH_FREED = (
    "Trying to backward through the graph of a streamed module a second time: it went with the first backward, unless "
    "that had retain_graph=True."
)
"""What autograd says of a plain graph, which serves one backward."""


def sever(result: Tensor, anchor: Tensor, module_name: str) -> Tensor:
    """Return a module's result outside of the model's forward, such that a backward through it is refused.

    Args:
        result: a tensor of the result.
        anchor: a scalar that requires a gradient, so that a backward comes.
        module_name: the name of the module in the model.
    """
    # Autograd lets no integer require a gradient, so no backward can come by way of one.
    if not result.is_floating_point():
        return result
    severed: Tensor = _Severed.apply(result, anchor, module_name)  # type: ignore[no-untyped-call]
    return severed


class _Severed(torch.autograd.Function):
    """A tensor through which no gradient passes."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, anchor: Tensor, module_name: str) -> Tensor:  # noqa: ANN401
        ctx.module_name = module_name
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:  # noqa: ANN401
        raise StreamedModelError(
            f"{ctx.module_name} was called outside of the model's forward, where no gradient comes to its weights or "
            "passes through it. Call it in `with streamed.one_forward():`, together with the model's own forward and "
            "before the backward; or take what it gave with .detach(). Drop this step with abandon()."
        )


class Purpose(NamedTuple):
    """The purpose of a backward."""

    trains: bool
    """Whether the gradients of weights are a part of the step; else those of inputs alone are wanted."""
    retains_graph: bool
    """Whether another backward may come over the same graph."""


def begin_backward(stage: Stage, forward: int) -> Purpose:
    """Say what a backward is for that has come to a node. Call it in the node's backward, first of all.

    Args:
        stage: what the nodes share.
        forward: the number of the forward that the node is of.

    Raises:
        StreamedModelError: it is one that a streamed model cannot have.
    """
    if torch.is_grad_enabled():
        raise StreamedModelError(
            "a backward with create_graph=True asks for the gradient of a gradient, and the backward of a streamed "
            "model has no graph of its own. Compute second derivatives (Hessian-vector products, gradient penalties) "
            "on a plain model."
        )

    # Autograd knows before it starts which nodes a backward will run. The anchor's end is among them only if the
    # backward adds to the gradients of leaves, as `loss.backward()` does.
    gradients = stage.gradients
    if torch._C._will_engine_execute_node(stage.end):
        gradients.watch_backward(forward)
        # A group has one backward that trains, so nothing has to stay for a second one.
        return Purpose(trains=True, retains_graph=False)

    # Each layer of the model comes here, and the leg begins once: the number of the task tells backwards apart.
    is_kept = torch._C._autograd._get_current_graph_task_keep_graph()
    task = torch._C._current_graph_task_id()
    if gradients.watch_inputs(forward, task, ends=not is_kept):
        stage.source.begin_leg(Leg.INPUTS)
    return Purpose(trains=False, retains_graph=is_kept)
