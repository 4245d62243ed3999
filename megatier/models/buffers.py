"""Computes the buffers of a model without weights: the values of its constructor, and of its initialisation.

A model is built on meta, where everything that a constructor computes is lost, and Hugging Face's initialisation
recomputes only some of it (not the constants of Apertus' activation). So tensors that a constructor fills with values
are real, on the CPU, and only those that become parameters go to meta. `decoder.build_skeleton` uses this.
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
"""The most elements of a tensor that is made for real: 64 MiB in fp32. A larger one is a parameter or a mask."""

KEPT_ELEMENTS_MAX = 1 << 16
"""The most elements of a parameter whose constructed value is kept, such as a gate, a scale or a norm."""

_NAMES = (
    *("arange", "as_tensor", "asarray", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn"),
    *("randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
)
_FILLING = frozenset(getattr(torch, name) for name in _NAMES)
"""Functions that make a tensor with values. `torch.empty` is not among them, since nothing is lost on meta."""

_DRAWING = frozenset({"kaiming_uniform_", "normal_", "uniform_"})
"""The names of functions that draw values into a tensor."""


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build modules inside with their parameters on meta, and everything else on the CPU.

    Random values are always the same, and the caller's random state does not change.
    """
    with drawing_from(0), torch.device("meta"), _FilledOnCPU():
        hook = register_module_parameter_registration_hook(_to_meta)  # type: ignore[arg-type]
        try:
            yield
        finally:
            hook.remove()


def constructed_value(parameter: Tensor) -> Tensor | None:
    """Return the value that a constructor gave a parameter, if it was kept. It holds if nothing sets another one."""
    return getattr(parameter, "constructed", None)


def initialise_buffers(model: PreTrainedModel) -> None:
    """Give every buffer its value by Hugging Face's own initialisation, which skips parameters on meta.

    Raises:
        UnsupportedModelError: a buffer has no value from its constructor, and the initialisation leaves it unset.
    """
    unset: dict[str, Tensor] = {}
    for module_name, module in model.named_modules():
        for attribute, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                # Filled with a marker that no initialisation leaves behind, so that an unset buffer is found.
                marked = _unset(torch.empty_like(buffer, device="cpu"))
                module._buffers[attribute] = marked
                unset[f"{module_name}.{attribute}".lstrip(".")] = marked

    with drawing_from(0), _NothingDrawn():
        model.initialize_weights()

    for name, buffer in unset.items():
        if bool(_is_unset(buffer).any()):
            raise UnsupportedModelError(f"{type(model).__name__}: nothing initialises the buffer {name}.")


class _NothingDrawn(TorchFunctionMode):
    """A mode that skips drawing on meta, where torch draws nothing but runs much code."""

    def __torch_function__(
        self,
        function: Any,  # noqa: ANN401 - whatever is called
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}

        # The function may be torch's, a tensor's method, or Hugging Face's replacement of the first.
        if function.__name__ in _DRAWING:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return function(*args, **kwargs)


class _FilledOnCPU(_NothingDrawn):
    """A mode that makes tensors with values on the CPU, whatever the default device is."""

    def __torch_function__(
        self,
        function: Any,  # noqa: ANN401 - whatever torch makes a tensor with
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        tensor = super().__torch_function__(function, types, args, kwargs)
        names_device = kwargs.get("device") is not None
        if function not in _FILLING or not tensor.is_meta or names_device:
            return tensor

        # Hugging Face checks by `torch.tensor([])` whether a model is built on meta.
        if not 0 < tensor.numel() <= REAL_ELEMENTS_MAX:
            return tensor

        return function(*args, **{**kwargs, "device": "cpu"})


def _to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """Return the meta parameter to register instead of a real one. A small one keeps its value as an attribute."""
    if parameter is None or parameter.is_meta:
        return parameter
    value = parameter.detach()
    placed = nn.Parameter(value.to("meta"), requires_grad=parameter.requires_grad)

    # Models mark parameters by attributes, such as those that their initialisation skips.
    placed.__dict__.update(parameter.__dict__)
    if value.numel() <= KEPT_ELEMENTS_MAX:
        placed.constructed = value  # type: ignore[attr-defined]

    return placed


def _unset(buffer: Tensor) -> Tensor:
    """Fill a buffer with a marker that no initialisation leaves behind."""
    if buffer.dtype is torch.bool:
        # A byte of 2 is neither False nor True, and every write of a bool replaces it.
        buffer.view(torch.uint8).fill_(2)
        return buffer

    has_nan = buffer.is_floating_point() or buffer.is_complex()
    mark = float("nan") if has_nan else torch.iinfo(buffer.dtype).min
    return buffer.fill_(mark)


def _is_unset(buffer: Tensor) -> Tensor:
    """Return where a buffer still has the marker."""
    if buffer.dtype is torch.bool:
        return buffer.view(torch.uint8) == 2
    if buffer.is_floating_point() or buffer.is_complex():
        return buffer.isnan()
    return buffer == torch.iinfo(buffer.dtype).min
