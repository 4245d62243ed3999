"""First weights of a model that begins from scratch, drawn unit by unit: the model is never whole in memory."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatier.errors import UnsupportedModelError
from megatier.layout import Layout
from megatier.models.buffers import constructed_value
from megatier.models.decoder import Unit, bindings
from megatier.models.weights import chunks


class Initialiser:
    """Weights as Hugging Face's own `_init_weights` draws them, one unit at a time.

    A unit's values depend on the seed and on its own name alone. A unit exists whole in fp32 while it is read.
    """

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        """Keep the skeleton, whose parameters are back on meta after each read.

        Args:
            model: the skeleton.
            seed: decides the values.
        """
        self._model = model
        self._seed = seed
        self._pretrained = {name: part for name, part in model.named_modules() if isinstance(part, PreTrainedModel)}

    def read(self, unit: Unit, shard: Layout | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield (first element in the layout, flat fp32 CPU tensor), in order.

        Args:
            unit: the unit. It is drawn whole, since each number depends on those before it.
            shard: the layout of a rank's shard of it, whose values are given then; None: those of the whole unit.

        Raises:
            UnsupportedModelError: the model's own initialisation leaves a parameter unset.
        """
        values = self._initialised(unit)
        for name, value in values.items():
            if value.isnan().any():
                raise UnsupportedModelError(
                    f"{type(self._model).__name__} has no initial value for {name}. Start from trained weights "
                    "(model.path)."
                )

        offsets = {tensor.name: tensor.offset for tensor in unit.layout.tensors}
        for tensor in (shard or unit.layout).tensors:
            value = values[tensor.name][tensor.offset - offsets[tensor.name] :]
            for start, stop in chunks(tensor.num_elements):
                yield tensor.start + start, value[start:stop]

    @torch.no_grad()
    def _initialised(self, unit: Unit) -> dict[str, Tensor]:
        """Put real tensors in the unit's places while the initialisation runs, and return them, flat, by name."""
        # A head that is tied to the embedding has nothing of its own.
        modules = unit.module_names if unit.is_layer else unit.module_names[:1]
        places = [place for module in modules for place in bindings(self._model, unit, module)]
        before = [parameters[leaf] for parameters, leaf, _ in places]
        values = {
            tensor.name: nn.Parameter(self._constructed(tensor.name, tensor.shape)) for tensor in unit.layout.tensors
        }
        for parameters, leaf, tensor in places:
            parameters[leaf] = values[tensor.name]

        try:
            # Modules above the unit initialise what they own as well. That lies on meta, where writing changes nothing,
            # and where a streamed model would refuse it.
            with torch.random.fork_rng(devices=[]), torch._C.DisableTorchFunctionSubclass():
                torch.manual_seed(_seed_of(self._seed, unit.name))
                for name in self._order(unit, modules):
                    self._init_weights(name)
        finally:
            for (parameters, leaf, _), parameter in zip(places, before, strict=True):
                parameters[leaf] = parameter

        return {name: value.detach().flatten() for name, value in values.items()}

    def _constructed(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the value that the model's constructor gave a parameter, else NaN, which shows if nothing sets it."""
        # A part of a parameter, such as some of its experts, has no value from a constructor.
        value = constructed_value(self._model.get_parameter(name))
        initial = torch.full(shape, math.nan)
        return initial if value is None or value.shape != shape else initial.copy_(value)

    def _order(self, unit: Unit, modules: Sequence[str]) -> Iterator[str]:
        """Yield the modules that initialise a unit, children before parents, which may set what lies below.

        They are the unit's modules with all that is below them, and what is above them up to the root.
        """
        if unit.is_lent:
            # What is below the owners of its parameters belongs to other units.
            owners = (name for tensor in unit.layout.tensors for name in list(_upwards(tensor.name))[1:])
            yield from sorted(dict.fromkeys(owners), key=lambda name: len(list(_upwards(name))), reverse=True)
            return

        for module in modules:
            below = (f"{module}.{child}".rstrip(".") for child, _ in self._model.get_submodule(module).named_modules())
            yield from reversed(list(below))
            yield from list(_upwards(module))[1:]

    def _init_weights(self, name: str) -> None:
        """Let a module be initialised by the nearest PreTrainedModel at or above it. What is on meta stays as it is."""
        owner = next(self._pretrained[above] for above in _upwards(name) if above in self._pretrained)
        owner._init_weights(self._model.get_submodule(name))


def _seed_of(seed: int, name: str) -> int:
    """Return the seed of a unit, which does not depend on other units or on their order."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")


def _upwards(name: str) -> Iterator[str]:
    """Yield a module's name, its parent's, and so on to the root, which is the empty name."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
