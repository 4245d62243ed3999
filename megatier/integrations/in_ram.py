"""A plain model in RAM, as the source of a streamed model's weights."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from transformers import PreTrainedModel

from megatier.errors import UnsupportedModelError
from megatier.layout import Layout
from megatier.models.decoder import Unit


class InRam:
    """The weights of a model in RAM, as a source for `Session.load`. The model is only read."""

    def __init__(self, model: PreTrainedModel, skeleton: PreTrainedModel) -> None:
        """Give the skeleton the model's buffers, its generation settings and its choice of frozen parameters.

        Args:
            model: the model in RAM.
            skeleton: a model of the same config on meta, whose weights will be read from here.

        Raises:
            UnsupportedModelError: the model is not the one that its config makes.
        """
        # The skeleton comes from the config alone. A subclass or a wrapper would compute something else than it.
        if type(model) is not type(skeleton):
            raise UnsupportedModelError(
                f"{type(model).__name__} is neither a classifier nor the language model, with or without vision, that "
                f"transformers loads for its config ({type(skeleton).__name__}); only these are streamed."
            )

        self._parameters = dict(model.named_parameters())
        if absent := [name for name, _ in skeleton.named_parameters() if name not in self._parameters]:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no parameter {absent[0]}, which its config makes. Merge adapters "
                "into it first."
            )

        # A config may be changed after its model is made, as by those who choose a padding token for a classifier.
        for name, parameter in skeleton.named_parameters():
            if (shape := self._parameters[name].shape) != parameter.shape:
                raise UnsupportedModelError(
                    f"{type(model).__name__}: parameter {name} has shape {tuple(shape)}, and the model's config asks "
                    f"for {tuple(parameter.shape)}. Change the config before the model is made of it."
                )
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding):
                skeleton.get_submodule(name).padding_idx = module.padding_idx  # type: ignore[assignment]

        # Buffers and the choice of frozen parameters are copied now. The weights are read later, unit by unit, from the
        # model itself.
        for name, buffer in model.named_buffers():
            skeleton.get_buffer(name).copy_(buffer)
        for name, parameter in skeleton.named_parameters():
            parameter.requires_grad_(self._parameters[name].requires_grad)
        if model.can_generate():
            skeleton.generation_config = model.generation_config

    def read(self, unit: Unit, shard: Layout | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield (first element in the layout, flat tensor), in order, of the unit or of a rank's shard of it."""
        # A unit may have only some rows of a parameter, such as those of a part of a layer's experts, and a shard any
        # run of its elements.
        for tensor in (shard or unit.layout).tensors:
            start, stop = tensor.elements
            yield tensor.start, self._parameters[tensor.name].detach().flatten()[start:stop]
