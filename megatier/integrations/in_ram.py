"""A plain model in RAM, as the source of a streamed model's weights."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from megatier.layout import Layout
from megatier.models.decoder import Unit


class InRam:
    """The weights of a model in RAM, as a source for `Session.load`. The model is only read."""

    def __init__(self, model: nn.Module) -> None:
        """Take a model, whose copy is the skeleton (`models.copied`). Its weights are read later, unit by unit."""
        self._parameters = dict(model.named_parameters())

    def read(self, unit: Unit, shard: Layout | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield (first element in the layout, flat tensor), in order, of the unit or of a rank's shard of it."""
        # A unit may have only some rows of a parameter, such as those of a part of a layer's experts, and a shard any
        # run of its elements.
        for tensor in (shard or unit.layout).tensors:
            start, stop = tensor.elements
            yield tensor.start, self._parameters[tensor.name].detach().flatten()[start:stop]
