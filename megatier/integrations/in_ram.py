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
        """Copy buffers, generation settings, and which parameters are frozen.

        Raises:
            UnsupportedModelError: the model is not what its config makes.
        """
        if type(model) is not type(skeleton):
            raise UnsupportedModelError(
                f"{type(model).__name__} is not the language or vision-language model that transformers loads for its "
                f"config ({type(skeleton).__name__}); only these are streamed."
            )
        self._parameters = dict(model.named_parameters())
        if absent := [name for name, _ in skeleton.named_parameters() if name not in self._parameters]:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no parameter {absent[0]}, which its config makes. Merge adapters "
                "into it first."
            )
        for name, buffer in model.named_buffers():
            skeleton.get_buffer(name).copy_(buffer)
        for name, parameter in skeleton.named_parameters():
            parameter.requires_grad_(self._parameters[name].requires_grad)
        skeleton.generation_config = model.generation_config

    def read(self, unit: Unit) -> Iterator[tuple[int, Tensor]]:
        """Yield (first element in the unit's layout, flat tensor), in order."""
        for tensor in unit.layout.tensors:
            start, stop = tensor.elements
            yield tensor.start, self._parameters[tensor.name].detach().flatten()[start:stop]
