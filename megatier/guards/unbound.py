"""Unbound parameters: they lie in a module in place of its weights, while these are not bound.

An unbound parameter refuses every change, and most ways of computing with it, since nothing would come of them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatier.errors import StreamedModelError, UnsupportedModelError
from megatier.guards.unchanged import REMEDY

ALIASES = (Tensor.detach, Tensor.data.__get__)  # type: ignore[attr-defined]
"""Functions that give the same place under another name, to callers that look at it and do not compute."""
GRADIENT = Tensor.grad.__get__  # type: ignore[union-attr]
"""The function that gives a gradient."""
HARMLESS = (*ALIASES, GRADIENT)
"""Functions that compute nothing with a tensor."""
CHANGES = (Tensor.__setitem__, Tensor.data.__set__)  # type: ignore[attr-defined]
"""Functions that change their first argument, though their names do not say so."""
OPERATORS = re.compile(r"__i(add|sub|mul|div|truediv|floordiv|mod|pow|and|or|xor)__")
"""Names of operators that change their first argument."""
KEEPING = frozenset({"requires_grad_", "detach_", "share_memory_", "rename_"})
"""Names that end like those of functions that change a tensor, but leave its numbers as they are."""


class Unbound(nn.Parameter):
    """A parameter on meta that names the device and the dtype in which its weights compute.

    Llama 4 sends token ids to its embedding's device. Vision towers take pixels in the dtype of their weights.
    """

    bound_device: torch.device
    """The device on which the weights are bound."""
    bound_dtype: torch.dtype
    """The dtype of the weights that are bound."""
    full_name: str
    """The name of the parameter in the model."""
    refuses_gradient: bool = False
    """Whether nobody may ask for its gradient, which would be None and be taken for nothing to clip."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device on which the weights are bound."""
        return self.bound_device

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype of the weights that are bound."""
        return self.bound_dtype

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise StreamedModelError(
            f"a weight of shape {tuple(self.shape)} lies on megatier's tiers, not in the model, so the model cannot "
            "give or move it. Streamed.read(name) gives its fp32 master, Streamed.export(folder) writes all."
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
        """Run a function of torch on such parameters, unless it changes one.

        Raises:
            UnsupportedModelError: it does.
            StreamedModelError: it asks for a gradient that nobody may ask for.
        """
        kwargs = kwargs or {}
        if function == GRADIENT and args[0].refuses_gradient and not _clears():
            raise StreamedModelError(
                "gradients of a streamed model are on their way to its tiers, and never in .grad. torch's "
                "clip_grad_norm_ would find none: set streamed.clip instead, and read the norm from "
                "streamed.grad_norm(). A GradScaler would scale the norm as well: train in bf16 without one."
            )
        for target in _targets(function, args, kwargs):
            raise UnsupportedModelError(
                f"the weight {target.full_name} is changed where it is not bound, which would change nothing. {REMEDY}"
            )

        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)

        # An alias is such a parameter itself: else whoever has it could change it.
        if function in ALIASES:
            result.__class__ = type(args[0])
            result.__dict__ = dict(vars(args[0]))

        return result


class Guarded(Unbound):
    """A parameter of a layer whose modules are nodes of their own. Nobody but its module may compute with it.

    Torch does not refuse that: some products with a tensor on meta read whatever lies at address 0.
    """

    @classmethod
    def __torch_function__(
        cls,
        function: Any,  # noqa: ANN401 - whatever torch does with a tensor
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run a function of torch on such parameters, unless it computes with one.

        Raises:
            UnsupportedModelError: it does.
        """
        # A function of such parameters alone may look at their shapes, or give views of them.
        if all(isinstance(x, Unbound) for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)):
            result = super().__torch_function__(function, types, args, kwargs)
            if not torch.is_tensor(result) or isinstance(result, Unbound) or function in HARMLESS:
                return result

        raise UnsupportedModelError(
            "this model computes with a weight outside of the module that owns it, where it is not bound. "
            "Set model.expert_parts to 1: then a layer is one unit."
        )


def make_unbound(parameter: Tensor, device: torch.device, dtype: torch.dtype, name: str) -> None:
    """Turn a parameter on meta into an unbound one, in place.

    Args:
        parameter: the parameter.
        device: the device on which its weights are bound.
        dtype: the dtype of its weights then.
        name: its name in the model.
    """
    parameter.__class__ = Unbound
    unbound = cast("Unbound", parameter)
    unbound.bound_device = device
    unbound.bound_dtype = dtype
    unbound.full_name = name


def refuse_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Let nobody ask unbound parameters for their gradients."""
    for parameter in parameters:
        if isinstance(parameter, Unbound):
            parameter.refuses_gradient = True


def _clears() -> bool:
    """Return whether a gradient is asked for by a `zero_grad`, which has nothing to clear and loses nothing by that."""
    # The streamed model has one of its own. That of a module around it, such as Lightning's, asks each parameter.
    frame = sys._getframe(1)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name == "zero_grad"


def _targets(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Unbound]:  # noqa: ANN401
    """Return the unbound parameters that a function of torch writes into."""
    # By torch's own convention, the name of a function that changes its first argument ends with one underscore.
    name = str(getattr(function, "__name__", ""))
    is_in_place = name.endswith("_") and not name.endswith("__") and name not in KEEPING
    first = (args or tuple(kwargs.values()))[:1]
    written = first if is_in_place or OPERATORS.fullmatch(name) or function in CHANGES else ()
    return (x for x in tree_leaves((written, kwargs.get("out"))) if isinstance(x, Unbound))


@contextmanager
def refused_outside(model: nn.Module) -> Iterator[None]:
    """Run a forward of the model inside.

    Raises:
        UnsupportedModelError: it computes with a weight past the module that owns it, where that is not bound.
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
