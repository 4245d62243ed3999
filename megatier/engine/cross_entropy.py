"""Computes the cross-entropy of a chunk of logits, and its gradients, for the fused loss (`loss`).

For logits z = cap * tanh((h W' + b) / cap) (or h W' + b), labels y and N counted tokens,
loss = sum(logsumexp(z) - z[y]) / N and d loss / d z = (softmax(z) - onehot(y)) / N.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatier.engine.head import IGNORE_INDEX, capped

UNKNOWN_LABEL = -1
"""The label that replaces one that is neither ignored nor in the vocabulary."""


def cross_entropy(logits: Tensor, targets: Tensor, cap: float | None) -> Tensor:
    """Add up logsumexp(z) - z[target] over tokens that count; logits [N, V], targets [N]. Returns an fp32 scalar."""
    z = capped(logits.float(), cap)
    # Ignored and unknown labels are negative, so they cannot be an index. What they pick is replaced below.
    index = targets.clamp(min=0)[:, None]
    z_of_target = z.gather(1, index)[:, 0]
    losses = torch.logsumexp(z, -1) - z_of_target
    return _of_targets(targets, losses).sum()


def cross_entropy_and_grad(logits: Tensor, targets: Tensor, cap: float | None, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `cross_entropy`, and `scale` times its derivative by the logits before the cap, in their dtype [N, V]."""
    z = capped(logits.float(), cap)
    index = targets.clamp(min=0)[:, None]
    norms = torch.logsumexp(z, -1, keepdim=True)
    losses = (norms - z.gather(1, index))[:, 0]
    loss = _of_targets(targets, losses).sum()

    # A comparison is deterministic, unlike a scatter, and takes one pass when compiled.
    vocabulary = torch.arange(z.shape[1], dtype=torch.int64, device=z.device)
    is_target = vocabulary == index
    logits_grad = torch.exp(z - norms) - is_target.to(z.dtype)
    if cap:
        # The derivative of cap * tanh(x / cap), written in terms of its value.
        logits_grad = logits_grad * (1 - (z / cap) ** 2)

    # Selected rather than multiplied, since the scale is infinite if no token counts.
    scales = _of_targets(targets, scale)[:, None]
    return loss, (logits_grad * scales).to(logits.dtype)


def _of_targets(targets: Tensor, values: Tensor) -> Tensor:
    """Return the values of counted tokens, 0 for ignored ones, and NaN where the label is unknown."""
    return torch.where(targets == UNKNOWN_LABEL, math.nan, torch.where(targets != IGNORE_INDEX, values, 0.0))


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to total, fp32 [M, N], in place. On CUDA nothing is rounded in between."""
    if total.is_cuda and left.dtype is not torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.add_(left @ right)
