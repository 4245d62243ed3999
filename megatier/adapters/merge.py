"""Adapters merged into their base, matrix by matrix: the base is never whole in memory.

PEFT merges each one by itself, in fp32. So what is written is rounded once, where a model that is merged in bf16 rounds
the change and the sum. A matrix, its change and both parts of its adapter exist whole in fp32 while it is merged; so
does a parameter of stacked experts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatier.adapters.lora import ADAPTER
from megatier.adapters.weights import adapter_module, base_name, is_of_adapter
from megatier.compute.adapted import wrappers_in
from megatier.compute.quantised import QuantisedLinear
from megatier.layout import TensorSlice
from megatier.models.decoder import Unit
from megatier.models.weights import TensorReader

COPY = f".modules_to_save.{ADAPTER}."
"""The part of a name by which a module that is trained whole is known."""


class MergedWeights:
    """The weights of a plain model, with the adapters of another one merged into them."""

    def __init__(self, base: TensorReader, model: PreTrainedModel, trained: Callable[[str], Tensor]) -> None:
        """Keep what gives the weights.

        Args:
            base: gives those of the base.
            model: the skeleton with the adapters.
            trained: gives a whole parameter that is trained: flat, fp32, by its name in that skeleton.
        """
        self._base = base
        self._model = model
        self._trained = trained
        names = [name for name, _ in model.named_parameters()]
        self._copies = {base_name(name): name for name in names if COPY in name}
        self._adapted = _adapted(model)
        self._last: tuple[str, Tensor] | None = None

    def read(self, unit: Unit, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a unit of the plain model: flat, fp32, with 0 for padding.

        Asked in the order of a unit's elements it merges each matrix once.

        Raises:
            CheckpointError, TransferError: base or adapters cannot be read.
        """
        values = torch.zeros(stop - start, dtype=torch.float32, device="cpu")
        for tensor in unit.layout.tensors:
            lower = max(start, tensor.start)
            upper = min(stop, tensor.stop)
            if lower < upper:
                first, last = (tensor.offset + bound - tensor.start for bound in (lower, upper))
                values[lower - start : upper - start] = self._elements(unit, tensor, first, last)
        return values

    def _elements(self, unit: Unit, tensor: TensorSlice, first: int, last: int) -> Tensor:
        """Return elements [first, last) of a parameter of the plain model."""
        if tensor.name not in self._copies and tensor.name not in self._adapted:
            return self._of_base(unit, tensor.name, tensor.parameter_shape, first, last)

        if self._last is None or self._last[0] != tensor.name:
            self._last = tensor.name, self._whole(unit, tensor)
        return self._last[1][first:last]

    def _whole(self, unit: Unit, tensor: TensorSlice) -> Tensor:
        """Return a parameter of the plain model that was trained, or has an adapter."""
        if tensor.name in self._copies:
            return self._trained(self._copies[tensor.name])

        # PEFT merges in place, so it gets a copy of its layer, whose parameters lie on meta.
        name, base_key = self._adapted[tensor.name]
        layer: Any = copy.deepcopy(self._model.get_submodule(name))
        if isinstance(layer.base_layer, QuantisedLinear):
            layer.base_layer = layer.base_layer.plain()
        shape = tensor.parameter_shape
        base = self._of_base(unit, tensor.name, shape, 0, math.prod(shape)).view(shape)
        values = {
            key: self._trained(f"{name}.{key}").view(parameter.shape)
            for key, parameter in layer.named_parameters()
            if is_of_adapter(f"{name}.{key}") and adapter_module(f"{name}.{key}") == name
        }
        layer.load_state_dict({**values, base_key: base}, strict=False, assign=True)
        with torch.no_grad():
            layer.merge(adapter_names=[ADAPTER])
        merged: Tensor = layer.get_parameter(base_key).detach().flatten()
        return merged

    def _of_base(self, unit: Unit, name: str, shape: tuple[int, ...], first: int, last: int) -> Tensor:
        """Return elements [first, last) of a parameter as the base has it."""
        values = torch.empty(last - first, dtype=torch.float32, device="cpu")
        run = TensorSlice(name, (last - first,), 0, whole=shape, offset=first)
        for start, piece in self._base.pieces(unit, run):
            values[start : start + piece.numel()] = piece
        return values


def _adapted(model: PreTrainedModel) -> dict[str, tuple[str, str]]:
    """Return each parameter of the plain model that has an adapter, with the adapter's module and its name in there."""
    wrapped = {id(wrapper): path for path, wrapper in wrappers_in(model).items()}
    found: dict[str, tuple[str, str]] = {}
    for name in {adapter_module(name) for name, _ in model.named_parameters() if is_of_adapter(name)}:
        path = wrapped.get(id(model.get_submodule(name)), f"{name}.base_layer.weight")
        found[base_name(path)] = name, path.removeprefix(f"{name}.")
    return found
