"""Plans in which order units give out the tensors of a model's folder, layer by layer.

A visit is one use of a unit, which contributes pieces to tensors. A tensor is complete after its last piece.
`session.hub_weights` follows the plan.
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
"""The unit number of buffers, which are in no unit. They are visited first."""


@dataclass(frozen=True, slots=True)
class HubTensor:
    """A tensor as stored in a folder in Hugging Face's format."""

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
    """The number of columns of their matrix, if it is read column by column; 0: it is read row by row."""


@dataclass(frozen=True, slots=True)
class HubPiece:
    """All elements that a visit contributes to one tensor."""

    tensor: HubTensor
    """The tensor."""
    parts: tuple[HubElements, ...]
    """Its parts."""
    is_last: bool
    """Whether the tensor is complete after that."""


@dataclass(slots=True)
class Visit:
    """One use of a unit, which contributes elements to some tensors."""

    unit: Unit | None
    """The unit; None: buffers."""
    pieces: list[HubPiece] = field(default_factory=list)
    """The pieces that it contributes."""


@dataclass(frozen=True, slots=True)
class _Holder:
    """A unit, or a buffer, that holds elements of a tensor of the model."""

    number: int
    """The number of the unit."""
    elements: tuple[int, int]
    """The elements [start, stop) of the tensor that it holds."""
    shift: int
    """The offset from an element's index in the tensor to its place in the unit."""
    dtype: torch.dtype
    """The dtype in which they compute."""


def layer_groups(names: Iterable[str]) -> list[list[str]]:
    """Group names by layer, as vLLM's `layerwise_groups` does: by the outermost number in them.

    Names without a number come before all layers if they precede them here, otherwise after them.
    """
    before, behind = list[str](), list[str]()

    # The prefix of the number identifies a stack of layers. A model may have several, such as an encoder and a decoder.
    stacks = defaultdict[str, defaultdict[int, list[str]]](lambda: defaultdict(list))
    for name in names:
        path = name.split(".")

        # The outermost number is the layer's. Later ones are those of experts and the like.
        place = next((i for i, part in enumerate(path) if part.isdigit()), None)
        if place is not None:
            stack = ".".join(path[:place])
            number = int(path[place])
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
    """Return the visits that produce all tensors of the model's folder, layer by layer.

    Args:
        model: the skeleton of the folder's model.
        units: all units of the model, whole.
        names: for those tensors of the units that are in the folder, their names in that skeleton.
        buffers: the buffers, which are in no unit, by their names in the skeleton.

    Raises:
        UnsupportedModelError: no layout of the model's folder is known that loads back.
    """
    state = model.state_dict(keep_vars=True)
    layout = hub_layout(model, {name: state[name] for name in (*names.values(), *buffers)})

    # In the model's own order, however its layers are cut into units.
    positions = {name: number for number, name in enumerate(state)}
    in_order = sorted(layout, key=lambda name: (positions[layout[name].runs[0].name], layout[name].runs[0].start))

    # Computed once for all layers, since there are many units.
    holders = _holders(units, names, buffers)
    visits = list[Visit]()
    for group in layer_groups(in_order):
        for visit in _visits(units, {name: layout[name] for name in group}, holders):
            # One unit may serve two groups: a head tied to the embedding, or small parameters of all layers.
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
            # The matrices of adapters are not in the folder, since they are merged into what they adapt.
            if tensor.name in names:
                holder = _Holder(number, tensor.elements, tensor.place(0), dtype)
                holders[names[tensor.name]].append(holder)
    return holders


def _visits(
    units: Sequence[Unit], layout: Mapping[str, Assembly], holders: Mapping[str, list[_Holder]]
) -> Iterator[Visit]:
    """Yield the visits of one layer."""
    needed = {name: _parts(assembly, holders) for name, assembly in layout.items()}

    # Visits follow the order of units, so that each unit is loaded to the GPU once for the layer.
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

            # In that order a tensor is complete after the last unit that has a part of it.
            is_last = number == max(parts)
            visit.pieces.append(HubPiece(tensor, tuple(parts[number]), is_last=is_last))
        yield visit


def _parts(assembly: Assembly, holders: Mapping[str, list[_Holder]]) -> dict[int, list[HubElements]]:
    """Return the parts of a tensor, by the number of the unit that holds them."""
    parts = defaultdict[int, list[HubElements]](list)
    at = 0
    for run in assembly.runs:
        stop = run.start + run.num_elements
        for holder in holders[run.name]:
            first, end = holder.elements

            # A unit may hold only some of the elements, such as some experts of a stack.
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
