"""Plans how the tensors of a model's folder are read from its units, layer by layer.

A visit is one use of a unit. It gives pieces to tensors, and a tensor is whole after its last piece.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatier.models.decoder import Unit
from megatier.models.weight_conversion import Assembly, hub_layout
from megatier.optim.masters import weight_dtype

BUFFERS = -1
"""The number of the visit that has buffers, which are in no unit. It is the first one."""


@dataclass(frozen=True, slots=True)
class HubTensor:
    """A tensor as it is stored in a folder in Hugging Face's format."""

    name: str
    """Its name there."""
    dtype: torch.dtype
    """The dtype in which it computes."""
    shape: tuple[int, ...]
    """Its shape there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HubElements:
    """A run of elements of a stored tensor that lies in one unit, or in a buffer."""

    source: str
    """The parameter or buffer of the model that has them."""
    elements: tuple[int, int]
    """The elements [start, stop) of the unit, or of the buffer."""
    at: int
    """Their first element in the tensor."""
    num_columns: int
    """The columns of their matrix, if it is read column by column; 0: it is read row by row."""


@dataclass(frozen=True, slots=True)
class HubPiece:
    """All elements that a visit gives to one tensor."""

    tensor: HubTensor
    """The tensor."""
    parts: tuple[HubElements, ...]
    """Its parts."""
    is_last: bool
    """Whether the tensor is whole after that."""


@dataclass(slots=True)
class Visit:
    """One use of a unit, which gives elements to some tensors."""

    unit: Unit | None
    """The unit; None: buffers."""
    pieces: list[HubPiece] = field(default_factory=list)
    """What it gives, in the order of the tensors that are whole then."""


@dataclass(frozen=True, slots=True)
class _Holder:
    """A unit, or a buffer, that has elements of a tensor of the model."""

    number: int
    """The number of the unit."""
    elements: tuple[int, int]
    """The elements [start, stop) of the tensor that it has."""
    shift: int
    """The offset from an element's number in the tensor to its place in the unit."""
    dtype: torch.dtype
    """The dtype in which they compute."""


def layer_groups(names: Iterable[str]) -> list[list[str]]:
    """Return names by layer, as vLLM's `layerwise_groups` does: by the outermost number in them.

    Names without a number come before all layers if they do so here, else after them.
    """
    before, behind = list[str](), list[str]()

    # What stands before the number is a stack. A model may have several, such as an encoder and a decoder.
    stacks = defaultdict[str, defaultdict[int, list[str]]](lambda: defaultdict(list))
    for name in names:
        words = name.split(".")

        # The outermost number is that of the layer, and those behind it are of experts and the like.
        place = next((i for i, word in enumerate(words) if word.isdigit()), None)
        if place is not None:
            stack = ".".join(words[:place])
            number = int(words[place])
            stacks[stack][number].append(name)
        elif stacks:
            behind.append(name)
        else:
            before.append(name)

    groups = [before]
    for layers in stacks.values():
        groups += [layers[number] for number in sorted(layers)]
    groups.append(behind)
    return [group for group in groups if group]


def hub_visits(
    model: PreTrainedModel, units: Sequence[Unit], names: Mapping[str, str], buffers: Mapping[str, Tensor]
) -> list[Visit]:
    """Return the visits that put together all tensors of the model's folder, layer by layer.

    Args:
        model: the skeleton that the folder is of.
        units: all units of the model, whole.
        names: the names in that skeleton of those of the units' tensors that are in the folder, by their own.
        buffers: what is in no unit, by the names in the skeleton.

    Raises:
        UnsupportedModelError: no layout of the model's folder is known that loads back.
    """
    state = model.state_dict(keep_vars=True)
    layout = hub_layout(model, {name: state[name] for name in (*names.values(), *buffers)})

    # In the model's own order, however its layers are cut into units.
    own = {name: number for number, name in enumerate(state)}
    in_order = sorted(layout, key=lambda name: (own[layout[name].runs[0].name], layout[name].runs[0].start))

    # Found once for all layers, as the units are many.
    holders = _holders(units, names, buffers)
    visits = list[Visit]()
    for group in layer_groups(in_order):
        for visit in _visits(units, {name: layout[name] for name in group}, holders):
            # The head may be tied to the embedding, and small parameters of all layers may be a unit together.
            if visits and visits[-1].unit is visit.unit:
                visits[-1].pieces.extend(visit.pieces)
            else:
                visits.append(visit)
    return visits


def _holders(
    units: Sequence[Unit], names: Mapping[str, str], buffers: Mapping[str, Tensor]
) -> dict[str, list[_Holder]]:
    """Return the holders of the elements of each tensor of the model."""
    holders = defaultdict[str, list[_Holder]](list)
    for name, buffer in buffers.items():
        holders[name].append(_Holder(BUFFERS, (0, buffer.numel()), 0, buffer.dtype))
    for number, unit in enumerate(units):
        dtype = weight_dtype(unit.layout.schema)
        for tensor in unit.layout.tensors:
            # The matrices of adapters have no name in the folder: they are merged into what they adapt.
            if tensor.name in names:
                holder = _Holder(number, tensor.elements, tensor.place(0), dtype)
                holders[names[tensor.name]].append(holder)
    return holders


def _visits(
    units: Sequence[Unit], layout: Mapping[str, Assembly], holders: Mapping[str, list[_Holder]]
) -> Iterator[Visit]:
    """Yield the visits that one layer takes."""
    needed = {name: _parts(assembly, holders) for name, assembly in layout.items()}

    # Visits follow the order of the units, so that each of them is brought to the GPU once for the layer.
    numbers = set[int]().union(*needed.values())
    for number in sorted(numbers):
        unit = None if number == BUFFERS else units[number]
        visit = Visit(unit)
        for name, parts in needed.items():
            if number not in parts:
                continue
            assembly = layout[name]
            dtype = holders[assembly.runs[0].name][0].dtype
            tensor = HubTensor(name, dtype, assembly.shape)

            # By that order a tensor is whole after the highest number that has a part of it.
            is_last = number == max(parts)
            visit.pieces.append(HubPiece(tensor, tuple(parts[number]), is_last=is_last))
        yield visit


def _parts(assembly: Assembly, holders: Mapping[str, list[_Holder]]) -> dict[int, list[HubElements]]:
    """Return the parts of a tensor by the number of the unit that has them."""
    parts = defaultdict[int, list[HubElements]](list)
    at = 0
    for run in assembly.runs:
        stop = run.start + run.num_elements
        for holder in holders[run.name]:
            first, end = holder.elements

            # A unit may hold some of the elements alone, such as some experts of a stack.
            lower = max(run.start, first)
            upper = min(stop, end)
            if lower < upper:
                part = HubElements(
                    source=run.name,
                    elements=(lower + holder.shift, upper + holder.shift),
                    at=at + lower - run.start,
                    num_columns=run.num_columns,
                )
                parts[holder.number].append(part)
        at += run.num_elements
    return parts
