"""Applies adapters of single parameters, such as stacked experts (PEFT's `target_parameters`).

PEFT wraps the module that owns the parameter. In the wrapper's forward, torch's parametrization takes the parameter out
of its module, and puts a property of a new class in its place. That cannot work here, where a view of a slot is bound
in that place, and the forward may be compiled or run in tiles of tokens. So PEFT's own code adapts the parameter before
the forward, in a stand-in for the module, and the result is bound while the forward runs. `BoundModule` does this
around each forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

WRAPPER = "ParamWrapper"
"""The name of PEFT's wrapper class, by which PEFT itself recognises it."""


def is_wrapper(module: nn.Module) -> bool:
    """Return whether a module is PEFT's wrapper around a module whose parameter has an adapter."""
    return type(module).__name__ == WRAPPER


def wrappers_in(module: nn.Module) -> dict[str, Any]:
    """Return PEFT's wrappers in a module, by the names of the parameters that they adapt."""
    names = {id(child): name for name, child in module.named_modules()}
    wrappers: dict[str, Any] = {}
    for child in module.modules():
        if is_wrapper(child):
            wrapper: Any = child
            owner = names[id(wrapper.get_base_layer())]
            wrappers[f"{owner}.{wrapper.parameter_name}"] = wrapper
    return wrappers


def matrices_in(module: nn.Module) -> frozenset[str]:
    """Return the names of such adapters' matrices in a module. No token is multiplied by them."""
    matrices: set[str] = set()
    for name, child in module.named_modules():
        if not is_wrapper(child):
            continue
        for key, _ in child.named_parameters():
            # A wrapper also contains the module that it wraps.
            if key.startswith("lora_"):
                matrices.add(f"{name}.{key}")

    return frozenset(matrices)


def take_over(wrappers: Mapping[str, Any]) -> None:
    """Make the wrappers' forwards leave parameters alone, since `adapted` has adapted them before."""
    # On the instance alone: `_with_adapter` uses the class's method, which is still PEFT's.
    for wrapper in wrappers.values():
        wrapper._activate_lora = contextlib.nullcontext


@contextlib.contextmanager
def adapted(wrappers: Mapping[str, Any]) -> Iterator[None]:
    """Add the adapters' contributions to the bound parameters inside, unless the adapters are disabled.

    The sum has the parameter's shape and dtype, and a graph that ends at the adapter's matrices.
    """
    places = []
    for wrapper in wrappers.values():
        if not wrapper.disable_adapters:
            parameters = wrapper.get_base_layer()._parameters
            places.append((wrapper, parameters, parameters[wrapper.parameter_name]))

    # All are recorded before the first is replaced, so each place gets back what was bound there.
    try:
        for wrapper, parameters, bound in places:
            parameters[wrapper.parameter_name] = _with_adapter(wrapper, bound)
        yield
    finally:
        for wrapper, parameters, bound in places:
            parameters[wrapper.parameter_name] = bound


def _with_adapter(wrapper: Any, bound: Tensor) -> Tensor:  # noqa: ANN401 - PEFT's, which has no types
    """Return a parameter with its adapter's contribution, as PEFT computes it."""
    # `.data`, since torch sets the tensor to itself there, which would look like an in-place change of the weight.
    owner = nn.Module()
    owner.register_parameter(wrapper.parameter_name, nn.Parameter(bound.data, requires_grad=False))
    wrapper.get_base_layer = lambda: owner
    try:
        with type(wrapper)._activate_lora(wrapper, wrapper.active_adapters):
            result: Tensor = getattr(owner, wrapper.parameter_name)
            return result
    finally:
        del wrapper.get_base_layer
