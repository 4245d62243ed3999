"""What lies in a module in place of its weights, while they are not bound."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatier.errors import StreamedModelError, UnsupportedModelError
from megatier.guards.unchanged import REMEDY

ALIASES = (Tensor.detach, Tensor.data.__get__)  # type: ignore[attr-defined]
"""What gives the same place under another name, to those who look at it and do not compute."""
HARMLESS = (*ALIASES, Tensor.grad.__get__)  # type: ignore[union-attr]
CHANGES = (Tensor.__setitem__, Tensor.data.__set__)  # type: ignore[attr-defined]
OPERATORS = re.compile(r"__i(add|sub|mul|div|truediv|floordiv|mod|pow|and|or|xor)__")
KEEPING = frozenset({"requires_grad_", "detach_", "share_memory_", "rename_"})
"""End like functions that change a tensor, and leave its numbers as they are."""


class Unbound(nn.Parameter):
    """A parameter on meta that names device and dtype of its weights, as they compute.

    Llama 4 sends token ids to its embedding's device; vision towers take pixels in the dtype of their weights.
    """

    streams_to: torch.device
    streams_as: torch.dtype
    full_name: str

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where the weights are bound."""
        return self.streams_to

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """In which they compute."""
        return self.streams_as

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise StreamedModelError(
            f"a weight of shape {tuple(self.shape)} lies on megatier's tiers, not in the model, which moves nowhere. "
            "Streamed.read(name) gives its fp32 master, Streamed.export(folder) writes all."
        )

    cpu = cuda = numpy = tolist = item = _refuse

    @classmethod
    def __torch_function__(
        cls,
        function: Any,  # noqa: ANN401 - whatever torch does with a tensor
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        for target in _targets(function, args, kwargs):
            raise UnsupportedModelError(
                f"the weight {target.full_name} is changed where it is not bound, which would change nothing. {REMEDY}"
            )

        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
        if function in ALIASES:
            result.__class__ = type(args[0])
            result.__dict__ = dict(vars(args[0]))

        return result


class Guarded(Unbound):
    """Of a layer whose modules are nodes of their own: nobody else may compute with it.

    Torch does not refuse it: some products with a tensor on meta read whatever lies at address 0.
    """

    @classmethod
    def __torch_function__(
        cls,
        function: Any,  # noqa: ANN401 - whatever torch does with a tensor
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if all(isinstance(x, Unbound) for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)):
            result = super().__torch_function__(function, types, args, kwargs)
            if not torch.is_tensor(result) or isinstance(result, Unbound) or function in HARMLESS:
                return result

        raise UnsupportedModelError(
            "this model computes with a weight outside of the module that owns it, where it is not bound. "
            "Set model.expert_parts to 1: then a layer is one unit."
        )


def make_unbound(parameter: Tensor, device: torch.device, dtype: torch.dtype, name: str) -> None:
    """Turn a parameter on meta into one, in place."""
    parameter.__class__ = Unbound
    unbound = cast("Unbound", parameter)
    unbound.streams_to = device
    unbound.streams_as = dtype
    unbound.full_name = name


def _targets(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Unbound]:  # noqa: ANN401
    """What a function of torch writes into."""
    name = str(getattr(function, "__name__", ""))
    is_in_place = name.endswith("_") and not name.endswith("__") and name not in KEEPING
    first = (args or tuple(kwargs.values()))[:1]
    written = first if is_in_place or OPERATORS.fullmatch(name) or function in CHANGES else ()
    return (x for x in tree_leaves((written, kwargs.get("out"))) if isinstance(x, Unbound))


@contextmanager
def refused_outside(model: nn.Module) -> Iterator[None]:
    """Round a forward of the model.

    Raises:
        UnsupportedModelError: it computes with a weight where that is not bound, past the module that owns it.
    """
    try:
        yield
    except RuntimeError as error:
        if "meta" not in str(error):
            raise
        raise UnsupportedModelError(
            f"{type(model).__name__} computes with a weight outside the forward of the module that owns it, so it "
            f"cannot be streamed: {str(error).splitlines()[0]}"
        ) from error
