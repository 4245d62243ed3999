"""Draws first weights: of a model from scratch, or of a score alone.

Values are drawn unit by unit, so that the model is never whole in memory.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
        modules = model.named_modules()
        self._pretrained = {name: module for name, module in modules if isinstance(module, PreTrainedModel)}

    def read(self, unit: Unit, shard: Layout | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield the pieces of a unit, which is drawn once; see `WeightReader` and `part_reader`."""
        return self.part_reader(unit)(shard or unit.layout)

    def read_tensor(self, unit: Unit, tensor: TensorSlice) -> Iterator[tuple[int, Tensor]]:
        """Yield the pieces of a parameter, for which the whole unit is drawn."""
        return self.part_reader(unit)(replace(unit.layout, tensors=(tensor,)))

    def part_reader(self, unit: Unit) -> ReadPart:
        """Draw a unit, but for the parameters that have a law, and return what reads any part of it, in any thread.

        Raises:
            UnsupportedModelError: the model's own initialisation leaves a parameter unset.
        """
        lawful = [tensor for tensor in unit.layout.tensors if has_law(tensor)]

        # The seed of a unit does not depend on other units or on their order.
        seed = seed_of(f"{self._seed}:{unit.name}")
        with drawing_from(seed):
            values = self._drawn(unit, lawful)

        # NaN stands for what nothing has set.
        for name, value in values.items():
            if isinstance(value, Tensor) and value.isnan().any():
                raise UnsupportedModelError(
                    f"{type(self._model).__name__} has no initial value for {name}. Start from trained weights "
                    "(model.path)."
                )

        offsets = {tensor.name: tensor.offset for tensor in unit.layout.tensors}

        def read(part: Layout) -> Iterator[tuple[int, Tensor]]:
            for tensor in part.tensors:
                # A rank's shard may begin inside of a parameter.
                first = tensor.offset - offsets[tensor.name]
                stop = first + tensor.num_elements
                shift = tensor.start - first
                for start, piece in _pieces(values[tensor.name], first, stop):
                    yield start + shift, piece

        return read

    def draw(self, unit: Unit) -> dict[str, Tensor]:
        """Return the values of a unit, flat and in fp32, by name, as torch's generator gives them from where it is."""
        return {name: value for name, value in self._drawn(unit).items() if isinstance(value, Tensor)}

    @torch.no_grad()
    def _drawn(self, unit: Unit, lawful: Sequence[TensorSlice] = ()) -> dict[str, Tensor | Law]:
        """Return the values of a unit, flat and in fp32, by name, and in place of some of them their laws."""
        laws = [Law(tensor, self._seed) for tensor in lawful]
        values = {law.name: law.parameter for law in laws}
        for tensor in unit.layout.tensors:
            if tensor.name not in values:
                values[tensor.name] = nn.Parameter(self._constructed(tensor.name, tensor.shape))

        # A head that is tied to the embedding has nothing of its own.
        modules = unit.module_names if unit.is_layer else unit.module_names[:1]

        # Modules above the unit initialise what they own as well. That lies on meta, where writing changes nothing,
        # and where a streamed model would refuse it.
        noting = Noting(laws)
        with self._bound(unit, modules, values), torch._C.DisableTorchFunctionSubclass(), noting:
            for name in self._order(unit, modules):
                self._init_weights(name)

        drawn = dict[str, Tensor | Law]()
        for name, parameter in values.items():
            drawn[name] = parameter.detach().flatten()
        for law in noting.noted:
            # What no step sets is NaN then, which shows.
            drawn[law.name] = law if law.is_complete else law.settle()
        return drawn

    @contextmanager
    def _bound(self, unit: Unit, modules: Sequence[str], values: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Put real tensors into a unit's places inside some modules while the initialisation runs."""
        # Before anything is bound, since `bindings` knows parameters by their objects.
        places = [place for module in modules for place in bindings(self._model, unit, module)]
        before = [parameters[leaf] for parameters, leaf, _ in places]
        for parameters, leaf, tensor in places:
            parameters[leaf] = values[tensor.name]

        try:
            yield
        finally:
            for (parameters, leaf, _), parameter in zip(places, before, strict=True):
                parameters[leaf] = parameter

    def _constructed(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the value that the model's constructor gave a parameter, else NaN, which shows if nothing sets it."""
        parameter = self._model.get_parameter(name)
        value = constructed_value(parameter)
        initial = torch.full(shape, math.nan, dtype=torch.float32, device="cpu")

        # A part of a parameter, such as some of its experts, has no value from a constructor.
        if value is None or value.shape != shape:
            return initial
        return initial.copy_(value)

    def _order(self, unit: Unit, modules: Sequence[str]) -> Iterator[str]:
        """Yield the modules that initialise a unit, children before parents, which may set what lies below.

        They are the unit's modules with all that is below them, and what is above them up to the root.
        """
        if unit.is_lent:
            # What is below the owners of its parameters belongs to other units.
            owners = dict.fromkeys(name for tensor in unit.layout.tensors for name in _above(tensor.name))
            yield from sorted(owners, key=lambda name: len(_above(name)), reverse=True)
            return

        for module in modules:
            children = self._model.get_submodule(module).named_modules()
            downwards = [f"{module}.{child}".rstrip(".") for child, _ in children]
            yield from reversed(downwards)
            yield from _above(module)

    def _init_weights(self, name: str) -> None:
        """Let a module be initialised by the nearest PreTrainedModel at or above it. What is on meta stays as it is."""
        # As in transformers, where the language model inside of a model with a vision tower draws its own modules.
        nearest = next(owner for owner in (name, *_above(name)) if owner in self._pretrained)
        self._pretrained[nearest]._init_weights(self._model.get_submodule(name))


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
            names = ", ".join(unit.name for unit in new) or "nothing"
            raise UnsupportedModelError(
                f"{type(model).__name__} has {names} beside its language "
                "model, where one score is expected. Give the folder of a classifier, and leave num_labels out."
            )

        self._language = language
        with drawing_from(seed):
            (score,) = new
            self._score = Initialiser(model, seed).draw(score)
            self.generator = torch.get_rng_state()

    def read_tensor(self, unit: Unit, tensor: TensorSlice) -> Iterator[tuple[int, Tensor]]:
        """Yield the pieces of a parameter; see `WeightReader`."""
        if tensor.name not in self._score:
            yield from self._language.read_tensor(unit, tensor)
            return

        first, stop = tensor.elements
        yield tensor.start, self._score[tensor.name][first:stop]


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
        yield from value.draw(start, stop)
        return

    part = value[start:stop]
    for first, last in chunks(len(part)):
        yield start + first, part[first:last]


def _above(name: str) -> list[str]:
    """Return the names of all modules above one, the nearest first. The last is the root, which has no name."""
    names = list[str]()
    while name:
        name = name.rpartition(".")[0]
        names.append(name)
    return names
