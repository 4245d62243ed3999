"""Lends copies of a unit's weights to code that computes with them outside the unit's module (`Node.lent`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatier.engine.backward import begin_backward
from megatier.engine.bound_module import BoundModule
from megatier.tier import Phase


class LentWeights(torch.autograd.Function):
    """Copies of a unit's weights in the order of `leaves`. Their gradients are one summand of the unit's gradient."""

    @staticmethod
    def forward(ctx: Any, node: BoundModule, anchor: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
        """Copy the weights."""
        ctx.node = node
        ctx.number = node.stage.gradients.forward
        use = node.stage.source.enter(node.unit, Phase.FORWARD, node.stage.gradients.group)
        leaves = node.leaves(use.bytes)

        # The slot is reused when the use is over, while the copies live until the backward.
        copies = tuple(leaf.detach().clone() for leaf in leaves)
        use.leave()
        frozen = (copy for copy, leaf in zip(copies, leaves, strict=True) if not leaf.requires_grad)
        ctx.mark_non_differentiable(*frozen)

        return copies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:  # noqa: ANN401
        """Add the gradients of the copies to the unit's."""
        node: BoundModule = ctx.node
        gradients = node.stage.gradients
        purpose = begin_backward(node.stage, ctx.number)

        # The weights are not loaded again, since the code that was lent the copies needs no others.
        if purpose.trains:
            parts = zip(node.names, grads, strict=True)
            gradients.add(node.unit, [(name, grad) for name, grad in parts if node.requires_grad_by_name[name]])
            gradients.end_use(node.unit)
        elif not purpose.retains_graph:
            gradients.cancel_use(node.unit, 1)
        return None, None
