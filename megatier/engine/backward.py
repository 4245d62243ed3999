"""Tells whether a backward that reaches a node trains, or asks only for gradients of inputs.

`loss.backward()` trains. `torch.autograd.grad(loss, x)` and `loss.backward(inputs=[x])` ask for gradients of inputs and
leave those of weights alone. Autograd tells the two apart by the leaves that a backward reaches: every node has the
stage's anchor as an input, and only a backward that trains accumulates into the anchor's gradient.
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
"""The message of autograd for a graph whose backward has run."""


def sever(result: Tensor, anchor: Tensor, module_name: str) -> Tensor:
    """Return a result of a module that was called outside of the model's forward. A backward through it is refused.

    Args:
        result: one tensor of the result.
        anchor: a scalar that requires a gradient, so that autograd calls the backward.
        module_name: the name of the module in the model.
    """
    # An integer tensor cannot require a gradient, so no backward can pass through one.
    if not result.is_floating_point():
        return result
    severed: Tensor = _Severed.apply(result, anchor, module_name)  # type: ignore[no-untyped-call]
    return severed


class _Severed(torch.autograd.Function):
    """The identity, with a backward that raises."""

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
    """What a backward is for."""

    trains: bool
    """Whether it accumulates gradients of weights. Otherwise only gradients of inputs are asked for."""
    retains_graph: bool
    """Whether another backward may run over the same graph."""


def begin_backward(stage: Stage, forward: int) -> Purpose:
    """Return what the running backward is for. A node calls this first in its backward.

    Args:
        stage: the state that all nodes share.
        forward: the number of the forward in which the node ran.

    Raises:
        StreamedModelError: a streamed model does not support this kind of backward.
    """
    if torch.is_grad_enabled():
        raise StreamedModelError(
            "a backward with create_graph=True asks for the gradient of a gradient, and the backward of a streamed "
            "model has no graph of its own. Compute second derivatives (Hessian-vector products, gradient penalties) "
            "on a plain model."
        )

    # Autograd knows beforehand which nodes a backward will run. The anchor's accumulation node is among them only if
    # the backward accumulates into leaves, as `loss.backward()` does.
    gradients = stage.gradients
    if torch._C._will_engine_execute_node(stage.end):
        gradients.watch_backward(forward)
        # A group has one backward that trains, so its graph need not be retained.
        return Purpose(trains=True, retains_graph=False)

    # Every layer calls this, but the leg begins only once. The id of the graph task tells backwards apart.
    is_kept = torch._C._autograd._get_current_graph_task_keep_graph()
    task = torch._C._current_graph_task_id()
    if gradients.watch_inputs(forward, task, ends=not is_kept):
        stage.source.begin_leg(Leg.INPUTS)
    return Purpose(trains=False, retains_graph=is_kept)
