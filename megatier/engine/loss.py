"""Computes head and loss as one node: cross-entropy over chunks of tokens, so that logits never exist whole.

Inside the model's forward, the head's module returns the hidden states unchanged, and the model's `loss_function` runs
this node on them. Linear scales of the logits (Granite, Cohere) commute with the head and stay where Hugging Face has
them. A soft cap does not commute, so it is applied here. `head` has checked beforehand that the model does nothing else
between the two. Each forward checks it again, since users can change the model at any time.

A label that is neither ignored nor in the vocabulary makes the loss NaN. Torch would refuse such a label, but then the
host would have to wait for the device. Instead it is refused when the step turns out not to be finite (`check_labels`).

All gradients are computed in the forward, where the logits are at hand. Those of the head are summed over chunks in
fp32. `cross_entropy` has the arithmetic of a chunk.

Source: the fused linear cross-entropy of Liger Kernel (arXiv 2410.10989).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.loss import loss_utils
from transformers.utils.generic import ModelOutput

from megatier.engine.backward import GRAPH_FREED, begin_backward
from megatier.engine.cross_entropy import UNKNOWN_LABEL, add_product, cross_entropy, cross_entropy_and_grad
from megatier.engine.head import IGNORE_INDEX, has_hooks, name_of, product_of, without_softcap
from megatier.engine.node import Node
from megatier.errors import DataError, StreamedModelError
from megatier.readback import on_host
from megatier.tier import Phase

_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
"""Kinds of parameters that can be passed by name."""
_UNFUSED = "open the model with fused_loss=False (model.fused_loss: false)"
"""The remedy for anything that a fused loss does not support."""


class FusedLoss:
    """Replaces a model's head and loss function."""

    def __init__(self, model: PreTrainedModel, head: Node, chunk: int) -> None:
        """Replace the head's forward. `standing_in` does the rest in each forward of the model.

        Args:
            model: the skeleton, for which `head.can_fuse` was true.
            head: the node of the output embedding. Its unit holds the head's weight, or the tied embedding's.
            chunk: the number of tokens in a chunk.
        """
        self.stage = head.stage
        """What all nodes of the model share."""
        self._model = model
        self.head = head
        """The node of the output embedding."""
        self._chunk = chunk
        product = product_of(head.module)
        assert product is not None
        of_product = [(key, tensor) for owner, key, tensor in head.bindings if owner is product._parameters]
        self.names = {attribute: tensor.name for attribute, tensor in of_product}
        """The names of the head's parameters in the model, by their names in the head's module."""
        self._vocab_size = product.out_features
        self._function: Callable[..., Tensor] = model.loss_function
        """The model's loss function, which this one replaces."""
        with without_softcap(model) as cap:
            self._cap = cap
        self._has_cap = cap is not None
        """Whether the model applied the soft cap of its config when it was opened."""
        self._refused = _more_arguments()
        """The names of arguments that the model's loss function supports and this one does not."""
        self._passed: list[int] = []
        """The number of elements that each call of the head returned in this forward."""
        self._is_inside = False
        """Whether a forward of the model is running."""
        self._labels: list[tuple[Tensor, Tensor]] = []
        """The labels of the open step, as given and as `_targets` made them."""

        compilation = head.stage.compilation
        self._loss_and_grad: Callable[..., tuple[Tensor, Tensor]] = cross_entropy_and_grad
        if compilation is not None:
            self._loss_and_grad = compilation(cross_entropy_and_grad, "the loss")
        self._product: Callable[[Tensor], Tensor] = head.module.forward
        head.module.forward = self._pass_on

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Run the model's forward inside: its head returns hidden states, and its config names no soft cap.

        Raises:
            StreamedModelError: the model was changed since its head and its loss were fused.
        """
        self._check_model()
        self._passed.clear()
        self._is_inside = True
        try:
            # Removed only for the forward, since the config is exported.
            with without_softcap(self._model) as cap:
                if cap is not None and not self._has_cap:
                    raise _changed(f"its config names a soft cap of logits ({cap}), and named none before")
                self._cap = cap
                yield
        finally:
            self._is_inside = False

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: Tensor | None = None,
        **others: Any,  # noqa: ANN401 - Hugging Face passes all that the forward was given
    ) -> Tensor:
        """Return the mean cross-entropy, or the sum over num_items_in_batch.

        Args:
            logits: hidden states [B, T, H], under the name that Hugging Face gives the head's output.
            labels: [B, T], to be shifted by one.
            vocab_size: that of the head.
            num_items_in_batch: tokens that the whole step counts.
            ignore_index: the label of tokens that do not count.
            shift_labels: [B, T], shifted already.
            **others: what the model's own loss function ignores as well.

        Raises:
            StreamedModelError: for this forward or these arguments the fused loss would not equal the model's own.
            DataError: there is not one label for each token, or labels are not int64.
        """
        self._check_call(logits, vocab_size, others)
        targets = self._targets(logits, labels, ignore_index, shift_labels)

        # Some models (Mamba) cast logits to fp32. The head multiplies in its own dtype all the same.
        hidden = logits.reshape(-1, logits.shape[-1])
        hidden = hidden.to(product_dtype(hidden.device, self.head.dtype))

        # The host never reads this, since it would wait for the device and for all copies before it.
        counted = (targets != IGNORE_INDEX).sum() if num_items_in_batch is None else num_items_in_batch
        if torch.is_tensor(counted):
            if counted.dim():
                raise StreamedModelError(
                    f"num_items_in_batch has the shape {tuple(counted.shape)}; the loss that is fused with the head "
                    f"takes one number. Give it as such, or {_UNFUSED}."
                )
            counted = counted.to(hidden.device)
        count = torch.zeros((), dtype=torch.float64, device=hidden.device) + counted

        if not torch.is_grad_enabled():
            return self.run(hidden, targets, count, None)

        # Expected before autograd knows of the loss, as in a call of a node.
        gradients = self.stage.gradients
        if self.head.trained:
            gradients.expect_use(self.head.unit, 1)
        result: Tensor = _LossFunction.apply(self, hidden, self.stage.anchor, targets, count)  # type: ignore[no-untyped-call]
        return result

    def begin_step(self) -> None:
        """Drop the labels of the last step."""
        self._labels.clear()

    def check_labels(self) -> None:
        """Check that all labels of the open step are in the vocabulary. The host waits for the device.

        Raises:
            DataError: a label is not.
        """
        for labels, targets in self._labels:
            unknown = on_host(labels[targets == UNKNOWN_LABEL])
            if unknown.numel():
                # The label as given, since `_targets` replaces all unknown labels by one number.
                raise DataError(
                    f"{unknown.numel()} labels of the step are outside of the vocabulary of {self._vocab_size}, the "
                    f"first one is {int(unknown[0])}. So its loss is not a number, and no update of it was written. "
                    f"Tokens that do not count have the label {IGNORE_INDEX}, or the ignore_index that the model's "
                    "forward is given."
                )

    def _pass_on(self, hidden: Tensor) -> Tensor:
        """Replace the head's forward. Inside the model's forward hidden states pass unchanged."""
        if not self._is_inside:
            return self._product(hidden)
        self._passed.append(hidden.numel())
        return hidden

    def _check_model(self) -> None:
        """Check that the model still has the head and the loss function that were fused."""
        head = self.head.module
        if self._model.loss_function is not self._function:
            raise _changed(f"its loss function is now {name_of(self._model.loss_function)}")
        if self._model.get_output_embeddings() is not head or vars(head).get("forward") != self._pass_on:
            raise _changed("its output embedding is another one")
        if getattr(head, "disable_adapters", False):
            raise _changed("the copy of its output embedding that is trained was disabled")
        if has_hooks(head):
            raise _changed("its output embedding has hooks, which would see hidden states for logits")

    def _check_call(self, logits: Tensor, vocab_size: int | None, others: Mapping[str, object]) -> None:
        """Check that the forward has passed from the head to its loss as it did in the probe."""
        if self._passed != [logits.numel()]:
            raise _changed("its forward does not hand to the loss what the head gave once")
        if vocab_size not in (None, self._vocab_size):
            raise _changed(f"its vocab_size is {vocab_size}, and the output embedding has {self._vocab_size} rows")
        if unknown := sorted(self._refused & {name for name, value in others.items() if value is not None}):
            raise StreamedModelError(
                f"the loss function of transformers {transformers.__version__} takes {', '.join(unknown)}, and the "
                f"loss that is fused with the head does not. Leave it out, or {_UNFUSED}."
            )

    def _targets(self, hidden: Tensor, labels: Tensor | None, ignore_index: int, shift_labels: Tensor | None) -> Tensor:
        """Return the label of each row of hidden states, int64 [tokens], or one of the constants for labels."""
        given = labels if shift_labels is None else shift_labels
        if given is None or given.dtype is not torch.int64:
            given_dtype = "missing" if given is None else str(given.dtype)
            raise DataError(f"labels are {given_dtype}; the loss takes numbers of tokens, in int64.")
        if shift_labels is None:
            # As in Hugging Face's loss: the last token of a row predicts nothing, so its label does not count.
            given = functional.pad(given, (0, 1), value=ignore_index)[..., 1:]
        given = given.reshape(-1).to(hidden.device)

        rows = hidden.numel() // hidden.shape[-1]
        if rows != given.numel():
            raise DataError(
                f"there are {given.numel()} labels for the hidden states of {rows} tokens. With logits_to_keep, give "
                "labels for the tokens that are kept alone."
            )

        is_known = (given >= 0) & (given < self._vocab_size)
        targets = torch.where(given == ignore_index, IGNORE_INDEX, torch.where(is_known, given, UNKNOWN_LABEL))
        if torch.is_grad_enabled():
            # Checking them here would make the host wait, so they are kept until a loss is known to be wrong
            # (`check_labels`).
            self._labels.append((given, targets))
        return targets

    def run(self, hidden: Tensor, targets: Tensor, count: Tensor, grads: _Grads | None) -> Tensor:
        """Compute the loss, an fp32 scalar, chunk by chunk.

        Args:
            hidden: hidden states [tokens, H].
            targets: [tokens].
            count: tokens that the step counts.
            grads: takes the gradients; None: none are wanted.
        """
        stage = self.stage
        use = stage.source.enter(self.head.unit, Phase.FORWARD, stage.gradients.group)
        weights = self._weights(use.bytes, hidden.dtype)
        if grads is not None:
            for attribute, weight in weights.items():
                if self.head.requires_grad_by_name[self.names[attribute]]:
                    grads.begin(attribute, weight)

        loss = hidden.new_zeros((), dtype=torch.float32)
        # The reciprocal is taken in fp64, where a count of tokens is exact.
        scale = count.reciprocal().float()

        # All dtypes are set by now. Autocast covers only some of these operations, so it would mix dtypes.
        with stage.arithmetic(), torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], self._chunk):
                rows = slice(start, start + self._chunk)
                loss += self._chunk_loss(rows, hidden, weights, targets, scale, grads)
        # Divided once at the end, since a division for each chunk would round each chunk's sum.
        loss = loss / count.float()
        if stage.checks_finite:
            self.head.check_finite(self.head.leaves(use.bytes), [loss])
        use.leave()
        return loss

    def _weights(self, plane: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the head's weight [V, H] and bias [V] if it has one. Under autocast these are copies."""
        by_name = dict(zip(self.head.names, self.head.leaves(plane), strict=True))

        # Detached, since this forward computes the gradients itself. A graph would hold the logits of every chunk.
        return {attribute: by_name[name].detach().to(dtype) for attribute, name in self.names.items()}

    def _chunk_loss(
        self,
        rows: slice,
        hidden: Tensor,
        weights: Mapping[str, Tensor],
        targets: Tensor,
        scale: Tensor,
        grads: _Grads | None,
    ) -> Tensor:
        """Compute the loss of one chunk. Its logits and their gradient are freed before the next chunk's are made."""
        weight = weights["weight"]
        bias = weights.get("bias")
        chunk = hidden[rows]
        logits = chunk @ weight.t() if bias is None else torch.addmm(bias, chunk, weight.t())
        if grads is None:
            return cross_entropy(logits, targets[rows], self._cap)

        loss, logits_grad = self._loss_and_grad(logits, targets[rows], self._cap, scale)
        grads.add(rows, logits_grad, hidden, weight)
        return loss


@dataclass(frozen=True, slots=True)
class _Grads:
    """The gradients that a fused loss computes in its forward."""

    hidden: Tensor | None
    """The gradient of the hidden states, [tokens, H] in their dtype; None if it is not wanted."""
    of_head: dict[str, Tensor] = field(default_factory=dict)
    """The fp32 gradients of the head's trained parameters, by their names in the head's module."""

    def begin(self, attribute: str, parameter: Tensor) -> None:
        """Begin the sum of a head parameter's gradient at zero."""
        # In fp32, since bf16 would round the sum after each chunk.
        self.of_head[attribute] = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)

    def add(self, rows: slice, logits_grad: Tensor, hidden: Tensor, weight: Tensor) -> None:
        """Add one chunk's contribution, from the gradient of its logits, [chunk, V]."""
        if self.hidden is not None:
            # Each row belongs to one chunk, so nothing is summed, and no fp32 copy is needed.
            torch.mm(logits_grad, weight, out=self.hidden[rows])

        weight_grad = self.of_head.get("weight")
        bias_grad = self.of_head.get("bias")
        if weight_grad is not None:
            add_product(weight_grad, logits_grad.t(), hidden[rows])
        if bias_grad is not None:
            bias_grad += logits_grad.sum(0, dtype=torch.float32)


def without_logits(outputs: Any) -> Any:  # noqa: ANN401 - of whichever model
    """Return the outputs of a model with a fused loss without logits, which it does not compute."""
    # Hidden states stand under the name of logits, and a metric would use them as such.
    if not isinstance(outputs, ModelOutput):
        return (outputs[0], None, *outputs[2:])

    # Rebuilt, since no field of a ModelOutput can be deleted.
    fields = dict(outputs.items())
    fields.pop("logits", None)
    return type(outputs)(**fields)


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of matrix products with weights of a dtype: autocast's, if it is enabled on the device."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype


class _LossFunction(torch.autograd.Function):
    """The fused loss for autograd: the forward computes the gradients, the backward scales and returns them."""

    @staticmethod
    def forward(ctx: Any, fused: FusedLoss, hidden: Tensor, anchor: Tensor, targets: Tensor, count: Tensor) -> Tensor:  # noqa: ANN401
        needs_hidden = ctx.needs_input_grad[1]
        grads = _Grads(torch.empty_like(hidden) if needs_hidden else None)
        ctx.fused = fused
        ctx.grads = grads
        ctx.number = fused.stage.gradients.forward
        return fused.run(hidden.detach(), targets, count, grads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        if ctx.grads is None:
            raise RuntimeError(GRAPH_FREED)
        fused: FusedLoss = ctx.fused
        grads: _Grads = ctx.grads
        purpose = begin_backward(fused.stage, ctx.number)
        hidden_grad = grads.hidden
        if purpose.retains_graph:
            # Not in place, since the next backward scales the same gradient again.
            if hidden_grad is not None:
                hidden_grad = hidden_grad * grad
            return None, hidden_grad, None, None, None

        # This backward frees the graph, so nothing reads these gradients again, and they are scaled in place.
        ctx.grads = None
        gradients = fused.stage.gradients
        unit = fused.head.unit
        if grads.of_head and purpose.trains:
            summands = [(fused.names[attribute], summand.mul_(grad)) for attribute, summand in grads.of_head.items()]
            gradients.add(unit, summands)
            gradients.end_use(unit)
        elif grads.of_head:
            # A backward for gradients of inputs alone has freed the graph, so the group must not wait for this use.
            gradients.cancel_use(unit, 1)
        if hidden_grad is not None:
            hidden_grad.mul_(grad)
        return None, hidden_grad, None, None, None


def _more_arguments() -> frozenset[str]:
    """Return the names of arguments that transformers' loss function supports and a fused loss does not."""
    # The first function passes arguments that it does not know to the second.
    names: set[str] = set()
    for function in (loss_utils.ForCausalLMLoss, loss_utils.fixed_cross_entropy):
        parameters = inspect.signature(function).parameters
        names.update(name for name, parameter in parameters.items() if parameter.kind in _NAMED)

    # The second function's names for logits and labels.
    names -= {"source", "target"}
    return frozenset(names.difference(inspect.signature(FusedLoss.__call__).parameters))


def _changed(change: str) -> StreamedModelError:
    """Return the error about a model that was changed since its head and loss were fused."""
    return StreamedModelError(
        f"the model's loss is fused with its head, and since the model was opened {change}. The fused loss would not "
        f"be the model's own; undo that, or {_UNFUSED}."
    )
