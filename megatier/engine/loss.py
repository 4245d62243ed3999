"""Head and loss as one node: cross-entropy over chunks of tokens, so that the logits never exist whole.

The head's module returns the hidden states unchanged; the model's `loss_function` runs this node on them. Linear scales
of the logits (Granite, Cohere) commute with the head and stay where Hugging Face has them. A soft cap does not, and is
applied here. `head` has found out before that the model does nothing else between the two.

For logits z = cap * tanh((h W' + b) / cap) (or h W' + b), labels y and N counted tokens,
loss = sum(logsumexp(z) - z[y]) / N and d loss / d z = (softmax(z) - onehot(y)) / N. All gradients are made in the
forward, where the logits are at hand; the head's are summed over chunks in fp32.

Source: the fused linear cross-entropy of Liger Kernel (arXiv 2410.10989).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from megatier.engine.backward import GONE, begin_backward
from megatier.engine.head import IGNORED, capped, product_of, without_softcap
from megatier.engine.node import Node
from megatier.engine.stage import Stage
from megatier.errors import UnsupportedModelError
from megatier.tier import Phase


class FusedLoss:
    """Replaces a model's head and loss function."""

    def __init__(self, model: PreTrainedModel, head: Node, chunk: int) -> None:
        """Install on the model.

        Args:
            model: the skeleton, for which `head.can_fuse` was true.
            head: the node of the output embedding. Its unit holds the head's weight (that of the embedding, if tied).
            chunk: the number of tokens in a chunk.
        """
        self.stage = head.stage
        """What all nodes of the model share."""
        self._head = head
        self._chunk = chunk
        product = product_of(head.module)
        assert product is not None
        self._names = {leaf: tensor.name for own, leaf, tensor in head.bindings if own is product._parameters}
        with without_softcap(model) as cap:
            self._cap = cap

        # Taken out in each forward and not for good, since the config is exported.
        if cap is not None:
            model.forward = _uncapped(model)

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
        """Return the mean cross-entropy, or the sum over num_items_in_batch.

        Args:
            logits: hidden states [B, T, H], under the name that Hugging Face gives the head's output.
            labels: [B, T], to be shifted by one; -100 does not count.
            vocab_size: ignored; the head knows.
            num_items_in_batch: tokens that the whole step counts.
            shift_labels: [B, T], shifted already.
        """
        # Some models (Mamba) cast logits to fp32. The products are in the head's own dtype all the same.
        hidden = logits.reshape(-1, logits.shape[-1])
        hidden = hidden.to(product_dtype(hidden.device, self._head.dtype))
        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        targets = shift_labels.reshape(-1)

        # Never read by the host, which would wait for the device and for every copy before it.
        counted = (targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        count = torch.zeros((), dtype=torch.float64, device=hidden.device) + counted

        stage = self._head.stage
        if not torch.is_grad_enabled():
            use = stage.source.enter(self._head.unit, Phase.FORWARD, stage.gradients.group)
            loss = self._forward(hidden, self._weights(use.bytes, hidden.dtype), targets, count, None)
            use.leave()
            return loss

        # Announced before autograd knows of the loss, as in a call of a node.
        if self._head.trains:
            stage.gradients.expect(self._head.unit, 1)
        result: Tensor = _LossFunction.apply(self, hidden, stage.anchor, targets, count)  # type: ignore[no-untyped-call]
        return result

    def run(self, hidden: Tensor, targets: Tensor, count: Tensor, *, passes: bool) -> tuple[Tensor, _Grads]:
        """Compute the loss, an fp32 scalar, and its gradients.

        Args:
            hidden: hidden states [tokens, H].
            targets: [tokens].
            count: tokens that the step counts.
            passes: a gradient of the hidden states is wanted as well as those of the head's weights.
        """
        stage = self._head.stage
        use = stage.source.enter(self._head.unit, Phase.FORWARD, stage.gradients.group)
        weights = self._weights(use.bytes, hidden.dtype)
        grads = _Grads(torch.empty_like(hidden) if passes else None)
        for leaf, tensor in weights.items():
            if self._head.is_trained[self._names[leaf]]:
                grads.of_head[leaf] = torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device)

        loss = self._forward(hidden, weights, targets, count, grads)
        use.leave()
        return loss, grads

    def deliver(self, grads: Mapping[str, Tensor]) -> None:
        """Hand the head's gradients over, by the names that its module has for them."""
        gradients = self.stage.gradients
        gradients.add(self._head.unit, [(self._names[leaf], grad) for leaf, grad in grads.items()])
        gradients.close(self._head.unit)

    def forgo(self) -> None:
        """Say that the head's gradients are never handed over."""
        self.stage.gradients.forgo(self._head.unit, 1)

    def _weights(self, plane: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """The head's weight [V, H] and, if it has one, bias [V]; under autocast these are copies."""
        by_name = dict(zip(self._head.names, self._head.leaves(plane), strict=True))
        return {leaf: by_name[name].detach().to(dtype) for leaf, name in self._names.items()}

    def _forward(
        self, hidden: Tensor, weights: Mapping[str, Tensor], targets: Tensor, count: Tensor, grads: _Grads | None
    ) -> Tensor:
        """Compute the loss chunk by chunk, and the gradients if they are wanted."""
        loss = hidden.new_zeros((), dtype=torch.float32)
        scale = count.reciprocal().float()
        weight = weights["weight"]
        bias = weights.get("bias")

        # All dtypes are chosen by now. Autocast knows some of these operations only, so it would mix them.
        with self._head.stage.arithmetic(), torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], self._chunk):
                rows = slice(start, start + self._chunk)
                logits = hidden[rows] @ weight.t() if bias is None else torch.addmm(bias, hidden[rows], weight.t())
                if grads is None:
                    loss += cross_entropy(logits, targets[rows], self._cap)
                    continue

                part, slope = self._slopes(logits, targets[rows], self._cap, scale)
                loss += part
                grads.add(rows, slope, hidden, weight)

        return loss / count.float()


@dataclass(frozen=True, slots=True)
class _Grads:
    """The gradients that a fused loss makes in its forward."""

    hidden: Tensor | None
    """The gradient of the hidden states, [tokens, H] in their dtype; None if nobody wants it."""
    of_head: dict[str, Tensor] = field(default_factory=dict)
    """The gradients of the head's parameters that are trained, in fp32."""

    def add(self, rows: slice, slope: Tensor, hidden: Tensor, weight: Tensor) -> None:
        """Add the part of one chunk's rows, from the slope of their logits, [chunk, V]."""
        if self.hidden is not None:
            torch.mm(slope, weight, out=self.hidden[rows])
        if "weight" in self.of_head:
            add_product(self.of_head["weight"], slope.t(), hidden[rows])
        if "bias" in self.of_head:
            self.of_head["bias"] += slope.sum(0, dtype=torch.float32)


class StepLoss:
    """A model's loss function, divided by the tokens that the whole step counts. Some models do not pass them on to it.

    A group's backward begins in it, even if that comes to nothing that is trained.
    """

    def __init__(self, model: PreTrainedModel, stage: Stage) -> None:
        """Take the place of the model's own loss function."""
        self.divisor: int | None = None
        """The tokens that the step counts; None: the mean over the batch is wanted."""
        self._function: Callable[..., Tensor] = model.loss_function
        self._stage = stage
        self._losses: list[tuple[Tensor, Tensor]] = []
        """The losses of this forward, each with the tensor that the model was given for it."""
        model.loss_function = self

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401 - whatever the model gives
        """Return the loss of what the model gives."""
        if self.divisor is not None:
            kwargs["num_items_in_batch"] = self.divisor
        loss = self._function(*args, **kwargs)
        watched: Tensor = _Watched.apply(loss, self._stage.anchor, self._stage)  # type: ignore[no-untyped-call]
        self._losses.append((loss, watched))
        return watched

    def weighed(self, forward: Callable[[], Tensor], share: float) -> Tensor:
        """Run a forward; what the model adds to the loss (a router's balance) counts by the group's share.

        The loss function's own part is divided by what the step counts already, so that groups add up to the step's.

        Args:
            forward: gives the model's loss.
            share: the group's share of the tokens that the step counts. If it is 1, the model's loss stays as it is.

        Raises:
            UnsupportedModelError: nobody can tell which part is the loss function's.
        """
        self._losses.clear()
        total = forward()
        losses = self._losses.copy()
        self._losses.clear()

        # Most models add to it in place, so that the same tensor may come back with another value.
        if share == 1 or (len(losses) == 1 and total is losses[0][1] and not total._version):
            return total

        if len(losses) != 1:
            raise UnsupportedModelError(
                f"the model calls its loss function {len(losses)} times in a forward, so that groups cannot share the "
                "rest of its loss; set train.groups to 1."
            )

        # In fp32, (1 - share) + share is 1: the gradient of the loss function's part is what it was, bit by bit.
        rounded = torch.tensor(share, dtype=torch.float32, device="cpu").item()
        return torch.lerp(losses[0][0], total, rounded)


def without_logits(outputs: Any) -> Any:  # noqa: ANN401 - of whichever model
    """Return the outputs of a model with a fused loss without its logits, which it does not have."""
    # Hidden states stand under the name of logits, where a metric would take them.
    if not isinstance(outputs, ModelOutput):
        return (outputs[0], None, *outputs[2:])
    return type(outputs)(**{name: value for name, value in outputs.items() if name != "logits"})


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of matrix products with weights of a dtype: autocast's, if it is on for the device."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype


def cross_entropy(logits: Tensor, targets: Tensor, cap: float | None) -> Tensor:
    """Add up logsumexp(z) - z[target] over tokens that count; logits [N, V], targets [N]. Returns an fp32 scalar."""
    z = capped(logits.float(), cap)
    found = z.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return torch.where(targets != IGNORED, torch.logsumexp(z, -1) - found, 0.0).sum()


def slopes(logits: Tensor, targets: Tensor, cap: float | None, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `cross_entropy`, and `scale` times its derivative by the logits before the cap, in their dtype [N, V]."""
    z = capped(logits.float(), cap)
    counted = targets != IGNORED
    index = targets.clamp(min=0)[:, None]
    norms = torch.logsumexp(z, -1, keepdim=True)
    loss = torch.where(counted, (norms - z.gather(1, index))[:, 0], 0.0).sum()
    # A comparison, not a scatter: deterministic, and one pass when compiled.
    is_target = torch.arange(z.shape[1], dtype=torch.int64, device=z.device) == index
    slope = torch.exp(z - norms) - is_target.to(z.dtype)
    if cap:
        slope = slope * (1 - (z / cap) ** 2)

    return loss, (slope * (counted[:, None] * scale)).to(logits.dtype)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to total, fp32 [M, N], in place. On CUDA nothing is rounded in between."""
    if total.is_cuda and left.dtype is not torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.add_(left @ right)


class _LossFunction(torch.autograd.Function):
    """The fused loss for autograd: the forward makes the gradients, the backward scales and passes them on."""

    @staticmethod
    def forward(ctx: Any, fused: FusedLoss, hidden: Tensor, anchor: Tensor, targets: Tensor, count: Tensor) -> Tensor:  # noqa: ANN401
        loss, grads = fused.run(hidden.detach(), targets, count, passes=ctx.needs_input_grad[1])
        ctx.fused = fused
        ctx.grads = grads
        ctx.number = fused.stage.gradients.forward
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        if ctx.grads is None:
            raise RuntimeError(GONE)
        fused: FusedLoss = ctx.fused
        grads: _Grads = ctx.grads
        purpose = begin_backward(fused.stage, ctx.number)
        if purpose.comes_again:
            return None, None if grads.hidden is None else grads.hidden * grad, None, None, None

        ctx.grads = None
        if grads.of_head and purpose.trains:
            fused.deliver({leaf: found.mul_(grad) for leaf, found in grads.of_head.items()})
        elif grads.of_head:
            fused.forgo()
        return None, None if grads.hidden is None else grads.hidden.mul_(grad), None, None, None


class _Watched(torch.autograd.Function):
    """The loss itself, with a backward that is watched. The anchor makes sure that it has one."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, anchor: Tensor, stage: Stage) -> Tensor:  # noqa: ANN401
        ctx.stage = stage
        ctx.number = stage.gradients.forward
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        begin_backward(ctx.stage, ctx.number)
        return grad, None, None


def _uncapped(model: PreTrainedModel) -> Callable[..., Any]:
    """Make the model's forward without the soft cap that its config names."""
    forward = model.forward

    @functools.wraps(forward)
    def uncapped(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the model takes and gives
        with without_softcap(model):
            return forward(*args, **kwargs)

    return uncapped
