"""Normalises the loss of groups by the tokens of the whole step, and watches for the group's backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatier.engine.backward import begin_backward
from megatier.engine.head import calling_for_loss
from megatier.engine.loss import FusedLoss
from megatier.engine.stage import Stage
from megatier.errors import UnsupportedModelError
from megatier.guards.model_methods import forward_through


class StepLoss:
    """A model's loss function, divided by the tokens that the whole step counts, which some models do not pass to it.

    A group's backward starts here, even if it reaches no trained parameter.
    """

    def __init__(self, model: PreTrainedModel, stage: Stage, fused: FusedLoss | None = None) -> None:
        """Replace the model's loss function inside the model's forward.

        Args:
            model: the skeleton.
            stage: the state that the model's nodes share.
            fused: the loss that is fused with the head; None: the model's current loss function is called in each
                forward.
        """
        self.divisor: int | None = None
        """The tokens that the step counts; None: the mean over the batch is wanted."""
        self._model = model
        self._fused = fused
        self._function: Callable[..., Tensor] = model.loss_function
        self._stage = stage
        self._losses: list[tuple[Tensor, Tensor]] | None = None
        """The losses of a weighed forward, each with the tensor that the model got for it. Otherwise None, since
        holding a loss would hold the graph of its whole forward."""
        model.forward = forward_through(self._run, model.forward)

    def _run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run the model's own forward. The loss function is read each time, since users may change it."""
        fused = self._fused
        around = contextlib.nullcontext() if fused is None else fused.standing_in()
        with around:
            self._function = fused or self._model.loss_function
            with calling_for_loss(self._model, self):
                return forward(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401 - whatever the model gives
        """Return the loss of the model's outputs."""
        if self.divisor is not None:
            kwargs["num_items_in_batch"] = self.divisor
        loss = self._function(*args, **kwargs)
        watched: Tensor = _Watched.apply(loss, self._stage.anchor, self._stage)  # type: ignore[no-untyped-call]
        if self._losses is not None:
            self._losses.append((loss, watched))
        return watched

    def weighed(self, forward: Callable[[], Tensor], share: float) -> Tensor:
        """Run a forward in which the model's own additions to the loss (a router's balance) weigh by the group's share.

        The loss function's part is already divided by the step's count, so that groups add up to the step's loss.

        Args:
            forward: returns the model's loss.
            share: the group's share of the tokens that the step counts. If it is 1, the loss is unchanged.

        Raises:
            UnsupportedModelError: the loss function's part cannot be told apart.
        """
        # The loss function's part is needed by itself, whatever the model makes of it afterwards.
        losses = self._losses = []
        try:
            total = forward()
        finally:
            self._losses = None

        # Most models add to it in place, so the same tensor may come back with another value.
        if share == 1 or (len(losses) == 1 and total is losses[0][1] and not total._version):
            return total

        if len(losses) != 1:
            raise UnsupportedModelError(
                f"the model calls its loss function {len(losses)} times in a forward, so that groups cannot share the "
                "rest of its loss; set train.groups to 1."
            )

        # In fp32 (1 - share) + share is exactly 1, so the gradient of the loss function's part keeps its bits.
        rounded = torch.tensor(share, dtype=torch.float32, device="cpu").item()
        return torch.lerp(losses[0][0], total, rounded)


class _Watched(torch.autograd.Function):
    """The identity, with a backward that is watched. The anchor makes sure that it is called."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, anchor: Tensor, stage: Stage) -> Tensor:  # noqa: ANN401
        ctx.stage = stage
        ctx.number = stage.gradients.forward

        # A new tensor, since the model may add to it in place, and `weighed` needs the loss without that.
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        begin_backward(ctx.stage, ctx.number)
        return grad, None, None
