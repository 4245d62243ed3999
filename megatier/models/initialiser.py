"""First weights that are drawn: of a model from scratch, or of a score alone.

They are drawn unit by unit, so that the model is never whole in memory.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from megatier.compute.seeds import drawing_from
from megatier.errors import UnsupportedModelError
from megatier.layout import Layout, TensorSlice
from megatier.models.buffers import constructed_value
from megatier.models.decoder import Unit, bindings, find_units
from megatier.models.laws import Law, Noting, has_law, seed_of
from megatier.models.weights import ReadPart, TensorReader, chunks


class Initialiser(TensorReader):
    """Weights as Hugging Face's own `_init_weights` draws them, one unit at a time.

    A unit's values depend on the seed and on its own name alone, those of a large parameter on the seed and on the
    parameter's name (`laws`). The other parameters of a unit exist whole in fp32 while it is read.
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
        """Yield the pieces of a unit, which is drawn once; see `WeightReader` and `parts`."""
        return self.parts(unit)(shard or unit.layout)

    def pieces(self, unit: Unit, tensor: TensorSlice) -> Iterator[tuple[int, Tensor]]:
        """Yield the pieces of a parameter, for which the whole unit is drawn."""
        return self.parts(unit)(replace(unit.layout, tensors=(tensor,)))

    def parts(self, unit: Unit) -> ReadPart:
        """Draw a unit, but for the parameters that have a law, and return what reads any part of it, in any thread.

        Raises:
            UnsupportedModelError: the model's own initialisation leaves a parameter unset.
        """
        # The seed of a unit does not depend on other units or on their order.
        with drawing_from(seed_of(f"{self._seed}:{unit.name}")):
            values = self._drawn(unit, [tensor for tensor in unit.layout.tensors if has_law(tensor)])
        for name, value in values.items():
            if isinstance(value, Tensor) and value.isnan().any():
                raise UnsupportedModelError(
                    f"{type(self._model).__name__} has no initial value for {name}. Start from trained weights "
                    "(model.path)."
                )

        offsets = {tensor.name: tensor.offset for tensor in unit.layout.tensors}

        def read(part: Layout) -> Iterator[tuple[int, Tensor]]:
            for tensor in part.tensors:
                first = tensor.offset - offsets[tensor.name]
                for start, piece in _pieces(values[tensor.name], first, first + tensor.num_elements):
                    yield tensor.start + start - first, piece

        return read

    def draw(self, unit: Unit) -> dict[str, Tensor]:
        """Return the values of a unit, flat and in fp32, by name, as torch's generator gives them from where it is."""
        return {name: value for name, value in self._drawn(unit).items() if isinstance(value, Tensor)}

    @torch.no_grad()
    def _drawn(self, unit: Unit, lawful: Sequence[TensorSlice] = ()) -> dict[str, Tensor | Law]:
        """Return the values of a unit, flat and in fp32, by name, and in place of some of them their laws."""
        # Real tensors are in the unit's places while the initialisation runs. A head that is tied to the embedding has
        # nothing of its own.
        modules = unit.module_names if unit.is_layer else unit.module_names[:1]
        places = [place for module in modules for place in bindings(self._model, unit, module)]
        before = [parameters[leaf] for parameters, leaf, _ in places]
        laws = {tensor.name: Law(tensor, self._seed) for tensor in lawful}
        values = {name: law.parameter for name, law in laws.items()} | {
            tensor.name: nn.Parameter(self._constructed(tensor.name, tensor.shape))
            for tensor in unit.layout.tensors
            if tensor.name not in laws
        }
        for parameters, leaf, tensor in places:
            parameters[leaf] = values[tensor.name]

        try:
            # Modules above the unit initialise what they own as well. That lies on meta, where writing changes nothing,
            # and where a streamed model would refuse it.
            with torch._C.DisableTorchFunctionSubclass(), Noting(laws.values()) as noting:
                for name in self._order(unit, modules):
                    self._init_weights(name)
        finally:
            for (parameters, leaf, _), parameter in zip(places, before, strict=True):
                parameters[leaf] = parameter

        found: dict[str, Tensor | Law] = {name: value.detach().flatten() for name, value in values.items()}
        for law in noting.noted:
            # What no step sets is NaN then, which shows.
            found[law.name] = law if law.is_complete else law.settle()
        return found

    def _constructed(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the value that the model's constructor gave a parameter, else NaN, which shows if nothing sets it."""
        # A part of a parameter, such as some of its experts, has no value from a constructor.
        value = constructed_value(self._model.get_parameter(name))
        initial = torch.full(shape, math.nan, dtype=torch.float32, device="cpu")
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


class NewScore(TensorReader):
    """The weights of a classifier that begins on a language model: the layers from there, and a score that is new.

    The score has the values that `torch.manual_seed` and `from_pretrained` of the classifier's auto class give it over
    the folder of the language model, in fp32.

    Attributes:
        generator: the state of torch's generator after the score was drawn.
    """

    def __init__(self, language: TensorReader, known: Container[str], model: PreTrainedModel, seed: int) -> None:
        """Draw the score, whole.

        Args:
            language: gives the weights of the language model.
            known: the names that these have there.
            model: the skeleton of the classifier, without adapters.
            seed: decides the values.

        Raises:
            UnsupportedModelError: more than one unit of the classifier is new.
        """
        new = [unit for unit in find_units(model) if not all(tensor.name in known for tensor in unit.layout.tensors)]
        if len(new) != 1:
            raise UnsupportedModelError(
                f"{type(model).__name__} has {', '.join(unit.name for unit in new) or 'nothing'} beside its language "
                "model, where one score is expected. Give the folder of a classifier, and leave num_labels out."
            )

        self._language = language
        with drawing_from(seed):
            self._score = Initialiser(model, seed).draw(new[0])
            self.generator = torch.get_rng_state()

    def pieces(self, unit: Unit, tensor: TensorSlice) -> Iterator[tuple[int, Tensor]]:
        """Yield the pieces of a parameter; see `WeightReader`."""
        if tensor.name in self._score:
            yield tensor.start, self._score[tensor.name][slice(*tensor.elements)]
        else:
            yield from self._language.pieces(unit, tensor)


def named_as_classifier(config: PretrainedConfig, num_labels: int) -> PretrainedConfig:
    """Return the config of a classifier of sequences over the language model of a config, which stays as it is.

    Raises:
        UnsupportedModelError: transformers has none.
    """
    made: object = AutoModelForSequenceClassification._model_mapping.get(type(config), None)
    if not isinstance(made, type):
        raise UnsupportedModelError(f"transformers has no classifier of sequences over {config.model_type}.")
    config = copy.deepcopy(config)
    config.architectures = [made.__name__]
    config.num_labels = num_labels
    return config


def _pieces(value: Tensor | Law, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
    """Yield (first element, flat values) of elements [start, stop) of a parameter."""
    if isinstance(value, Law):
        yield from value.pieces(start, stop)
        return
    for first, last in chunks(stop - start):
        yield start + first, value[start + first : start + last]


def _upwards(name: str) -> Iterator[str]:
    """Yield a module's name, its parent's, and so on to the root, which is the empty name."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
