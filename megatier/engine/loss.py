"""Head and loss as one node: cross-entropy over chunks of tokens, so that the logits never exist whole.

The head's module returns the hidden states unchanged; the model's `loss_function` runs this node on them. Linear scales
of the logits (Granite, Cohere) commute with the head and stay where Hugging Face has them; a soft cap does not, and is
applied here.

For logits z = cap * tanh(h W' / cap) (or h W'), labels y and N counted tokens, loss = sum(logsumexp(z) - z[y]) / N and
d loss / d z = (softmax(z) - onehot(y)) / N. Both gradients are made in the forward, where the logits are at hand; the
head's is summed over chunks in fp32.

Source: the fused linear cross-entropy of Liger Kernel (arXiv 2410.10989).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from megatier.engine.gradient import Gradients
from megatier.engine.node import Node
from megatier.engine.stage import Stage
from megatier.errors import UnsupportedModelError
from megatier.store.tier import Phase

IGNORED = -100
"""Label of a token that does not count."""


class FusedLoss:
    """Replaces a model's head and loss function."""

    def __init__(self, model: PreTrainedModel, head: Node, chunk: int) -> None:
        """Install on the model.

        Args:
            model: the skeleton.
            head: node of the output embedding; its unit holds the head's weight (an embedding's, when tied).
            chunk: tokens per chunk.

        Raises:
            UnsupportedModelError: the head has a bias.
        """
        if len(head.names) != 1:
            raise UnsupportedModelError(f"{head.module_name} has a bias; set model.fused_loss to false.")
        self._head, self._chunk = head, chunk
        self._cap = _take_softcap(model)
        compilation = head.stage.compilation
        self._slopes = slopes if compilation is None else compilation(slopes, "the loss")
        head.module.forward = lambda hidden: hidden
        model.loss_function = self

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: int | None = None,
        shift_labels: Tensor | None = None,
        **_: Any,  # noqa: ANN401 - Hugging Face passes what its own loss functions take
    ) -> Tensor:
        """The mean cross-entropy, or the sum over num_items_in_batch.

        Args:
            logits: hidden states [B, T, H], under the name that Hugging Face gives the head's output.
            labels: [B, T], to be shifted by one; -100 does not count.
            vocab_size: ignored; the head knows.
            num_items_in_batch: tokens that the whole step counts.
            shift_labels: [B, T], shifted already.
        """
        hidden = logits.reshape(-1, logits.shape[-1])
        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        targets = shift_labels.reshape(-1)
        # Never read by the host, which would wait for the device and for every copy before it.
        counted = (targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        count = torch.zeros((), dtype=torch.float64, device=hidden.device) + counted
        stage = self._head.stage
        if not torch.is_grad_enabled():
            use = stage.source.enter(self._head.unit, Phase.FORWARD, stage.gradients.group)
            loss = self._forward(hidden, self._weight(use.bytes), targets, count, None)
            use.leave()
            return loss
        if self._head.trains:
            stage.gradients.expect(self._head.unit, 1)
        result: Tensor = _LossFunction.apply(self, hidden, stage.anchor, targets, count)  # type: ignore[no-untyped-call]
        return result

    def run(
        self, hidden: Tensor, targets: Tensor, count: Tensor, *, passes: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Loss (fp32 scalar); gradient of hidden (its dtype) if it passes on, of the head (fp32 [V, H]) if trained."""
        stage = self._head.stage
        use = stage.source.enter(self._head.unit, Phase.FORWARD, stage.gradients.group)
        weight = self._weight(use.bytes)
        to_hidden = torch.empty_like(hidden) if passes else None
        to_head = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if self._head.trains else None
        grads = to_hidden, to_head
        loss = self._forward(hidden, weight, targets, count, grads)
        use.leave()
        return loss, *grads

    def deliver(self, grad: Tensor) -> None:
        """Hand the head's gradient over."""
        gradients = self._head.stage.gradients
        gradients.add(self._head.unit, [(self._head.names[0], grad)])
        gradients.close(self._head.unit)

    def _weight(self, weights: Tensor) -> Tensor:
        return self._head.leaves(weights)[0].detach()

    def _forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        count: Tensor,
        grads: tuple[Tensor | None, Tensor | None] | None,
    ) -> Tensor:
        loss = hidden.new_zeros((), dtype=torch.float32)
        scale = count.reciprocal().float()
        with self._head.stage.arithmetic():
            for start in range(0, hidden.shape[0], self._chunk):
                rows = slice(start, start + self._chunk)
                logits = hidden[rows] @ weight.t()
                if grads is None:
                    loss += cross_entropy(logits, targets[rows], self._cap)
                    continue
                part, slope = self._slopes(logits, targets[rows], self._cap, scale)
                loss += part
                if (to_hidden := grads[0]) is not None:
                    torch.mm(slope, weight, out=to_hidden[rows])
                if (to_head := grads[1]) is not None:
                    add_product(to_head, slope.t(), hidden[rows])
        return loss / count.float()


class StepLoss:
    """A model's loss function, divided by what the whole step counts. Some models do not pass that on to it.

    Its backward is where a group's begins, also where that comes to nothing that is trained.
    """

    def __init__(self, model: PreTrainedModel, stage: Stage) -> None:
        """Take the place of the model's own."""
        self.divisor: int | None = None
        """Tokens that the step counts; None: the mean over the batch."""
        self._function: Callable[..., Tensor] = model.loss_function
        self._stage = stage
        model.loss_function = self

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401 - whatever the model gives
        """The loss."""
        if self.divisor is not None:
            kwargs["num_items_in_batch"] = self.divisor
        loss = self._function(*args, **kwargs)
        watched: Tensor = _Watched.apply(loss, self._stage.anchor, self._stage.gradients)  # type: ignore[no-untyped-call]
        return watched


def check_calls_loss_function(model: PreTrainedModel, remedy: str) -> None:
    """Most models take their loss by way of `loss_function`.

    Raises:
        UnsupportedModelError: this one does not.
    """
    if "loss_function" not in inspect.unwrap(type(model).forward).__code__.co_names:
        raise UnsupportedModelError(
            f"{type(model).__name__} of transformers {transformers.__version__} takes its loss by itself, where it "
            f"cannot be replaced; {remedy}, or take another version of transformers."
        )


def cross_entropy(logits: Tensor, targets: Tensor, cap: float | None) -> Tensor:
    """Sum over counted tokens of logsumexp(z) - z[target]; logits [N, V], targets [N]. Returns an fp32 scalar."""
    z = _capped(logits.float(), cap)
    found = z.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return torch.where(targets != IGNORED, torch.logsumexp(z, -1) - found, 0.0).sum()


def slopes(logits: Tensor, targets: Tensor, cap: float | None, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The loss as above, and `scale` times its derivative by the logits (before the cap), in their dtype [N, V]."""
    z = _capped(logits.float(), cap)
    counted, index = targets != IGNORED, targets.clamp(min=0)[:, None]
    norms = torch.logsumexp(z, -1, keepdim=True)
    loss = torch.where(counted, (norms - z.gather(1, index))[:, 0], 0.0).sum()
    # A comparison, not a scatter: deterministic, and one pass when compiled.
    is_target = torch.arange(z.shape[1], device=z.device) == index
    slope = torch.exp(z - norms) - is_target.to(z.dtype)
    if cap:
        slope = slope * (1 - (z / cap) ** 2)
    return loss, (slope * (counted[:, None] * scale)).to(logits.dtype)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to total, fp32 [M, N], in place; on CUDA nothing is rounded in between."""
    if total.is_cuda and left.dtype is not torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.add_(left @ right)


def _capped(z: Tensor, cap: float | None) -> Tensor:
    return torch.tanh(z / cap) * cap if cap else z


class _LossFunction(torch.autograd.Function):
    """Gradients are made in the forward; the backward scales them and hands the head's over."""

    @staticmethod
    def forward(ctx: Any, fused: FusedLoss, hidden: Tensor, anchor: Tensor, targets: Tensor, count: Tensor) -> Tensor:  # noqa: ANN401
        loss, hidden_grad, head_grad = fused.run(hidden.detach(), targets, count, passes=ctx.needs_input_grad[1])
        ctx.fused, ctx.hidden_grad, ctx.head_grad = fused, hidden_grad, head_grad
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        fused, hidden_grad, head_grad = ctx.fused, ctx.hidden_grad, ctx.head_grad
        ctx.fused = ctx.hidden_grad = ctx.head_grad = None
        if head_grad is not None:
            fused.deliver(head_grad.mul_(grad))
        return None, None if hidden_grad is None else hidden_grad.mul_(grad), None, None, None


class _Watched(torch.autograd.Function):
    """The loss itself; a backward from it is watched. By the anchor it has one even if no gradient leads further."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, anchor: Tensor, gradients: Gradients) -> Tensor:  # noqa: ANN401
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        ctx.gradients.watch_backward()
        return grad, None, None


def _take_softcap(model: PreTrainedModel) -> float | None:
    """Move the final soft cap from the model's forward into the loss."""
    text = model.config.get_text_config()
    cap = getattr(text, "final_logit_softcapping", None)
    if cap:
        for config in (text, model.config):  # some configs are strict dataclasses that refuse None
            if "final_logit_softcapping" in config.__dict__:
                config.__dict__["final_logit_softcapping"] = None
    return cap
