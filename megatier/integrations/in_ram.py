"""A plain model in RAM, as the source of a streamed model's weights."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from transformers import PreTrainedModel

from megatier.errors import UnsupportedModelError
from megatier.models.decoder import Unit


class InRam:
    """The weights of a model in RAM, a source for `Session.load`."""

    def __init__(self, model: PreTrainedModel, skeleton: PreTrainedModel) -> None:
        """Copy buffers and generation settings.

        Raises:
            UnsupportedModelError: the model is not what its config makes.
        """
        if type(model) is not type(skeleton):
            raise UnsupportedModelError(
                f"{type(model).__name__} is no causal language model as transformers loads it "
                f"({type(skeleton).__name__}); only these are streamed."
            )
        self._parameters = dict(model.named_parameters())
        for name, buffer in model.named_buffers():
            skeleton.get_buffer(name).copy_(buffer)
        skeleton.generation_config = model.generation_config

    def read(self, unit: Unit) -> Iterator[tuple[int, Tensor]]:
        """(first element, flat tensor) of each of the unit's tensors."""
        for tensor in unit.layout.tensors:
            start, stop = tensor.elements
            yield tensor.start, self._parameters[tensor.name].detach().flatten()[start:stop]
