"""The dtypes in which a model computes: those that `from_pretrained` gives its buffers and parameters.

MiniMax multiplies activations with its buffers. Routers of ERNIE 4.5 and convolutions of Inkling 2 compute in fp32
even if all other weights are in bf16. Such parameters are small and lie in large layers, while a unit has one schema of
state. So all of them together are one unit, which is lent to the whole forward. A unit that has no others stays as it
is: the norm of DeepSeek-V4, the head of Hy-V4.

If Muon trains the matrices of layers, the same is done with what else is trained in layers: norms, biases, convolutions
and other vectors, which AdamW trains.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from os.path import commonpath

import torch
from torch import nn
from transformers import PreTrainedModel

from megatier.errors import UnsupportedModelError
from megatier.foreign import reading
from megatier.layout import Layout
from megatier.models.decoder import Unit, decays
from megatier.models.experts import WHOLE, experts_in
from megatier.models.model_class import known_class
from megatier.optimizers import OPTIMIZERS
from megatier.state import StateSchema

IN_FP32 = "parameters in fp32"
"""The name of the unit of those parameters that stay in fp32 inside of units that are bf16."""
VECTORS = "vectors of layers"
"""The name of the unit of those parameters of layers that AdamW trains if Muon trains the others."""


def place_buffers(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Move a skeleton's buffers to the device, in the dtypes that they compute in if the weights have this dtype."""
    dtypes = buffer_dtypes(model, dtype)
    for name, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[leaf] = buffer.to(device, dtypes[f"{name}.{leaf}".lstrip(".")])


def buffer_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtype of every buffer, by its name, if the weights have a dtype.

    Those follow the weights that do so in `from_pretrained`, because their constructor names no dtype; what the model's
    class keeps in fp32 stays so if it is stored. If the weights have the dtype already, no buffer changes, and neither
    does one whose dtype was changed on a model in RAM.

    Args:
        model: a skeleton; its class makes others on meta.
        dtype: of the compute copy of weights.

    Raises:
        UnsupportedModelError: its config makes no model any more.
    """
    now = {name: buffer.dtype for name, buffer in model.named_buffers(remove_duplicate=False)}
    own = model.dtype
    if own is dtype:
        return now

    # Built once more in either dtype, because only the constructor knows which buffers follow it.
    with reading(f"{type(model).__name__} cannot be made of its config", UnsupportedModelError), torch.device("meta"):
        made = [known_class(model)._from_config(copy.deepcopy(model.config), dtype=each) for each in (own, dtype)]
    before, after = (dict(other.named_buffers(remove_duplicate=False)) for other in made)
    follow = {
        name: buffer.dtype
        for name, buffer in after.items()
        if name in now and now[name] is before[name].dtype and buffer.dtype is not now[name]
    }
    in_fp32 = names_in_fp32(model, follow.keys() & model.state_dict(keep_vars=True).keys())
    return now | follow | dict.fromkeys(in_fp32, torch.float32)


def names_in_fp32(model: PreTrainedModel, names: Iterable[str]) -> frozenset[str]:
    """Return those of some stored tensors' names that the model's class keeps in fp32 if weights are in bf16."""
    patterns = [pattern.replace("*", ".*") for pattern in getattr(model, "_keep_in_fp32_modules_strict", None) or ()]
    return frozenset(name for name in names if any(re.search(pattern, name) for pattern in patterns))


def with_schemas(
    model: PreTrainedModel,
    units: Sequence[Unit],
    compute_dtype: str,
    moments: str = "fp32",
    optimizer: str = "adamw",
) -> tuple[Unit, ...]:
    """Give each unit the schema of its state. What has another one inside of it becomes part of a unit that is lent.

    That is what stays in fp32 inside of bf16 units, and what AdamW trains in layers whose matrices Muon trains.

    Args:
        model: the skeleton.
        units: all of its units.
        compute_dtype: as `model.compute_dtype` names it.
        moments: dtype of AdamW's moments, as `train.moments` names it.
        optimizer: as `train.optimizer` names it.

    Raises:
        UnsupportedModelError: a part of a layer's experts has such parameters beside others.
    """
    kind = OPTIMIZERS[optimizer]
    schema, wide = kind.schemas[compute_dtype, moments], kind.schemas["fp32", moments]
    in_fp32 = names_in_fp32(model, (tensor.name for unit in units for tensor in unit.layout.tensors))
    matrices = matrices_of_layers(model, units) - in_fp32 if kind.matrices else frozenset[str]()
    kept = in_fp32 if schema is not wide else frozenset[str]()
    lent_schemas = {IN_FP32: wide, VECTORS: schema}
    found: list[Unit] = []
    mixed: dict[str, list[tuple[Unit, frozenset[str]]]] = {IN_FP32: [], VECTORS: []}

    for unit in units:
        names = frozenset(tensor.name for tensor in unit.layout.tensors)
        if names <= kept:
            found.append(replace(unit, layout=replace(unit.layout, schema=wide)))
            continue

        own = kind.matrices[compute_dtype] if kind.matrices and names & matrices else schema
        vectors = names - unit.layout.frozen - matrices - kept if own.by_matrix else frozenset[str]()
        layout = unit.layout
        for lent, leaving in ((IN_FP32, names & kept), (VECTORS, vectors)):
            if leaving:
                _check_whole(unit)
                mixed[lent].append((unit, leaving))
                layout = layout.without(leaving)
        found.append(replace(unit, layout=replace(layout, schema=own)))

    for name, parts in mixed.items():
        if parts:
            made = _lent(model, name, parts, lent_schemas[name])
            found.insert(_first_inside(found, made), made)
    return tuple(found)


def matrices_of_layers(model: PreTrainedModel, units: Sequence[Unit]) -> frozenset[str]:
    """Return the names of the parameters that Muon trains.

    They are weights of two dimensions in decoder layers, but for embeddings and what does not decay, and the stacks of
    fused experts, which have three.
    """
    decayed = decays(model)
    stacks = {f"{name}.{leaf}" for name, module in experts_in(model) for leaf in module._parameters}
    found = set[str]()
    for unit in units:
        if not (unit.is_layer or unit.experts is not None):
            continue

        for tensor in unit.layout.trained.tensors:
            owner, _, leaf = tensor.name.rpartition(".")
            is_stack = tensor.name in stacks and len(tensor.parameter_shape) == 3
            is_weight = leaf == "weight" and len(tensor.parameter_shape) == 2
            is_embedding = isinstance(model.get_submodule(owner), nn.Embedding)
            if tensor.name in decayed and (is_stack or (is_weight and not is_embedding)):
                found.add(tensor.name)

    return frozenset(found)


def _check_whole(unit: Unit) -> None:
    """Refuse a part of a layer's experts of which some parameters have another schema: a module is lent whole ones.

    Raises:
        UnsupportedModelError: the unit is one.
    """
    if unit.experts is not None:
        raise UnsupportedModelError(
            f"some parameters of {unit.name} stay in fp32, or are no matrices for Muon, so they cannot be cut. {WHOLE}"
        )


def _lent(model: PreTrainedModel, name: str, parts: Sequence[tuple[Unit, frozenset[str]]], schema: StateSchema) -> Unit:
    """Return the unit of those parameters of units that have some names. The module around all units lends it."""
    units = [unit for unit, _ in parts]
    tensors = [tensor for unit, names in parts for tensor in unit.layout.tensors if tensor.name in names]
    shapes = [(tensor.name, tensor.shape) for tensor in tensors]
    stands_for = {tensor.name: tensor.stands_for for tensor in tensors}
    frozen = frozenset[str]().union(*(unit.layout.frozen for unit in units))
    return Unit(
        name=name,
        module_names=(_around(model, units),),
        layout=replace(Layout.of(shapes, frozen, stands_for), schema=schema, has_base=units[0].layout.has_base),
        is_layer=False,
        is_lent=True,
    )


def _around(model: PreTrainedModel, units: Sequence[Unit]) -> str:
    """Return the innermost module around all modules of some units that has a forward, which a list has not."""
    # What is lent already is owned by the module that lends it.
    names = (name if unit.is_lent else name.rpartition(".")[0] for unit in units for name in unit.module_names)
    around = commonpath([name.replace(".", "/") for name in names]).replace("/", ".")
    while isinstance(model.get_submodule(around), nn.ModuleList | nn.ModuleDict):
        around = around.rpartition(".")[0]
    return around


def _first_inside(units: Sequence[Unit], lent: Unit) -> int:
    """Return the place of the first unit whose module lies in the one that lends: units are in module order."""
    inside = f"{lent.module_names[0]}.".lstrip(".")
    names = (tuple(f"{name}." for name in unit.module_names) for unit in units)
    return next(i for i, found in enumerate(names) if any(name.startswith(inside) for name in found))
