"""Estimates the GPU memory that a step's activations, its loss and libraries take, in addition to the arena.

This is a model of that memory, not a count. It is measured in boundary activations: hidden sizes of each token. A
compiled layer saves c = (outputs of its products) / hidden + 1.4 of them at a saved share of 0.8. The peak is at the
loss, when all layers have saved theirs, or in the backward, when one layer repeats what it did not save:

    at the loss      saved + 4 x chunk x vocabulary + 4 x head parameters + 2 boundaries
    in the backward  saved + 2.3 c of one slice + 4 boundaries

Where attention is kept, and the rest of a layer computed again, its output and log-sum-exp are saved besides the input.
So they are for flex attention if a compiled layer saves less than the share at which attention is among what it saves.
If they are offloaded, those of two layers are under way.

Norms, MLPs and experts that run in tiles of tokens save nothing but their inputs. What they hold inside counts for one
tile, and in the backward their gradients count as well: those of a tile, and their sum in fp32.

A frozen layer is counted as if it were trained. One with nothing trained before it saves nothing. What an adapter adds
to the output of its module is not saved, except with DoRA. With dropout each adapter saves its own input, and a byte
for each element that says what was dropped. If documents are kept apart there is also a mask of one byte for each pair
of tokens, which a layer's attention has in the compute dtype as well. flex_attention has none, because its mask is by
blocks. Copies of weights that are lent to the whole forward (`Unit.is_lent`) count at both peaks, and so do one
quantised matrix that is decoded, and the parameters of one unit that have adapters of their own.

The figures are fitted to nine runs of two Llama shapes on a GPU, with which tests/test_planner_memory.py compares them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel

from megatier.adapters.lora import adapter_config
from megatier.adapters.weights import MAGNITUDE
from megatier.config.schema import RunConfig
from megatier.layout import TensorSlice
from megatier.models.decoder import Unit, tiled_names
from megatier.numerics.adapted import matrices_in, wrappers_in
from megatier.numerics.muon import matrices_of
from megatier.numerics.quantised import PIECE_ELEMENTS
from megatier.schedule.slots import MATRICES_CARRIED
from megatier.session.attention_rule import FLEX
from megatier.session.workload import (
    COMPUTE_DTYPES,
    Workload,
    attention_parts,
    boundary_width,
    hidden_width,
    without_input_gradient,
)
from megatier.tier import Tier

CONTEXT_BYTES = 1_000_000_000
"""Bytes that the driver and libraries hold."""
BESIDE_PRODUCTS = 1.4
"""Hidden sizes of each token that a layer saves in addition to the outputs of its products."""
SAVED = ((0.0, 0.0), (0.1, 0.21), (0.15, 0.27), (0.3, 0.48), (0.6, 0.83), (0.8, 1.0), (1.0, 1.43))
"""Measured pairs of the saved share, and what is saved then over what is saved at 0.8. The input is always saved."""
REPEATED = 2.3
"""Bytes that one layer's backward holds while it repeats its forward, over those that the layer saves at 0.8."""
INPUTS_CUT = 4
"""Least boundary activations that a layer saves if its experts are units: the inputs of both norms, of the attention
and of the experts."""
ATTENTION_FROM = 0.8
"""Least saved share at which attention is among what `SAVED` counts."""
CARRIED_BYTES = 10
"""Bytes of each element of a matrix that is carried: its state and its gradient."""
PRODUCT_BYTES = 14
"""Most bytes that the products of a matrix take for each of its elements, when its new master is split. Newton-Schulz
takes 8, and 4 for each element of the square of the shorter side."""
ADAPTED_COPIES = 2
"""What exists of an adapted parameter beside itself: with what its adapter adds, and the gradient of that."""
PIECE_BYTES = 12
"""Bytes for each number of a piece that is decoded: of three copies in fp32."""
ATTENTION_PASSING = 2
"""Layers whose attention is on the GPU at once, if it is offloaded: it comes back one layer ahead."""
BOUNDARIES = {"loss": 2, "backward": 4}
"""Boundary activations under way at each peak, with their gradients."""


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """Bytes that a step takes at its two peaks."""

    saved: float
    """Bytes that all layers save from the forward to the backward."""
    at_loss: float
    """Bytes at the loss, with those that are saved."""
    in_backward: float
    """Bytes in the backward, with those that are saved."""

    @property
    def peak(self) -> float:
        """Bytes at the larger peak, with the context."""
        return max(self.at_loss, self.in_backward) + CONTEXT_BYTES


def activation_bytes(model: PreTrainedModel, config: RunConfig, work: Workload, *, compiles: bool) -> ActivationBytes:
    """Estimate the GPU memory that a run needs in addition to its arena.

    Args:
        model: the skeleton.
        config: the run's settings.
        work: its units.
        compiles: whether layers are compiled.
    """
    text = model.config.get_text_config()
    item = COMPUTE_DTYPES[config.model.compute_dtype].itemsize
    width = boundary_width(model)
    boundary = work.rows * config.data.sequence_length * width * item

    # Units before the first trained one have no backward, so they save nothing.
    layers = [unit for unit in work.units if _is_of_layer(unit)]
    lower = without_input_gradient(work.units)
    reached = [unit for unit in layers if unit.layout.num_trained or unit.name not in lower]
    tiled = in_tiles(model, config, work)
    absent = tiled | matrices_in(model)
    dropped = {unit.name: _dropped(unit, model, item) / width for unit in layers}
    saved = sum(_saved(unit, width, config, work, compiles, absent, dropped[unit.name]) for unit in reached) * boundary
    attention = sum(attention_parts(text, work.rows * config.data.sequence_length, item))
    saved += attention * sum(_saves_attention_beside(unit, config, work, compiles) for unit in reached)
    passing = ATTENTION_PASSING * attention if work.offloads_attention else 0
    largest = max((REPEATED * _products(unit, width, absent) + dropped[unit.name] for unit in layers), default=0.0)
    tile = max((_tile_bytes(unit, config, tiled, item) for unit in layers), default=0.0)

    # The fused loss has the logits of one chunk, their gradient, and the fp32 gradient of a head that is trained.
    chunk = config.model.loss_chunk if config.model.fused_loss else work.rows * config.data.sequence_length
    logits = 2 * item * min(chunk, work.rows * config.data.sequence_length) * text.vocab_size
    head = model.get_output_embeddings()
    makes_sum = config.model.fused_loss and (head is None or head.weight.requires_grad)
    head_sum = 4 * text.vocab_size * hidden_width(model) if makes_sum else 0

    # One layer at a time repeats what it did not save, so the largest one decides. Slices do so one after the other.
    mask = mask_bytes(config, work)
    in_layer = largest * boundary + item * mask
    made = _decoded_bytes(work, item) + _adapted_bytes(model, work, item)
    beside = mask + passing + _lent_bytes(work) + _update_bytes(work) + made
    return ActivationBytes(
        saved,
        saved + logits + head_sum + BOUNDARIES["loss"] * boundary + beside,
        saved + in_layer / config.train.slices + BOUNDARIES["backward"] * boundary + beside + tile,
    )


def keeps_attention(config: RunConfig, work: Workload, unit: Unit, *, compiles: bool) -> bool:
    """Whether a layer keeps what attention gave, though its backward computes the rest again."""
    if not (work.keeps_attention and unit.is_layer):
        return False
    return config.model.saved_share == 0 if compiles else not work.activations[unit.name].keeps_graph


def in_tiles(model: PreTrainedModel, config: RunConfig, work: Workload) -> frozenset[str]:
    """The parameters of all modules of layers that run in tiles of tokens, by their names.

    Nothing is tried here: a run may find that some of the modules have to run whole.
    """
    tokens = config.model.tile_tokens
    if tokens is None or work.rows * config.data.sequence_length <= tokens * config.train.slices:
        return frozenset()

    found = set[str]()
    for unit in work.units:
        for module_name in unit.module_names:
            inside = tiled_names(unit, model.get_submodule(module_name))
            paths = tuple(f"{module_name}.{name}".rstrip(".") + "." for name in inside)
            found.update(tensor.name for tensor in unit.layout.tensors if tensor.name.startswith(paths))
    return frozenset(found)


def mask_bytes(config: RunConfig, work: Workload) -> int:
    """Return the bytes of the mask that keeps a group's documents apart, one for each pair of tokens; 0 without one."""
    return work.rows * config.data.sequence_length**2 if config.has_mask else 0


def _lent_bytes(work: Workload) -> int:
    """Bytes of the copies that modules around the layers lend. In the backward each gives way to its gradient."""
    lent = (unit.layout for unit in work.units if unit.is_lent)
    return sum(tensor.num_elements * layout.schema.grad_width for layout in lent for tensor in layout.tensors)


def _decoded_bytes(work: Workload, item: int) -> int:
    """Bytes of the largest quantised matrix while a product takes it, and of the pieces in which it is decoded."""
    tensors = (tensor for unit in work.units for tensor in unit.layout.tensors if tensor.stands_for > 1)
    largest = max((tensor.num_parameters for tensor in tensors), default=0)
    return largest * item + min(largest, PIECE_ELEMENTS) * PIECE_BYTES


def _adapted_bytes(model: PreTrainedModel, work: Workload, item: int) -> int:
    """Bytes of the adapted parameters of one unit, of which its forward takes the sums, and of their gradients."""
    adapted = wrappers_in(model)
    sizes = (sum(t.num_elements for t in unit.layout.tensors if t.name in adapted) for unit in work.units)
    return ADAPTED_COPIES * item * max(sizes, default=0)


def _update_bytes(work: Workload) -> int:
    """Bytes that updates by matrix take: of matrices that are carried, one after the other, and of their products.

    Updates run under the forward, and those in the immediate mode under the backward.
    """
    layouts = [unit.layout for unit in work.units if unit.layout.schema.by_matrix]
    sizes = [[matrix.num_elements for matrix in matrices_of(layout)] for layout in layouts]
    largest = max((size for of_unit in sizes for size in of_unit), default=0)

    # On the GPU itself another lane updates at the same time, on a stream with memory of its own.
    lanes = 1 + (Tier.GPU in work.policy.state or work.policy.streamed_share > 0)
    carried = max((sum(of_unit[n : n + MATRICES_CARRIED]) for of_unit in sizes for n in range(len(of_unit))), default=0)
    return CARRIED_BYTES * carried + PRODUCT_BYTES * lanes * largest


def _is_of_layer(unit: Unit) -> bool:
    """Return whether a unit is a decoder layer, or the experts of one."""
    return unit.is_layer or unit.experts is not None


def _saved(
    unit: Unit,
    width: int,
    config: RunConfig,
    work: Workload,
    compiles: bool,
    absent: frozenset[str],
    dropped: float,
) -> float:
    """Return how many boundary activations a layer saves, or its part, of which so many are dropped inputs."""
    policy = work.activations[unit.name]
    if policy.offloads_input:
        return 0.0

    # The input of experts in units of their own is counted with the unit of their layer's other modules.
    inputs = 0.0 if unit.experts is not None else 1.0 if len(unit.module_names) == 1 else INPUTS_CUT
    share = config.model.saved_share if compiles else 1.0
    if not policy.keeps_graph or not share:
        return inputs
    factor = interpolated(SAVED, share)
    return max(inputs, factor * _products(unit, width, absent) + min(1.0, factor) * dropped)


def _saves_attention_beside(unit: Unit, config: RunConfig, work: Workload, compiles: bool) -> bool:
    """Whether a layer saves what attention gave in addition to all that `_saved` counts."""
    always = compiles and config.model.attention == FLEX and work.activations[unit.name].keeps_graph
    is_beside = always and unit.is_layer and 0 < config.model.saved_share < ATTENTION_FROM
    leaves = work.offloads_attention and work.activations[unit.name].offloads_input
    return is_beside or (keeps_attention(config, work, unit, compiles=compiles) and not leaves)


def interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """Return the value at a place of a broken line through points, which is constant beyond the first and the last."""
    xs, ys = zip(*points, strict=True)
    return float(np.interp(at, xs, ys))


def _tile_bytes(unit: Unit, config: RunConfig, tiled: frozenset[str], item: int) -> float:
    """Return the bytes of one tile of a layer's modules that run in tiles: what they hold inside, and gradients."""
    inside = [tensor for tensor in unit.layout.tensors if tensor.name in tiled]
    outputs = sum(_outputs(tensor) for tensor in inside)
    grads = sum(tensor.num_elements for tensor in inside) * (4 + item)
    return REPEATED * outputs * (config.model.tile_tokens or 0) * item + grads


def _products(unit: Unit, width: int, absent: frozenset[str]) -> float:
    """Return the outputs of a layer's products that exist whole, in hidden sizes.

    Experts are counted as if each token went to one, and a part of them by its share. Absent are the outputs of what
    runs in tiles, and those of adapters of parameters, with which no token is multiplied.
    """
    names = {tensor.name for tensor in unit.layout.tensors}
    rows = [_outputs(t) for t in unit.layout.tensors if t.name not in absent and not _is_added(t.name, names)]
    return sum(rows) / width + (BESIDE_PRODUCTS if unit.experts is None else 0.0)


def _is_added(name: str, names: Collection[str]) -> bool:
    """Return whether a parameter gives what an adapter adds to an output, without DoRA, so that it is not saved.

    Args:
        name: of the parameter.
        names: of all parameters of its unit.
    """
    module, found, _ = name.partition(".lora_B.")
    return bool(found) and not any(other.startswith(f"{module}.{MAGNITUDE}.") for other in names)


def _dropped(unit: Unit, model: PreTrainedModel, item: int) -> float:
    """Return the elements that adapters with dropout save for each token, each with its byte of the mask."""
    config = adapter_config(model)
    if config is None or not config.lora_dropout:
        return 0.0
    inputs = sum(tensor.parameter_shape[-1] for tensor in unit.layout.tensors if ".lora_A." in tensor.name)
    return inputs * (1 + 1 / item)


def _outputs(tensor: TensorSlice) -> float:
    """Return the elements that a product with a matrix gives for each token; 0 for a vector."""
    if len(tensor.shape) < 2:
        return 0.0
    return tensor.shape[-2] * tensor.num_elements / math.prod(tensor.parameter_shape)
