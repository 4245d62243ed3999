"""Reads a streamed model's weights from a plain model in RAM."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from megatier.layout import TensorSlice
from megatier.models.decoder import Unit
from megatier.models.weights import TensorReader


class InMemoryWeights(TensorReader):
    """The weights of a model in RAM, as a `WeightReader` for `Session.load`. The model is only read."""

    def __init__(self, model: nn.Module) -> None:
        """Take a model, whose copy is the skeleton (`models.module_copies`). Its weights are read later."""
        self._parameters = dict(model.named_parameters())

    def read_tensor(self, unit: Unit, tensor: TensorSlice) -> Iterator[tuple[int, Tensor]]:
        """Yield a parameter, or a run of its elements; see `WeightReader`."""
        # A unit may hold only some rows of a parameter, such as some of a layer's experts, and a shard any run of its
        # elements.
        yield tensor.start, self._parameters[tensor.name].detach().flatten()[slice(*tensor.elements)]
