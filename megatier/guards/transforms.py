"""Refuses by name what changes autograd around a module, so that its node would lose something."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from megatier.errors import StreamedModelError


def check_transforms(module_name: str) -> None:
    """Check that the backward of a module's forward will be autograd's plain one.

    Args:
        module_name: the module, which runs with a gradient.

    Raises:
        StreamedModelError: it would not.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise StreamedModelError(
            f"{module_name} was called inside of a transform of torch.func (grad, vmap, jvp, jacrev, ...), which needs "
            "the weights as arguments. Use loss.backward() or torch.autograd.grad, or a plain model."
        )
    if forward_ad._current_level >= 0:
        raise StreamedModelError(
            f"{module_name} was called with a gradient inside of forward-mode differentiation (forward_ad.dual_level). "
            "A streamed model has a backward only: call it under torch.no_grad(), or use a plain model."
        )
    autograd = torch._C._autograd
    is_on = autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    if not is_on or autograd._top_saved_tensors_default_hooks(True) is not None:
        raise StreamedModelError(
            f"{module_name} was called inside of hooks on saved tensors (torch.autograd.graph.saved_tensors_hooks, "
            "save_on_cpu, torch.utils.checkpoint), or where they are switched off. megatier saves activations itself, "
            "past such hooks: leave them out, and choose activations='recompute' of megatier.stream to save memory."
        )
