"""Provides the first weights of a model with adapters: the base's from its folder, and PEFT's initial values."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatier.adapters.stored_adapters import StoredAdapter
from megatier.compute.adapted_parameter import is_wrapper
from megatier.compute.quantised_linear import QuantisedLinear
from megatier.compute.seeds import drawing_from
from megatier.layout import TensorSlice
from megatier.models.decoder import Unit
from megatier.models.weights import TensorReader, chunks

AROUND = re.compile(r"\.(base_layer|original_module|modules_to_save\.\w+)(?=\.|$)")
"""The parts of names that PEFT inserts between a module of the base and its parent."""
_ADAPTER_PARAMETER = re.compile(r"(?P<module>.+)\.(?P<part>lora_\w+)\.\w+(\.weight)?")
"""The name of an adapter's parameter."""
MAGNITUDE = "lora_magnitude_vector"
"""The part of a DoRA adapter that is initialised with the row norms of the adapted weight."""


def base_name(name: str) -> str:
    """Return the name of a base parameter in the plain base model."""
    return AROUND.sub("", name)


def adapter_module(name: str) -> str:
    """Return the module that has a parameter's adapter."""
    match = _ADAPTER_PARAMETER.fullmatch(name)
    assert match is not None
    return match["module"]


def is_of_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter, rather than to the base or a copy of one of its modules."""
    return _ADAPTER_PARAMETER.fullmatch(name) is not None


class AdaptedWeights(TensorReader):
    """The weights of a base, and of adapters as PEFT initialises them.

    New adapters have the values that `torch.manual_seed` and PEFT's `get_peft_model` give them over a plain model in
    fp32. While they are read, the matrices of one adapter exist whole in fp32, and with DoRA also the adapted weight.
    """

    def __init__(
        self,
        base: TensorReader,
        model: PreTrainedModel,
        seed: int,
        stored: StoredAdapter | None = None,
        generator: Tensor | None = None,
    ) -> None:
        """Take the sources of the weights.

        Args:
            base: the weights of the base.
            model: the skeleton with its adapters.
            seed: decides the values.
            stored: the weights of adapters, and of modules that are trained whole; None: they are initialised.
            generator: the state of torch's generator, if a part of the base was drawn from the seed before.
        """
        self._base = base
        self.stored = stored
        """The weights of existing adapters; None: they are initialised."""
        self._shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self._transposed = set[str]()
        """The modules whose weight has a row for each input, as in GPT-2."""
        wrappers = set[str]()

        for name, module in model.named_modules():
            if isinstance(module, QuantisedLinear):
                # The parameters of a quantised layer are codes and scales, but DoRA needs the shape of the decoded
                # weight.
                self._shapes[f"{name}.weight"] = module.out_features, module.in_features
            if is_wrapper(module):
                wrappers.add(name)
            if f".{MAGNITUDE}." in name and getattr(module, "fan_in_fan_out", False):
                self._transposed.add(name.partition(f".{MAGNITUDE}.")[0])

        self._parts = _parts(self._shapes, last=wrappers)
        """The shapes of each adapter's parts, in the order in which PEFT makes them."""
        self._generators = {} if stored is not None else _draw_all(self._parts, seed, generator)
        """For each adapter, the state of torch's generator when PEFT begins to draw it."""

    def read_tensor(self, unit: Unit, tensor: TensorSlice) -> Iterator[tuple[int, Tensor]]:
        """Yield the pieces of a parameter; see `WeightReader`."""
        # An adapter folder also holds modules that are trained whole. Their first values are those of the base.
        is_stored = self.stored is not None and tensor.name in self.stored
        if not is_stored and not is_of_adapter(tensor.name):
            of_base = replace(tensor, name=base_name(tensor.name))
            yield from self._base.read_tensor(unit, of_base)
            return

        value = self._value(unit, tensor.name)
        first, last = tensor.elements
        flat = value.flatten()[first:last]
        for start, stop in chunks(flat.numel()):
            yield tensor.start + start, flat[start:stop]

    def _value(self, unit: Unit, name: str) -> Tensor:
        """Return the value of an adapter's parameter: the stored one, or PEFT's initial one."""
        if self.stored is not None:
            return self.stored.read(name)

        # As PEFT's `reset_lora_parameters` does.
        match = _ADAPTER_PARAMETER.fullmatch(name)
        assert match is not None
        module = match["module"]
        part = match["part"]
        if part == MAGNITUDE:
            return self._lengths(unit, module)

        # Units are read in any order by any rank, so each adapter starts from the state that PEFT would have had.
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._generators[module])
            drawn = _draw(self._parts[module])
        return drawn[part]

    def _lengths(self, unit: Unit, module: str) -> Tensor:
        """Return the row norms of an adapted weight, to which its adapter adds nothing at first."""
        name = f"{module}.base_layer.weight"
        shape = self._shapes[name]
        whole = TensorSlice(base_name(name), shape, 0)

        # Whole, since a norm is taken over the whole row.
        weight = self._base.read_whole(unit, whole).view(shape)
        if module in self._transposed:
            weight = weight.T
        lengths: Tensor = torch.linalg.norm(weight, dim=1)
        return lengths


def _parts(shapes: Mapping[str, tuple[int, ...]], last: Set[str]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of each adapter's parts, by module.

    Args:
        shapes: those of all parameters, by name, in the order of the modules.
        last: the modules that wrap parameters, whose adapters PEFT makes after all others.
    """
    parts = defaultdict[str, dict[str, tuple[int, ...]]](dict)
    for name, shape in shapes.items():
        match = _ADAPTER_PARAMETER.fullmatch(name)
        if match is not None:
            module = match["module"]
            parts[module][match["part"]] = shape

    # A stable sort keeps the order of modules otherwise.
    in_order = sorted(parts.items(), key=lambda item: item[0] in last)
    return dict(in_order)


def _draw_all(
    adapters: Mapping[str, Mapping[str, tuple[int, ...]]], seed: int, generator: Tensor | None
) -> dict[str, Tensor]:
    """Draw adapters in turn from one generator, as PEFT does. Return the generator's state before each of them."""
    states = {}
    with drawing_from(seed):
        if generator is not None:
            torch.set_rng_state(generator)
        for module, parts in adapters.items():
            states[module] = torch.get_rng_state()

            # Only for its effect on the generator. The values are drawn again when they are read.
            _draw(parts)
    return states


def _draw(parts: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Draw both matrices of an adapter as PEFT's `update_layer` does, which discards some of the draws."""
    if "lora_A" in parts:
        # A new linear layer draws its weight, so B also draws from the generator before it is set to 0.
        into = _linear_weight(parts["lora_A"])
        out = _linear_weight(parts["lora_B"])
        nn.init.kaiming_uniform_(into, a=math.sqrt(5))
        return {"lora_A": into, "lora_B": out.zero_()}

    into = torch.randn(parts["lora_embedding_A"], dtype=torch.float32, device="cpu")
    out = torch.randn(parts["lora_embedding_B"], dtype=torch.float32, device="cpu")
    return {"lora_embedding_A": into.zero_(), "lora_embedding_B": nn.init.normal_(out)}


def _linear_weight(shape: tuple[int, ...]) -> Tensor:
    """Return the weight of a new linear layer, as its constructor draws it."""
    rows, columns = shape
    return nn.Linear(columns, rows, bias=False).weight.detach()
