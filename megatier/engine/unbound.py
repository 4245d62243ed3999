"""What lies in a module in place of its weights, while they are not bound."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor, nn

from megatier.errors import StreamedModelError, UnsupportedModelError


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
