"""Merges adapters into their base, matrix by matrix, so that the base is never whole in memory.

PEFT merges each adapter by itself in fp32, so the result is rounded once, where merging in bf16 rounds both the change
and the sum. While it is merged, a matrix, its change and both parts of its adapter exist whole in fp32, and so does a
parameter of stacked experts.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatier.adapters.first_weights import adapter_module, base_name, is_of_adapter
from megatier.adapters.given_adapters import add_given
from megatier.adapters.lora import ADAPTER, adapter_config
from megatier.compute.adapted_parameter import wrappers_in
from megatier.compute.quantised_linear import QuantisedLinear
from megatier.errors import UnsupportedModelError
from megatier.layout import TensorSlice
from megatier.models.decoder import Unit, build_skeleton
from megatier.models.weights import TensorReader

COPY = f".modules_to_save.{ADAPTER}."
"""The part of a name that marks a module which is trained whole."""


class MergedWeights:
    """The weights of a plain model, with the adapters of another model merged into them."""

    def __init__(self, base: TensorReader, model: PreTrainedModel, trained: Callable[[str], Tensor]) -> None:
        """Take the sources of the weights.

        Args:
            base: the weights of the base.
            model: the skeleton with the adapters.
            trained: returns a whole trained parameter, flat and fp32, by its name in that skeleton.
        """
        self._base = base
        self._model = model
        self._trained = trained

        # The adapted matrices, by their names in the plain model. All others are read from the base.
        self._adapted = _adapted(model)
        self._last_merged: tuple[str, Tensor] | None = None

        self._copies = dict[str, str]()
        """The parameters that were trained whole, by their names in the plain model."""
        for name, _ in model.named_parameters():
            if COPY in name:
                self._copies[base_name(name)] = name

    def read(self, unit: Unit, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a unit of the plain model: flat, fp32, with 0 for padding.

        If called in the order of a unit's elements, it merges each matrix once.

        Raises:
            CheckpointError, TransferError: base or adapters cannot be read.
        """
        values = torch.zeros(stop - start, dtype=torch.float32, device="cpu")
        for tensor in unit.layout.tensors:
            lower = max(start, tensor.start)
            upper = min(stop, tensor.stop)
            if lower < upper:
                # The unit may hold only a part of the parameter.
                shift = tensor.offset - tensor.start
                elements = self._elements(unit, tensor, lower + shift, upper + shift)
                values[lower - start : upper - start] = elements
        return values

    def _elements(self, unit: Unit, tensor: TensorSlice, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a parameter of the plain model."""
        name = tensor.name
        is_of_base = name not in self._copies and name not in self._adapted
        if is_of_base:
            return self._of_base(unit, name, tensor.parameter_shape, start, stop)

        # The last one is cached, since a large parameter is read in several pieces.
        if self._last_merged is None or self._last_merged[0] != name:
            self._last_merged = name, self._whole(unit, tensor)
        _, merged = self._last_merged
        return merged[start:stop]

    def _whole(self, unit: Unit, tensor: TensorSlice) -> Tensor:
        """Return a parameter of the plain model that was trained or has an adapter."""
        if tensor.name in self._copies:
            return self._trained(self._copies[tensor.name])

        module_name, base_key = self._adapted[tensor.name]
        shape = tensor.parameter_shape

        # Whole, since an adapter is a product of matrices, and DoRA scales rows by their norms.
        num_elements = math.prod(shape)
        base = self._of_base(unit, tensor.name, shape, 0, num_elements)
        merged = _merged(self._model, module_name, base_key, base.view(shape), self._trained)
        return merged.flatten()

    def _of_base(self, unit: Unit, name: str, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a parameter of the base."""
        run = TensorSlice(name, (stop - start,), 0, whole=shape, offset=start)
        return self._base.read_whole(unit, run)


class LayerMerger:
    """Merges the adapters of a model in training, one parameter after the other.

    Attributes:
        plain: the skeleton of the model without adapters.
        names: the names of its parameters, by their names in the model with adapters.
        own_names: the other way round.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Build both skeletons again, since the parameters in training are elsewhere and its forwards are replaced.

        Args:
            model: the skeleton in training.

        Raises:
            UnsupportedModelError: the model is not the one that its config describes.
        """
        # Neither of them ever runs, so any attention will do.
        self.plain = build_skeleton(model.config, "sdpa")
        self._trained = model
        self._model = copy.deepcopy(self.plain)

        # A copy, since the model in training keeps using its own.
        config: Any = copy.copy(adapter_config(model))

        # Neither setting changes the set of parameters.
        config.init_lora_weights = True
        config.inference_mode = False
        add_given(self._model, config, "")
        self._shapes = {name: tuple(parameter.shape) for name, parameter in self._model.named_parameters()}
        plain_shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        if plain_shapes != self._shapes:
            name = min(plain_shapes.keys() ^ self._shapes.keys(), default="a parameter")
            raise UnsupportedModelError(
                f"adapters of {type(model).__name__} cannot be merged: the model is not the one that its config "
                f"describes ({name} differs). Give the engine the adapter alone, by Streamed.export."
            )

        self._adapted = _adapted(self._model)
        parts = defaultdict[str, list[str]](list)
        for name in plain_shapes:
            if is_of_adapter(name):
                parts[adapter_module(name)].append(name)
        self._parts = {name: parts[module_name] for name, (module_name, _) in self._adapted.items()}
        copied = {base_name(name) for name in plain_shapes if COPY in name}
        self.names = {}
        for name in plain_shapes:
            is_original = base_name(name) in copied and COPY not in name
            if not is_of_adapter(name) and not is_original:
                self.names[name] = base_name(name)
        self.own_names = {plain: name for name, plain in self.names.items()}

    def parts(self, name: str) -> list[str]:
        """Return the adapter's parameters for a parameter of the plain model; none if it has no adapter."""
        return self._parts.get(name, [])

    def merged(self, name: str, base: Tensor, part: Callable[[str], Tensor]) -> Tensor:
        """Return a parameter of the plain model, flat, with its adapter merged into it.

        Args:
            name: its name there.
            base: its elements in the base, in fp32.
            part: gives parameters of the adapter by their names: flat, fp32.
        """
        module_name, base_key = self._adapted[name]
        shape = self._shapes[f"{module_name}.{base_key}"]

        # The model is trained with its layer's present scale, whatever its config says.
        layer: Any = self._model.get_submodule(module_name)
        trained: Any = self._trained.get_submodule(module_name)
        layer.scaling = dict(trained.scaling)
        return _merged(self._model, module_name, base_key, base.view(shape), part).flatten()


def _merged(
    model: PreTrainedModel, module_name: str, base_key: str, base: Tensor, part: Callable[[str], Tensor]
) -> Tensor:
    """Return a parameter with the adapter of a module merged into it, in fp32.

    Args:
        model: a skeleton with adapters.
        module_name: the module that has the adapter.
        base_key: the parameter's name in that module.
        base: its value in the base.
        part: gives parameters of the adapter by their names: flat, fp32.
    """
    # PEFT merges in place, so it gets a copy of its layer, whose parameters are on meta.
    layer: Any = copy.deepcopy(model.get_submodule(module_name))
    if isinstance(layer.base_layer, QuantisedLinear):
        # A quantised layer has only codes, while PEFT merges into a weight.
        layer.base_layer = layer.base_layer.plain()

    values = {base_key: base}
    for key, parameter in layer.named_parameters():
        # A parameter's wrapper may contain another parameter's wrapper, whose adapter is merged by itself.
        name = f"{module_name}.{key}"
        if is_of_adapter(name) and adapter_module(name) == module_name:
            values[key] = part(name).view(parameter.shape)

    # Not strict, since other parameters of the layer stay on meta. Assigned, since nothing can be copied to meta.
    layer.load_state_dict(values, strict=False, assign=True)
    with torch.no_grad():
        layer.merge(adapter_names=[ADAPTER])
    merged: Tensor = layer.get_parameter(base_key).detach()
    return merged


def _adapted(model: PreTrainedModel) -> dict[str, tuple[str, str]]:
    """Return each adapted parameter of the plain model, with the adapter's module and the parameter's name in it."""
    wrapped = {id(wrapper): name for name, wrapper in wrappers_in(model).items()}
    adapted: dict[str, tuple[str, str]] = {}
    for parameter, _ in model.named_parameters():
        if not is_of_adapter(parameter):
            continue

        # A wrapper adapts one parameter of any name, and PEFT's other modules adapt a weight.
        module_name = adapter_module(parameter)
        module = model.get_submodule(module_name)
        name = wrapped.get(id(module), f"{module_name}.base_layer.weight")
        adapted[base_name(name)] = module_name, name.removeprefix(f"{module_name}.")
    return adapted
