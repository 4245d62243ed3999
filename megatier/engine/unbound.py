"""What lies in a module in place of its weights, while they are not bound."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatier.errors import StreamedModelError, UnsupportedModelError

HARMLESS = (Tensor.detach, Tensor.data.__get__, Tensor.grad.__get__)  # type: ignore[attr-defined, union-attr]
"""What gives a tensor on meta to those who look at places, and do not compute."""


class Unbound(nn.Parameter):
    """A parameter on meta that names device and dtype of its weights, as they compute.

    Llama 4 sends token ids to its embedding's device; vision towers take pixels in the dtype of their weights.
    """

    streams_to: torch.device
    streams_as: torch.dtype

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
            with torch._C.DisableTorchFunctionSubclass():
                result = function(*args, **(kwargs or {}))
            if not torch.is_tensor(result) or isinstance(result, Unbound) or function in HARMLESS:
                return result
        raise UnsupportedModelError(
            "this model computes with a weight outside of the module that owns it, where it is not bound. "
            "Set model.expert_parts to 1: then a layer is one unit."
        )


def make_unbound(parameter: Tensor, device: torch.device, dtype: torch.dtype) -> None:
    """Turn a parameter on meta into one, in place."""
    parameter.__class__ = Unbound
    parameter.streams_to, parameter.streams_as = device, dtype  # type: ignore[attr-defined]


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
