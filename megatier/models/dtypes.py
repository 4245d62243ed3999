"""Determines the dtypes in which a model computes, as `from_pretrained` gives them to its buffers and parameters.

Some models need fp32 in places: MiniMax multiplies activations with its buffers, and routers of ERNIE 4.5 and
convolutions of Inkling 2 compute in fp32 even if all other weights are bf16. Such parameters are small and lie in large
layers, while a unit has one state schema. So all of them together form one unit, which is lent for the whole forward. A
unit that consists only of such parameters stays as it is: the norm of DeepSeek-V4, the head of Hy-V4.

If Muon trains the matrices of layers, the other trained parameters in layers (norms, biases, convolutions and other
vectors) form another such unit, which AdamW trains.
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
from megatier.models.decoder import Unit, decay_parameter_names
from megatier.models.expert_units import WHOLE, experts_in
from megatier.models.model_class import known_class
from megatier.optimizers import OPTIMIZERS
from megatier.state import StateSchema

IN_FP32 = "parameters in fp32"
"""The name of the unit of parameters that stay in fp32 inside bf16 units."""
VECTORS = "vectors of layers"
"""The name of the unit of parameters in layers that AdamW trains where Muon trains the others."""


def place_buffers(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Move a skeleton's buffers to the device, in the dtypes that they compute in for weights of this dtype."""
    dtypes = buffer_dtypes(model, dtype)
    for module_name, module in model.named_modules():
        for attribute, buffer in module._buffers.items():
            if buffer is not None:
                name = f"{module_name}.{attribute}".lstrip(".")
                module._buffers[attribute] = buffer.to(device, dtypes[name])


def buffer_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtype of every buffer by name, for weights of a dtype.

    Buffers follow the weights if they do so in `from_pretrained`, because their constructor names no dtype. Those that
    the model's class keeps in fp32 stay so if they are stored. If the weights have the dtype already, no buffer
    changes, and neither does one whose dtype was changed on a model in RAM.

    Args:
        model: a skeleton; its class makes others on meta.
        dtype: of the compute copy of weights.

    Raises:
        UnsupportedModelError: no model can be built from its config any more.
    """
    present = _buffers_by_name(model)
    if model.dtype is dtype:
        return present

    # Built again, since only the constructor knows which buffers follow the weights. Few models have any.
    after = _constructed_buffers(model, dtype)
    others = [name for name, buffer_after in after.items() if name in present and buffer_after is not present[name]]

    # A buffer whose dtype was changed since the model was made keeps its new dtype.
    before = _constructed_buffers(model, model.dtype) if others else {}
    following = {name: after[name] for name in others if present[name] is before[name]}

    stored = following.keys() & model.state_dict(keep_vars=True).keys()
    in_fp32 = names_in_fp32(model, stored)
    return present | following | dict.fromkeys(in_fp32, torch.float32)


def _buffers_by_name(model: PreTrainedModel) -> dict[str, torch.dtype]:
    """Return the dtype of each buffer by name, a shared buffer under each of its names."""
    return {name: buffer.dtype for name, buffer in model.named_buffers(remove_duplicate=False)}


def _constructed_buffers(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtype of each buffer by name, in a new model of the same config with weights of a dtype."""
    failure = f"{type(model).__name__} cannot be made of its config"
    with reading(failure, UnsupportedModelError), torch.device("meta"):
        # A constructor may change its config.
        config = copy.deepcopy(model.config)
        constructed = known_class(model)._from_config(config, dtype=dtype)
    return _buffers_by_name(constructed)


def names_in_fp32(model: PreTrainedModel, names: Iterable[str]) -> frozenset[str]:
    """Return the names of stored tensors that the model's class keeps in fp32 if weights are bf16."""
    globs = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    if not globs:
        return frozenset()

    # As in transformers, `*` matches any text, and a match may begin anywhere in a name.
    patterns = [glob.replace("*", ".*") for glob in globs]
    pattern = re.compile("|".join(patterns))
    return frozenset(name for name in names if pattern.search(name))


def with_schemas(
    model: PreTrainedModel,
    units: Sequence[Unit],
    compute_dtype: str,
    moments: str = "fp32",
    optimizer: str = "adamw",
) -> tuple[Unit, ...]:
    """Give each unit its state schema. Parameters that need another schema move to a unit that is lent.

    These are parameters that stay in fp32 inside bf16 units, and those in layers that AdamW trains where Muon trains
    the matrices.

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
    schema = kind.schemas[compute_dtype, moments]
    fp32_schema = kind.schemas["fp32", moments]
    all_names = (tensor.name for unit in units for tensor in unit.layout.tensors)
    in_fp32 = names_in_fp32(model, all_names)
    matrices = matrices_of_layers(model, units) - in_fp32 if kind.matrices else frozenset[str]()

    # If everything computes in fp32, they have the same schema as the others and stay in place.
    kept_in_fp32 = in_fp32 if schema is not fp32_schema else frozenset[str]()

    schema_of_lent = {IN_FP32: fp32_schema, VECTORS: schema}
    leaving: dict[str, list[tuple[Unit, frozenset[str]]]] = {IN_FP32: [], VECTORS: []}
    changed: list[Unit] = []

    for unit in units:
        names = frozenset(tensor.name for tensor in unit.layout.tensors)

        # The whole unit computes in fp32, so it gets that schema itself, and nothing is lent.
        if names <= kept_in_fp32:
            changed.append(replace(unit, layout=replace(unit.layout, schema=fp32_schema)))
            continue

        own_schema = kind.matrices[compute_dtype] if kind.matrices and names & matrices else schema

        # A frozen vector is trained by neither optimizer, so it stays in place.
        trained = names - unit.layout.frozen
        vectors = trained - matrices - kept_in_fp32 if own_schema.by_matrix else frozenset[str]()

        layout = unit.layout
        for lent_name, leaving_names in ((IN_FP32, names & kept_in_fp32), (VECTORS, vectors)):
            if leaving_names:
                _check_whole(unit)
                leaving[lent_name].append((unit, leaving_names))
                layout = layout.without(leaving_names)
        changed.append(replace(unit, layout=replace(layout, schema=own_schema)))

    for lent_name, sources in leaving.items():
        if sources:
            lent = _lent(model, lent_name, sources, schema_of_lent[lent_name])
            changed.insert(_first_inside(changed, lent), lent)
    return tuple(changed)


def matrices_of_layers(model: PreTrainedModel, units: Sequence[Unit]) -> frozenset[str]:
    """Return the names of the parameters that Muon trains.

    They are two-dimensional weights in decoder layers, except embeddings and those without decay, and the
    three-dimensional stacks of fused experts.
    """
    decayed = decay_parameter_names(model)
    of_experts = {f"{name}.{attribute}" for name, module in experts_in(model) for attribute in module._parameters}
    matrices = set[str]()
    for unit in units:
        if not (unit.is_layer or unit.experts is not None):
            continue

        for tensor in unit.layout.trained.tensors:
            owner, _, attribute = tensor.name.rpartition(".")
            num_dims = len(tensor.parameter_shape)
            is_stack = tensor.name in of_experts and num_dims == 3
            is_weight = attribute == "weight" and num_dims == 2
            is_embedding = isinstance(model.get_submodule(owner), nn.Embedding)
            is_matrix = is_stack or (is_weight and not is_embedding)
            if is_matrix and tensor.name in decayed:
                matrices.add(tensor.name)

    return frozenset(matrices)


def _check_whole(unit: Unit) -> None:
    """Refuse a unit of split experts in which some parameters need another schema, since only whole ones can be lent.

    Raises:
        UnsupportedModelError: the unit is one.
    """
    if unit.experts is not None:
        raise UnsupportedModelError(
            f"some parameters of {unit.name} stay in fp32, or are no matrices for Muon, so they cannot be cut. {WHOLE}"
        )


def _lent(
    model: PreTrainedModel, name: str, sources: Sequence[tuple[Unit, frozenset[str]]], schema: StateSchema
) -> Unit:
    """Return the unit of the named parameters of some units. The module around all of these units lends it."""
    units = [unit for unit, _ in sources]
    tensors = [tensor for unit, names in sources for tensor in unit.layout.tensors if tensor.name in names]
    shapes = [(tensor.name, tensor.shape) for tensor in tensors]
    stands_for = {tensor.name: tensor.stands_for for tensor in tensors}
    frozen = frozenset[str]().union(*(unit.layout.frozen for unit in units))
    layout = Layout.of(shapes, frozen, stands_for)
    return Unit(
        name=name,
        module_names=(_around(model, units),),
        layout=replace(layout, schema=schema, has_base=units[0].layout.has_base),
        is_layer=False,
        is_lent=True,
    )


def _around(model: PreTrainedModel, units: Sequence[Unit]) -> str:
    """Return the innermost module around all modules of some units that has a forward, which a module list has not."""
    owners = list[str]()
    for unit in units:
        for name in unit.module_names:
            # A unit that is lent is owned by the module that lends it.
            owner = name if unit.is_lent else name.rpartition(".")[0]
            owners.append(owner)

    # Computed on paths, whose common prefix consists of whole names.
    as_paths = [owner.replace(".", "/") for owner in owners]
    around = commonpath(as_paths).replace("/", ".")
    while isinstance(model.get_submodule(around), nn.ModuleList | nn.ModuleDict):
        around = around.rpartition(".")[0]
    return around


def _first_inside(units: Sequence[Unit], lent: Unit) -> int:
    """Return the index of the first unit inside the module that lends. Units are in module order."""
    # With a dot after each name, since `layers.10` is not inside `layers.1`. The root, which contains all, has an empty
    # name.
    around = f"{lent.module_names[0]}.".lstrip(".")
    inside = [
        index for index, unit in enumerate(units) if any(f"{name}.".startswith(around) for name in unit.module_names)
    ]
    return inside[0]
