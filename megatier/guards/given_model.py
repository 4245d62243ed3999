"""Refuses by name what cannot be taken of a model in RAM, and says what to do instead."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.utils import parametrize

from megatier.errors import UnsupportedModelError
from megatier.guards.hidden_parts import FORWARD_HOOKS

FULL_PRECISION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights that training begins with."""
REWRITING = "torch.nn.utils."
"""Begins the names of the modules of torch that compute weights by hooks: weight norm, spectral norm, pruning."""


def check_parameters(model: nn.Module) -> None:
    """Refuse parameters that could not be trained as they would be where they lie.

    Raises:
        UnsupportedModelError: names the first one.
    """
    for name, parameter in model.named_parameters():
        if reason := _reason(parameter):
            raise UnsupportedModelError(f"the parameter {name} {reason}")


def check_modules(model: nn.Module) -> None:
    """Refuse modules that run or hold their weights in another way than plain ones.

    Raises:
        UnsupportedModelError: names the first one.
    """
    for name, module in model.named_modules():
        if reason := next(_reasons(module), None):
            raise UnsupportedModelError(f"{name or type(module).__name__} ({type(module).__name__}) {reason}")

    # A module without parameters, such as an activation, may stand in many places.
    names: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        first = names.setdefault(id(module), name)
        if first != name and next(module.parameters(), None) is not None:
            raise UnsupportedModelError(
                f"{first} and {name} are one module, and modules that are used in several places are not streamed. "
                "Make a copy of it for each place."
            )


def check_around(outer: nn.Module, inner: nn.Module) -> None:
    """Refuse modules around a model that would do more than to call it: the model inside is streamed without them.

    Args:
        outer: the outermost module.
        inner: the model.

    Raises:
        UnsupportedModelError: names the module.
    """
    # By identity, since wrappers name the model inside in ways of their own.
    inside = {id(module) for module in inner.modules()}
    for name, module in outer.named_modules():
        if id(module) in inside:
            continue
        path = name or type(module).__name__

        # A forward of its class calls the model inside. One of the object itself was put there by somebody.
        if "forward" in vars(module) or any(getattr(module, hooks, None) for hooks in FORWARD_HOOKS):
            raise UnsupportedModelError(
                f"{path} is around the model that is streamed, and has a hook or a forward of its own, which would be "
                "lost. Put it on the model inside, which get_base_model() gives."
            )
    inner_ids = {id(parameter) for parameter in inner.parameters()}
    if outside := next((name for name, parameter in outer.named_parameters() if id(parameter) not in inner_ids), None):
        raise UnsupportedModelError(
            f"the parameter {outside} lies around the model that is streamed, so it would not be trained. Put it into "
            "the model inside."
        )


def _reason(parameter: nn.Parameter) -> str | None:
    """Return why a parameter cannot be taken, in words, with what to do instead; None if it can."""
    # A subclass, such as that of a quantised weight, holds its values in a way of its own.
    if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided:
        return f"is a {type(parameter).__name__} ({parameter.layout}); only plain, dense nn.Parameters are streamed."
    if parameter.is_meta:
        return "lies on meta, so it has no values. Load the model first, or give its folder."
    if parameter.dtype not in FULL_PRECISION_DTYPES:
        return f"is {parameter.dtype}; weights are trained from fp32, bf16 or fp16. Call float() of the model."
    if parameter.grad is not None:
        return "has a gradient already, which would be lost. Call zero_grad() of the model."
    return None


def _reasons(module: nn.Module) -> Iterator[str]:
    """Yield why a module cannot be taken, in words, with what to do instead."""
    # Past `getattr`, which modules answer in their own ways.
    attributes = vars(module)
    if "_hf_hook" in attributes:
        yield (
            "has a hook of accelerate, which moves its weights (device_map). Load the model without device_map, or "
            "call accelerate.hooks.remove_hook_from_submodules(model)."
        )
    if "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None:
        yield "is compiled. Give the model uncompiled, and set compile of megatier.stream."
    if parametrize.is_parametrized(module):
        yield "is parametrized. Call torch.nn.utils.parametrize.remove_parametrizations for each of its parameters."
    for hook in module._forward_pre_hooks.values():
        if type(hook).__module__.startswith(REWRITING):
            yield f"has a weight that {type(hook).__name__} of torch.nn.utils computes. Remove that first."
    if module._backward_hooks and attributes.get("_is_full_backward_hook") is False:
        yield "has a hook of register_backward_hook. Use register_full_backward_hook."
    if "loss_function" in module._modules:
        yield "has a module as its loss_function, which transformers never calls. Set a function that calls it."
