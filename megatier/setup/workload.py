"""Workload: the units of a run, their activations, and the policy that sizes everything. Nothing is reserved."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from megatier.adapters.in_place import InPlace, in_place
from megatier.compute.adapted_parameter import wrappers_in
from megatier.config.schema import RunConfig, TrainConfig
from megatier.drives.blockfile import IoOptions
from megatier.errors import UnsupportedModelError
from megatier.layout import Layout
from megatier.models.decoder import Unit, decoder_layers
from megatier.models.dtypes import with_schemas
from megatier.models.products import Products, products_of
from megatier.optim.muon import matrices_of
from megatier.schedule.policy import Policy
from megatier.schedule.unit_spec import UnitSpec
from megatier.schedule.world import ONE_PROCESS, World
from megatier.tier import Activations, Tier, round_up

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
HIDDEN_STATE_COUNTS = ("altup_num_inputs", "hc_mult", "hc_count")
"""Settings that say how many hidden states a token has: of Gemma 3n (AltUp), of DeepSeek-V4 and Hy-V4, of Qwen4-Exp."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model, and how it is to be trained."""

    units: tuple[Unit, ...]
    """The units, in module order, with their schemas."""
    specs: tuple[UnitSpec, ...]
    """Their sizes, in the same order: those of a shard, if ranks share the state."""
    activations: Mapping[str, Activations]
    """The activation policy of each unit."""
    policy: Policy
    """The choices that decide how many bytes there are."""
    options: IoOptions
    """How NVMe is read and written."""
    rows: int
    """Sequences of one group."""
    in_place: InPlace = field(default_factory=InPlace)
    """The units whose frozen weights are read from the model's own files, if they are at home on NVMe."""
    keeps_attention: bool = False
    """Whether attention's output and log-sum-exp are kept for a backward that recomputes the rest of the layer."""
    offloads_attention: bool = False
    """Whether that goes off the GPU with an offloaded input."""
    products: Products = field(default_factory=Products)
    """Which modules take their products in FP8; none, unless the run says so."""

    @property
    def num_parameters(self) -> int:
        """All parameters of the model."""
        return sum(tensor.num_parameters for unit in self.units for tensor in unit.layout.tensors)

    @property
    def num_trained(self) -> int:
        """Those of them that are trained."""
        return sum(tensor.num_elements for unit in self.units for tensor in unit.layout.trained.tensors)

    @classmethod
    def of(cls, config: RunConfig, model: PreTrainedModel, units: tuple[Unit, ...], world: World = ONE_PROCESS) -> Self:
        """Make the workload of a skeleton.

        Args:
            config: the run.
            model: a skeleton (`models.decoder.build_skeleton`).
            units: all units of the model (`models.expert_units.cut_units`), still without their schemas.
            world: the ranks that share the state and compute the groups of a step, and their hosts.
        """
        train = config.train
        tokens = config.data.sequence_length

        # Schemas come first: where updates are by matrix, the padding below deals parameters out whole.
        units = with_schemas(model, units, config.model.compute_dtype, train.moments, train.optimizer)

        # Padding lets each unit be cut into equal shards, so that one size holds for all ranks.
        units = tuple(replace(unit, layout=unit.layout.padded(world.num_ranks)) for unit in units)
        numerics = config.numerics
        products = products_of(model, units, numerics.products_except) if numerics.products == "fp8" else Products()
        tiers = config.tiers
        options = IoOptions(
            num_threads=tiers.io_threads or IoOptions().num_threads,
            direct=tiers.direct_io == "auto",
            checksums=tiers.checksums,
            gpu_direct=tiers.gpu_direct,
        )
        read_in_place = in_place(model, units, tiers, world.num_ranks)
        activations = _choose_activations(units, train, wrappers_in(model))
        offloads_attention = train.offload_attention and train.keeps_attention(tokens)
        offloaded_bytes = _count_offloaded_bytes(config, model, options, with_attention=offloads_attention)
        specs = []
        for unit in units:
            activation_bytes = offloaded_bytes if activations[unit.name].offloads_input else 0
            is_in_place = unit.name in read_in_place.parts
            specs.append(_make_spec(unit, world.num_ranks, activation_bytes, is_in_place=is_in_place))

        return cls(
            units=units,
            specs=tuple(specs),
            activations=activations,
            policy=_make_policy(specs, config, options, world),
            options=options,
            rows=train.batch // train.groups,
            in_place=read_in_place,
            keeps_attention=train.keeps_attention(tokens),
            offloads_attention=offloads_attention,
            products=products,
        )


def _make_spec(unit: Unit, num_ranks: int, activation_bytes: int, *, is_in_place: bool) -> UnitSpec:
    """Return the sizes of a unit's shard on one rank."""
    layout = unit.layout
    return UnitSpec(
        name=unit.name,
        num_elements=layout.num_elements // num_ranks,
        activation_bytes=activation_bytes,
        frozen_elements=(layout.num_elements - layout.num_trained) // num_ranks,
        schema=layout.schema,
        is_in_place=is_in_place,
        update_flops=_count_update_flops(layout, num_ranks),
        is_layer=unit.is_layer or unit.experts is not None,
    )


def without_input_gradient(units: Sequence[Unit]) -> frozenset[str]:
    """Return the names of the units whose inputs need no gradient, if units run in module order.

    These are all units up to the first that is trained. Copies that are lent may reach any layer, so if those are
    trained, there are none.
    """
    names: list[str] = []
    if any(unit.is_lent and unit.layout.num_trained for unit in units):
        return frozenset()
    for unit in units:
        names.append(unit.name)
        if unit.layout.num_trained:
            break
    return frozenset(names)


def hidden_width(model: PreTrainedModel) -> int:
    """Return the number of elements in a hidden state of the decoder layers.

    Raises:
        UnsupportedModelError: no config says it.
    """
    # Nearly every family has it here.
    if width := getattr(model.config.get_text_config(), "hidden_size", None):
        return int(width)

    # The text config may leave it to the config of the module that has the layers. To find that module takes long.
    layers = decoder_layers(model)
    owners = [
        module for module in model.modules() if isinstance(module, PreTrainedModel) and layers in module.modules()
    ]
    # Modules come before what they hold, so the last one is the nearest to the layers.
    for owner in reversed(owners):
        if width := getattr(owner.config, "hidden_size", None):
            return int(width)

    raise UnsupportedModelError(
        f"{type(model).__name__}: its config has no hidden_size, so the memory of its layers cannot be planned."
    )


def boundary_width(model: PreTrainedModel) -> int:
    """Return the elements between two layers for each token: its hidden state, or all of them if it has several."""
    text = model.config.get_text_config()
    return hidden_width(model) * next(
        (count for name in HIDDEN_STATE_COUNTS if (count := getattr(text, name, None))), 1
    )


def attention_parts(text: Any, tokens: int, item_bytes: int) -> tuple[int, int]:  # noqa: ANN401 - a config of any family
    """Return the bytes of what attention of one layer gives: its output, and an fp32 log-sum-exp for each head."""
    heads = tokens * int(text.num_attention_heads)
    return heads * head_width(text) * item_bytes, heads * 4


def head_width(text: Any) -> int:  # noqa: ANN401 - a config of any family
    """Return the elements of a head of attention."""
    # Some configs have the field and leave it null.
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _count_update_flops(layout: Layout, num_ranks: int) -> float:
    """Return the most floating-point operations of products that the update of a rank's shard of a unit has."""
    if not layout.schema.by_matrix:
        return 0.0

    # Matrices are dealt out whole, so ranks have unequal work, and all wait for the one that has most.
    flops_of_ranks = []
    for rank in range(num_ranks):
        shard = layout.shard(rank, num_ranks)
        flops_of_ranks.append(sum(matrix.flops for matrix in matrices_of(shard)))
    return max(flops_of_ranks)


def _make_policy(specs: Sequence[UnitSpec], config: RunConfig, options: IoOptions, world: World) -> Policy:
    """Return the choices that decide how many bytes a rank has."""
    tiers = config.tiers

    # A chunk has equally many elements of every unit. So the widest state decides how many fit into its bytes, and the
    # narrowest plane how many fill whole granules: those of wider planes are whole then as well.
    widest = max(unit.schema.bytes_per_parameter for unit in specs)
    narrowest = min(plane.width for unit in specs for plane in unit.schema.planes)
    return Policy(
        state=tuple(Tier(name) for name in tiers.state),
        # The guard needs the norm before an update, as clipping does. And the norm of several ranks is known when all
        # of them are through, so no update runs inside the backward.
        deferred=config.numerics.guard or config.train.clip is not None or world.num_ranks > 1,
        groups=config.train.groups // world.num_ranks,
        num_ranks=world.num_ranks,
        num_host_ranks=world.num_host_ranks,
        slices=config.train.slices,
        chunk_elements=tiers.chunk // widest if tiers.chunk is not None else None,
        streamed_share=tiers.streamed_share,
        generations=tiers.generations,
        savepoints=config.output.savepoint_every > 0,
        gpu_direct=tiers.gpu_direct,
        align_elements=options.granule_bytes // narrowest,
        narrowest=narrowest,
    )


def _count_offloaded_bytes(
    config: RunConfig, model: PreTrainedModel, options: IoOptions, *, with_attention: bool
) -> int:
    """Return the bytes that a layer offloads for one group: its input, and attention's output if that goes too."""
    dtype = COMPUTE_DTYPES[config.model.compute_dtype]
    text = model.config.get_text_config()

    # Between two layers it is that in which the model computes, unless its config sums their results in fp32.
    boundary_dtype = torch.float32 if getattr(text, "residual_in_fp32", False) else dtype
    slices = config.train.slices
    tokens = config.train.batch // config.train.groups * config.data.sequence_length
    hidden_bytes = tokens * boundary_width(model) * boundary_dtype.itemsize
    if not with_attention:
        return hidden_bytes

    # What each slice gives is stashed by itself, and begins at a granule, so that drives can move it alone.
    parts = attention_parts(text, tokens // slices, dtype.itemsize)
    sizes = (hidden_bytes, *parts * slices)
    return sum(round_up(size, options.granule_bytes) for size in sizes)


def _choose_activations(units: Sequence[Unit], train: TrainConfig, adapted: Collection[str]) -> dict[str, Activations]:
    """Return the activation policy of each unit.

    It is the setting, except for the last layers, which may keep theirs. Only layers have an input that is worth
    offloading, so other units recompute. So do layers whose experts are units of their own, because they have several
    inputs and only one can be offloaded. Such experts have the policy of their layer. A unit that has adapted
    parameters keeps nothing, since what is made of these is as large as the weights.

    An input that needs no gradient stays on the GPU if its layer has a backward at all, so no room is set aside for it.
    A unit may run earlier than its place among the modules says (embeddings of each layer, as in Gemma 4). Inputs that
    need a gradient after all then stay on the GPU too, which changes no bit.
    """
    # The last layers keep theirs, since their backward comes first: what they keep is there for the shortest time.
    layers = [unit.name for unit in units if unit.is_layer]
    keeping = set(layers[max(0, len(layers) - train.kept_layers) :])
    wanted = Activations(train.activations)
    others = wanted.without_offload
    staying = without_input_gradient(units)
    policies: dict[str, Activations] = {}
    of_layer = others

    for unit in units:
        if unit.is_layer:
            offloads = len(unit.module_names) == 1 and unit.name not in staying
            policy = wanted if offloads else others
            of_layer = policies[unit.name] = Activations.KEEP if unit.name in keeping else policy
        else:
            policies[unit.name] = others if unit.experts is None else of_layer
        if policies[unit.name].keeps_graph and any(tensor.name in adapted for tensor in unit.layout.tensors):
            policies[unit.name] = Activations.RECOMPUTE

    return policies
