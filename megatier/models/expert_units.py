"""Splits the experts of layers into units of their own, so that no slot has to hold a whole layer.

A fused experts module of transformers has one parameter for all experts, whose first dimension is the expert, and skips
tokens for experts that it does not have. So a range of experts can run by itself, on rows of the parameters with
shifted indices (`engine.expert_parts`). A layer with such a module becomes one unit for each range, and one for its
other modules, each of which is bound when it runs. Units are never nested.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from itertools import pairwise

from torch import nn
from transformers import PreTrainedModel

from megatier.compute.adapted_parameter import wrappers_in
from megatier.errors import ConfigError, UnsupportedModelError
from megatier.layout import Layout, TensorSlice
from megatier.models.decoder import Unit, find_units

WHOLE = "Set model.expert_parts to 1: then a layer is one unit."
"""The remedy that always works."""


def cut_units(model: PreTrainedModel, parts: int) -> tuple[Unit, ...]:
    """Cut a model into units, and the experts of each layer into several.

    Args:
        model: a skeleton.
        parts: the number of units for the experts of a layer, as even as possible; 1: they stay in their layer's unit.

    Raises:
        ConfigError: there are fewer experts, or they have adapters.
        UnsupportedModelError: see `find_units`; or the model has no fused experts, or they cannot be split.
    """
    units = find_units(model)
    if parts == 1:
        return units
    cut = [unit for whole in units for unit in _cut(model, whole, parts)]

    # Nothing was split, so the setting would have no effect.
    if len(cut) == len(units):
        raise UnsupportedModelError(
            f"model.expert_parts is {parts}, but {type(model).__name__} has no fused experts. {WHOLE}"
        )

    return tuple(cut)


def max_expert_parts(model: PreTrainedModel) -> int:
    """Return the most parts into which every layer's experts can be split; 1 if there are none, or adapted ones."""
    adapted = _adapted_in(model)
    counts = list[int]()
    for _, module in experts_in(model):
        # An adapter of a stack adds to the whole stack.
        if module in adapted:
            return 1
        counts.append(_num_experts(module))
    return min(counts, default=1)


def places_of(units: Sequence[Unit]) -> dict[str, list[tuple[Unit, TensorSlice]]]:
    """Return where each parameter lies, in the order of its elements: in one unit, or in parts of several."""
    # Units are in module order, and those of a layer's experts in the order of experts.
    places = defaultdict[str, list[tuple[Unit, TensorSlice]]](list)
    for unit in units:
        for tensor in unit.layout.tensors:
            place = (unit, tensor)
            places[tensor.name].append(place)

    return dict(places)


def _cut(model: PreTrainedModel, unit: Unit, parts: int) -> Iterator[Unit]:
    """Yield the unit itself, or a unit of the layer's other modules and one for each range of experts."""
    if not unit.is_layer:
        yield unit
        return

    layer = model.get_submodule(unit.name)
    fused = {f"{unit.name}.{name}": module for name, module in experts_in(layer)}
    if not fused:
        yield unit
        return

    adapted = _adapted_in(layer)
    for name, module in fused.items():
        if module in adapted:
            raise ConfigError(
                f"model.expert_parts is {parts}, but experts of {unit.name} have adapters (target_parameters), which "
                f"are no rows of single experts. {WHOLE}"
            )
        _check_can_be_cut(name, module, parts)

    inside = tuple(f"{name}." for name in fused)
    of_experts = {tensor.name for tensor in unit.layout.tensors if tensor.name.startswith(inside)}
    yield replace(
        unit,
        module_names=tuple(_modules_beside(unit.name, layer, inside)),
        layout=unit.layout.without(of_experts),
    )

    for name, module in fused.items():
        tensors = [tensor for tensor in unit.layout.tensors if tensor.name.startswith(f"{name}.")]

        # The sizes of parts differ by at most one expert.
        bounds = [part * _num_experts(module) // parts for part in range(parts + 1)]
        for start, stop in pairwise(bounds):
            layout = _layout_of_rows(tensors, start, stop, unit.layout.frozen)
            yield Unit(
                name=f"{name}[{start}:{stop}]",
                module_names=(name,),
                layout=replace(layout, has_base=unit.layout.has_base),
                is_layer=False,
                experts=(start, stop),
            )


def _layout_of_rows(tensors: Sequence[TensorSlice], start: int, stop: int, frozen: Set[str]) -> Layout:
    """Return the layout of rows [start, stop) of parameters, with trained ones before frozen ones."""
    num_rows = stop - start
    shapes = [(tensor.name, (num_rows, *tensor.shape[1:])) for tensor in tensors]
    layout = Layout.of(shapes, frozen)

    slices = list[TensorSlice]()
    for rows, whole in zip(layout.tensors, tensors, strict=True):
        # Each row is one expert, which is contiguous.
        row_elements = whole.num_elements // whole.shape[0]
        offset = start * row_elements
        slices.append(replace(rows, whole=whole.shape, offset=offset))

    return replace(layout, tensors=tuple(slices))


def experts_in(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that hold all experts in three-dimensional parameters, whose first dimension is the expert."""
    for name, child in module.named_modules():
        for parameter in child.parameters(recurse=False):
            if parameter.dim() == 3 and parameter.shape[0] == _num_experts(child):
                yield name, child
                break


def _adapted_in(module: nn.Module) -> set[nn.Module]:
    """Return the modules that own a parameter with an adapter."""
    return {wrapper.get_base_layer() for wrapper in wrappers_in(module).values()}


def _num_experts(module: nn.Module) -> int:
    """Return the number of experts of a module; 0 if it names none."""
    count = getattr(module, "num_experts", 0)
    return count if isinstance(count, int) else 0


def _modules_beside(name: str, layer: nn.Module, experts: tuple[str, ...]) -> Iterator[str]:
    """Yield the outermost modules of a layer that have parameters and contain no experts.

    Args:
        name: the layer, or the module below it that is visited.
        layer: that module.
        experts: the name prefixes of expert modules.
    """
    for leaf, child in layer.named_children():
        child_name = f"{name}.{leaf}"
        beginning = f"{child_name}."
        has_parameters = any(True for _ in child.parameters())
        if beginning.startswith(experts) or not has_parameters:
            continue

        # A module with experts below it is not bound as a whole, but its other submodules are.
        if any(inside.startswith(beginning) for inside in experts):
            yield from _modules_beside(child_name, child, experts)
        else:
            yield child_name

    for leaf, parameter in layer._parameters.items():
        if parameter is not None:
            raise UnsupportedModelError(
                f"{name}.{leaf} belongs to a module around the experts, so that they cannot be cut. {WHOLE}"
            )


def _check_can_be_cut(name: str, module: nn.Module, parts: int) -> None:
    """Refuse experts that cannot be cut.

    Raises:
        ConfigError, UnsupportedModelError: they cannot. The message names the module and the remedy.
    """
    kind = type(module).__name__
    count = _num_experts(module)
    if parts > count:
        raise ConfigError(f"model.expert_parts is {parts}, but {name} has {count} experts: set it to at most {count}.")

    # transformers marks fused modules by this attribute. Other modules may use their parameters in any way.
    if not hasattr(module, "is_transposed"):
        raise UnsupportedModelError(f"the experts of {name} ({kind}) take no indices, so they cannot be cut. {WHOLE}")
    if any(parameter.shape[0] != count for parameter in module.parameters()):
        raise UnsupportedModelError(f"{name} ({kind}) has parameters that are not of single experts. {WHOLE}")

    # Eager experts with biases (GPT-OSS) make one-hot vectors of the indices, which fail for an index past the last
    # expert.
    is_eager = getattr(module.config, "_experts_implementation", None) == "eager"
    if is_eager and module.has_bias:
        raise UnsupportedModelError(f"the eager experts of {name} ({kind}) do not skip what is not theirs. {WHOLE}")
