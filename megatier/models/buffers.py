"""Computes buffers of a model without weights: what its constructor gives them, and its initialisation.

A model is built on meta. What a constructor computes there is lost, and Hugging Face's initialisation sets only some of
it again: not the constants of Apertus' activation. So whatever a constructor fills with values is real, on the CPU, and
only what becomes a parameter goes to meta.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from megatier.compute.seeds import drawing_from
from megatier.errors import UnsupportedModelError

REAL_ELEMENTS_MAX = 1 << 24
"""Elements of a tensor that a constructor makes for real, at most: 64 MiB in fp32. A larger one is a parameter, or a
mask."""

KEPT_ELEMENTS_MAX = 1 << 16
"""Elements of a parameter whose value is kept, at most: of a gate, a scale, a norm."""

_NAMES = (
    *("arange", "as_tensor", "asarray", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn"),
    *("randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
)
_FILLING = frozenset(getattr(torch, name) for name in _NAMES)
"""Functions that make a tensor with values in it. What `torch.empty` makes has none, so nothing is lost on meta."""

_DRAWING = frozenset({"kaiming_uniform_", "normal_", "uniform_"})
"""Names of functions that draw values into a tensor."""


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build modules with parameters on meta for a while, and with everything else that they compute on the CPU.

    Random values are always the same, and the random state outside is left alone.
    """
    with drawing_from(0), torch.device("meta"), _FilledOnCPU():
        hook = register_module_parameter_registration_hook(_to_meta)  # type: ignore[arg-type]
        try:
            yield
        finally:
            hook.remove()


def constructed_value(parameter: Tensor) -> Tensor | None:
    """Return the value that a constructor gave a parameter, if it was kept; it holds if nothing sets another one."""
    return getattr(parameter, "constructed", None)


def initialise_buffers(model: PreTrainedModel) -> None:
    """Give every buffer its value by Hugging Face's own initialisation, which passes over meta parameters.

    Raises:
        UnsupportedModelError: a buffer has no value from its constructor, and the initialisation leaves it unset.
    """
    unset: dict[str, Tensor] = {}
    for module_name, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                # Filled with values that no initialisation leaves behind, so that a buffer that nothing sets shows.
                marked = _unset(torch.empty_like(buffer, device="cpu"))
                module._buffers[leaf] = marked
                unset[f"{module_name}.{leaf}".lstrip(".")] = marked

    with drawing_from(0), _NothingDrawn():
        model.initialize_weights()

    for name, buffer in unset.items():
        if bool(_is_unset(buffer).any()):
            raise UnsupportedModelError(f"{type(model).__name__}: nothing initialises the buffer {name}.")


class _NothingDrawn(TorchFunctionMode):
    """Passes over values that would be drawn on meta: torch draws none there, but runs much code to say so."""

    def __torch_function__(
        self,
        function: Any,  # noqa: ANN401 - whatever is called
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}

        # The function is torch's, the method of tensors, or what Hugging Face puts in place of the first.
        if function.__name__ in _DRAWING:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return function(*args, **kwargs)


class _FilledOnCPU(_NothingDrawn):
    """Makes tensors that are filled with values on the CPU, whatever the default device is."""

    def __torch_function__(
        self,
        function: Any,  # noqa: ANN401 - whatever torch makes a tensor with
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        made = super().__torch_function__(function, types, args, kwargs)
        names_device = kwargs.get("device") is not None
        if function not in _FILLING or not made.is_meta or names_device:
            return made

        # Hugging Face finds out by `torch.tensor([])` that a model is built on meta.
        if not 0 < made.numel() <= REAL_ELEMENTS_MAX:
            return made

        return function(*args, **{**kwargs, "device": "cpu"})


def _to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """Return the parameter that is registered in place of another; a small one's value stays with it."""
    if parameter is None or parameter.is_meta:
        return parameter
    value = parameter.detach()
    placed = nn.Parameter(value.to("meta"), requires_grad=parameter.requires_grad)

    # Models mark parameters by attributes of their own, such as those that their initialisation passes over.
    placed.__dict__.update(parameter.__dict__)
    if value.numel() <= KEPT_ELEMENTS_MAX:
        placed.constructed = value  # type: ignore[attr-defined]

    return placed


def _unset(buffer: Tensor) -> Tensor:
    """Fill a buffer with values that no initialisation leaves behind."""
    if buffer.dtype is torch.bool:
        # A byte of 2 is neither False nor True, and every write of a bool replaces it.
        buffer.view(torch.uint8).fill_(2)
        return buffer

    has_nan = buffer.is_floating_point() or buffer.is_complex()
    mark = float("nan") if has_nan else torch.iinfo(buffer.dtype).min
    return buffer.fill_(mark)


def _is_unset(buffer: Tensor) -> Tensor:
    """Return where a buffer still has such values."""
    if buffer.dtype is torch.bool:
        return buffer.view(torch.uint8) == 2
    if buffer.is_floating_point() or buffer.is_complex():
        return buffer.isnan()
    return buffer == torch.iinfo(buffer.dtype).min
