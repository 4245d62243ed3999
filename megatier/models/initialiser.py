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
from megatier.models.deferred_init import DeferredInit, RecordInits, is_deferred, seed_of
from megatier.models.weights import ReadPart, TensorReader, chunks


class Initialiser(TensorReader):
    """Weights as Hugging Face's own `_init_weights` draws them, one unit at a time.

    A unit's values depend only on the seed and on the unit's name. Those of a large parameter depend on the seed and on
    the parameter's name, and are drawn chunk by chunk (`deferred_init`). The other parameters of a unit exist whole in
    fp32 while it is read.
    """

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        """Keep the skeleton. Its parameters are back on meta after each read.

        Args:
            model: the skeleton.
            seed: decides the values.
        """
        self._model = model
        self._seed = seed
        modules = model.named_modules()
        self._pretrained = {name: module for name, module in modules if isinstance(module, PreTrainedModel)}

    def read(self, unit: Unit, shard: Layout | None = None) -> Iterator[tuple[int, Tensor]]:
        """Draw a unit and yield its pieces; see `WeightReader` and `part_reader`."""
        return self.part_reader(unit)(shard or unit.layout)

    def read_tensor(self, unit: Unit, tensor: TensorSlice) -> Iterator[tuple[int, Tensor]]:
        """Yield the pieces of a parameter. The whole unit is drawn for it."""
        return self.part_reader(unit)(replace(unit.layout, tensors=(tensor,)))

    def part_reader(self, unit: Unit) -> ReadPart:
        """Draw a unit except for its deferred parameters, and return a function that reads any part in any thread.

        Raises:
            UnsupportedModelError: the model's own initialisation leaves a parameter unset.
        """
        deferred = [tensor for tensor in unit.layout.tensors if is_deferred(tensor)]

        # The seed of a unit does not depend on other units or on their order.
        seed = seed_of(f"{self._seed}:{unit.name}")
        with drawing_from(seed):
            values = self._drawn(unit, deferred)

        # Values that nothing has set are NaN.
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
        """Return the values of a unit by name, flat and in fp32, drawn from the present state of torch's generator."""
        return {name: value for name, value in self._drawn(unit).items() if isinstance(value, Tensor)}

    @torch.no_grad()
    def _drawn(self, unit: Unit, deferred: Sequence[TensorSlice] = ()) -> dict[str, Tensor | DeferredInit]:
        """Return the values of a unit by name, flat and in fp32. Deferred parameters stay deferred."""
        inits = [DeferredInit(tensor, self._seed) for tensor in deferred]
        values = {init.name: init.parameter for init in inits}
        for tensor in unit.layout.tensors:
            if tensor.name not in values:
                values[tensor.name] = nn.Parameter(self._constructed(tensor.name, tensor.shape))

        # A head that is tied to the embedding has nothing of its own.
        modules = unit.module_names if unit.is_layer else unit.module_names[:1]

        # Modules above the unit initialise their own parameters as well. Those lie on meta, where writing changes
        # nothing, and where a streamed model would refuse it.
        recording = RecordInits(inits)
        with self._bound(unit, modules, values), torch._C.DisableTorchFunctionSubclass(), recording:
            for name in self._order(unit, modules):
                self._init_weights(name)

        drawn = dict[str, Tensor | DeferredInit]()
        for name, parameter in values.items():
            drawn[name] = parameter.detach().flatten()
        for init in recording.recorded:
            # An element that no step sets becomes NaN here, which the caller refuses.
            drawn[init.name] = init if init.is_complete else init.materialize()
        return drawn

    @contextmanager
    def _bound(self, unit: Unit, modules: Sequence[str], values: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Put real tensors into a unit's places inside some modules while the initialisation runs."""
        # Found before anything is bound, since `bindings` recognises parameters by their objects.
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
        """Return the value that the model's constructor gave a parameter, or NaN, which shows if nothing sets it."""
        parameter = self._model.get_parameter(name)
        value = constructed_value(parameter)
        initial = torch.full(shape, math.nan, dtype=torch.float32, device="cpu")

        # A part of a parameter, such as some of its experts, has no value from a constructor.
        if value is None or value.shape != shape:
            return initial
        return initial.copy_(value)

    def _order(self, unit: Unit, modules: Sequence[str]) -> Iterator[str]:
        """Yield the modules that initialise a unit, children before parents, since a parent may set what lies below it.

        They are the unit's modules with everything below them, and the modules above them up to the root.
        """
        if unit.is_lent:
            # Modules below the owners of its parameters belong to other units.
            owners = dict.fromkeys(name for tensor in unit.layout.tensors for name in _above(tensor.name))
            yield from sorted(owners, key=lambda name: len(_above(name)), reverse=True)
            return

        for module in modules:
            children = self._model.get_submodule(module).named_modules()
            downwards = [f"{module}.{child}".rstrip(".") for child, _ in children]
            yield from reversed(downwards)
            yield from _above(module)

    def _init_weights(self, name: str) -> None:
        """Initialise a module by the nearest PreTrainedModel at or above it. Parameters on meta stay as they are."""
        # As in transformers, where the language model inside of a model with a vision tower draws its own modules.
        nearest = next(owner for owner in (name, *_above(name)) if owner in self._pretrained)
        self._pretrained[nearest]._init_weights(self._model.get_submodule(name))


class NewScore(TensorReader):
    """The weights of a new classifier: its layers come from a language model, and its score is drawn.

    The score has the values that `torch.manual_seed` and `from_pretrained` of the classifier's auto class would give it
    on top of the folder of the language model, in fp32.

    Attributes:
        generator: the state of torch's generator after the score was drawn.
    """

    def __init__(self, language: TensorReader, known: Container[str], model: PreTrainedModel, seed: int) -> None:
        """Draw the score, whole.

        Args:
            language: gives the weights of the language model.
            known: the names of the language model's parameters.
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
    kind: object = AutoModelForSequenceClassification._model_mapping.get(type(config), None)
    if not isinstance(kind, type):
        raise UnsupportedModelError(f"transformers has no classifier of sequences over {config.model_type}.")
    config = copy.deepcopy(config)
    config.architectures = [kind.__name__]
    config.num_labels = num_labels
    return config


def _pieces(value: Tensor | DeferredInit, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
    """Yield (first element, flat values) of elements [start, stop) of a parameter."""
    if isinstance(value, DeferredInit):
        yield from value.draw(start, stop)
        return

    part = value[start:stop]
    for first, last in chunks(len(part)):
        yield start + first, part[first:last]


def _above(name: str) -> list[str]:
    """Return the names of all modules above one, nearest first. The last one is the root, whose name is empty."""
    names = list[str]()
    while name:
        name = name.rpartition(".")[0]
        names.append(name)
    return names
