"""The first weights of a model with adapters: those of the base from its folder, and those that PEFT begins with."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatier.adapters.stored import StoredAdapter
from megatier.compute.adapted import is_wrapper
from megatier.compute.quantised import QuantisedLinear
from megatier.compute.seeds import drawing_from
from megatier.layout import TensorSlice
from megatier.models.decoder import Unit
from megatier.models.weights import TensorReader, chunks

AROUND = re.compile(r"\.(base_layer|original_module|modules_to_save\.\w+)(?=\.|$)")
"""The parts of names that PEFT puts between a module of the base and what is above it."""
PART = re.compile(r"(?P<module>.+)\.(?P<part>lora_\w+)\.\w+(\.weight)?")
"""A parameter of an adapter."""
MAGNITUDE = "lora_magnitude_vector"
"""The part of an adapter with DoRA that begins with the lengths of the rows of the weight that it adapts."""


def base_name(name: str) -> str:
    """Return the name that a parameter of the base has in the base itself."""
    return AROUND.sub("", name)


def adapter_module(name: str) -> str:
    """Return the module that has the adapter of which a parameter is."""
    found = PART.fullmatch(name)
    assert found is not None
    return found["module"]


def is_of_adapter(name: str) -> bool:
    """Return whether a parameter is one of an adapter, and none of the base or a copy of one."""
    return PART.fullmatch(name) is not None


class AdaptedWeights(TensorReader):
    """The weights of a base, and of the adapters in it as PEFT initialises them.

    New adapters have the values that `torch.manual_seed` and PEFT's `get_peft_model` give them over a plain model in
    fp32. The matrices of one adapter exist whole in fp32 while they are read, and with DoRA the weight that it adapts.
    """

    def __init__(
        self,
        base: TensorReader,
        model: PreTrainedModel,
        seed: int,
        stored: StoredAdapter | None = None,
        generator: Tensor | None = None,
    ) -> None:
        """Keep what gives the weights.

        Args:
            base: gives those of the base.
            model: the skeleton with its adapters.
            seed: decides the values.
            stored: gives those of the adapters, and of modules that are trained whole; None: they begin anew.
            generator: the state of torch's generator, if something of the base was drawn from the seed before them.
        """
        self._base = base
        self.stored = stored
        """Gives the weights of adapters that are there; None: they begin anew."""
        self._shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self._shapes |= {
            f"{name}.weight": (module.out_features, module.in_features)
            for name, module in model.named_modules()
            if isinstance(module, QuantisedLinear)
        }
        self._transposed = {
            name.partition(f".{MAGNITUDE}.")[0]
            for name, module in model.named_modules()
            if f".{MAGNITUDE}." in name and getattr(module, "fan_in_fan_out", False)
        }
        self._parts = _parts(self._shapes, last={name for name, part in model.named_modules() if is_wrapper(part)})
        """The shapes of each adapter's parts, in the order in which PEFT makes them."""
        self._generators = {} if stored is not None else _draw_all(self._parts, seed, generator)
        """For each adapter the state of torch's generator with which PEFT begins to draw it."""

    def pieces(self, unit: Unit, tensor: TensorSlice) -> Iterator[tuple[int, Tensor]]:
        """Yield the pieces of a parameter; see `WeightReader`."""
        is_stored = self.stored is not None and tensor.name in self.stored
        if not (is_stored or is_of_adapter(tensor.name)):
            yield from self._base.pieces(unit, replace(tensor, name=base_name(tensor.name)))
            return

        value = self._value(unit, tensor.name).flatten()[slice(*tensor.elements)]
        for start, stop in chunks(value.numel()):
            yield tensor.start + start, value[start:stop]

    def _value(self, unit: Unit, name: str) -> Tensor:
        """Return the whole value of a parameter of an adapter: as it is stored, or as PEFT would set it at first."""
        if self.stored is not None:
            return self.stored.read(name)

        # As PEFT's `reset_lora_parameters` does.
        found = PART.fullmatch(name)
        assert found is not None
        if found["part"] == MAGNITUDE:
            return self._lengths(unit, found["module"])

        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._generators[found["module"]])
            return _draw(self._parts[found["module"]])[found["part"]]

    def _lengths(self, unit: Unit, module: str) -> Tensor:
        """Return the lengths of the rows of an adapted weight: its adapter adds nothing to them at first."""
        stored = f"{module}.base_layer.weight"
        shape = self._shapes[stored]
        weight = torch.empty(math.prod(shape), dtype=torch.float32, device="cpu")
        for start, values in self._base.pieces(unit, TensorSlice(base_name(stored), shape, 0)):
            weight[start : start + values.numel()] = values

        weight = weight.view(shape)
        lengths: Tensor = torch.linalg.norm(weight.T if module in self._transposed else weight, dim=1)
        return lengths


def _parts(shapes: Mapping[str, tuple[int, ...]], last: Set[str]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of each adapter's parts by module.

    Args:
        shapes: those of all parameters, by name, in the order of the modules.
        last: the modules that wrap parameters, whose adapters PEFT makes when all others are there.
    """
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if match := PART.fullmatch(name):
            found.setdefault(match["module"], {})[match["part"]] = shape
    return {module: found[module] for module in sorted(found, key=lambda module: module in last)}


def _draw_all(
    adapters: Mapping[str, Mapping[str, tuple[int, ...]]], seed: int, generator: Tensor | None
) -> dict[str, Tensor]:
    """Draw adapters as PEFT does, one after the other from one generator; returns its state before each of them."""
    states = {}
    with drawing_from(seed):
        if generator is not None:
            torch.set_rng_state(generator)
        for module, parts in adapters.items():
            states[module] = torch.get_rng_state()
            _draw(parts)
    return states


def _draw(parts: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Draw both matrices of an adapter as PEFT's `update_layer` does, which does not use all that it draws."""
    if "lora_A" in parts:
        shapes = [parts[part] for part in ("lora_A", "lora_B")]
        into, out = (nn.Linear(columns, rows, bias=False).weight.detach() for rows, columns in shapes)
        return {"lora_A": nn.init.kaiming_uniform_(into, a=math.sqrt(5)), "lora_B": out.zero_()}
    into, out = (
        torch.randn(parts[part], dtype=torch.float32, device="cpu") for part in ("lora_embedding_A", "lora_embedding_B")
    )
    return {"lora_embedding_A": into.zero_(), "lora_embedding_B": nn.init.normal_(out)}
