"""Counts the GPU memory that a step's activations, gradients, loss and libraries take, in addition to the arena.

Each term is a tensor that is there at a peak, in bytes. Activations are counted in boundary activations: hidden sizes
of each token of a group. Of a layer, c are the outputs of its products and of attention (where the output of the last
product is the next layer's input), and f is the widest input of a product, that of a gated MLP's last one. There are
two peaks, and what layers have saved is there at both:

    at the loss      the logits of a chunk and their slopes, the fp32 sum of the head's gradient, and the input, the
                     output and the gradient of the last norm
    in the backward  of the layer that is worked on: 6 f, which are gate, up, their product and the gradients of these,
                     less what it has saved of them; about 3 boundaries; the outputs of attention's products and their
                     rotated copies, if attention is computed again; or the gradients of its weights, which come when
                     the MLP is through. With slices, all but the last two are of one slice, and there are also the
                     sum of the slices before (in the compute dtype of one slice, in fp32 of several), and the
                     gradients of its whole output and input

A compiled layer saves the share s of all that it could, 1 + s (c + f + 1), which are its input, c, f and the outputs of
two norms; c at most, and its input at least. The compiler picks whole tensors, so it may save less. At s = 1 all of it
is saved. A layer that is not compiled also saves what the activation function gives and the fp32 copies of norms.

Where attention is kept, and the rest of a layer computed again, its output and log-sum-exp are saved besides the input.
So they are for flex attention if a compiled layer saves less than the share at which attention is among what it saves.
If they are offloaded, those of two layers are under way.

Norms, MLPs and experts that run in tiles of tokens save nothing but their inputs. What they hold inside counts for one
tile, and in the backward their gradients count as well: those of a tile, and their sum in fp32.

A unit that is no layer has gradients of its weights as well, as large as an embedding. Of one that is tied to the head
the sum that the loss made stays until its own backward.

A frozen layer is counted as if it were trained. One with nothing trained before it saves nothing. What an adapter adds
to the output of its module is not saved, except with DoRA. With dropout each adapter saves its own input, and a byte
for each element that says what was dropped. If documents are kept apart there is also a mask of one byte for each pair
of tokens, which a layer's attention has in the compute dtype as well. flex_attention has none, because its mask is by
blocks. Copies of weights that are lent to the whole forward (`Unit.is_lent`) count at both peaks, and so do one
quantised matrix that is decoded, and the parameters of one unit that have adapters of their own.

`bench/bench_memory.py` compares it with what steps of many shapes and settings take (docs/large_models.md).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from megatier.adapters.lora import adapter_config
from megatier.adapters.weights import MAGNITUDE
from megatier.compute.adapted import matrices_in, wrappers_in
from megatier.compute.quantised import PIECE_ELEMENTS
from megatier.config.schema import RunConfig, TrainConfig
from megatier.layout import TensorSlice
from megatier.models.decoder import Unit, tiled_names
from megatier.optim.muon import matrices_of
from megatier.schedule.slots import MATRICES_CARRIED
from megatier.setup.attention_rule import FLEX
from megatier.setup.setup import Setup
from megatier.setup.workload import (
    COMPUTE_DTYPES,
    Workload,
    attention_parts,
    boundary_width,
    hidden_width,
    without_input_gradient,
)
from megatier.tier import Tier

CONTEXT_BYTES = 1_000_000_000
"""Bytes that the driver and libraries hold, with the work areas that these take of torch."""
IN_MLP = 6
"""Widest inputs in the backward of a gated MLP: gate, up and their product, and the gradients of the three."""
IN_LAYER = 3.2
"""Boundary activations beside them: the gradient of the layer's output, the input of the MLP and its norm."""
ATTENTION_AGAIN = 1.25
"""What attention holds if it is computed again, over the outputs of all but the MLP's products: rotated copies too."""
LAST = 10
"""Boundary activations in the backward of attention, when the gradients of all weights of a layer come to be there."""
NORMS = 2
"""Outputs of a layer's norms, which its products take."""
UNCOMPILED = 6
"""Boundary activations that two norms save beside their outputs if they are not compiled: what they have in fp32."""
IN_PLAIN = 1.4, 2
"""Of a layer that is not compiled: boundary activations, and widest inputs, in its backward beside what it saves."""
TILE_REPEATED = 2.3
"""Bytes that the backward of a tile holds, over the outputs of its products."""
TILED = 2
"""Boundary activations of a module that runs in tiles, whole: the gradients of its input and output."""
INPUTS_CUT = 4
"""Least boundary activations that a layer saves if its experts are units: the inputs of both norms, of the attention
and of the experts."""
ATTENTION_FROM = 0.8
"""Least saved share at which attention is among what the compiler saves."""
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
INPUTS_PASSING = 2
"""Layers whose offloaded input is there at once: it leaves while the next one comes, and comes back one layer ahead."""
AT_LOSS = 3
"""Boundary activations at the loss: input, output and gradient of the last norm."""
LOSS_BYTES = {"compiled": 4, "plain": 19, "unfused": 12}
"""Bytes for each logit of a chunk, in bf16: logits and slopes; also what a loss that is not compiled has in fp32; and,
if it is not fused with the head, what Hugging Face's loss function has."""


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


def activation_bytes(setup: Setup) -> ActivationBytes:
    """Estimate the GPU memory that a run needs in addition to its arena."""
    model, config, work = setup.model, setup.config, setup.work
    text = model.config.get_text_config()
    item = COMPUTE_DTYPES[config.model.compute_dtype].itemsize
    width = boundary_width(model)
    tokens = setup.tokens
    boundary = tokens * width * item

    # Units before the first trained one have no backward, so they save nothing.
    layers = [unit for unit in work.units if _is_of_layer(unit)]
    lower = without_input_gradient(work.units)
    reached = [unit for unit in layers if unit.layout.num_trained or unit.name not in lower]
    tiled = in_tiles(setup)
    attention = attention_parts(text, tokens, item)
    absent = tiled | matrices_in(model)
    sizes = {
        unit.name: _sizes(unit, width, absent, attention[0] / boundary, _dropped(unit, model, item) / width, text)
        for unit in layers
    }
    saving = {unit.name: _saved(setup, unit, sizes[unit.name]) for unit in reached}
    beside_saved = sum(_saves_attention_beside(setup, unit) for unit in reached)
    saved = sum(saving.values()) * boundary + sum(attention) * beside_saved
    passing = ATTENTION_PASSING * sum(attention) if work.offloads_attention else 0
    passing += INPUTS_PASSING * boundary if any(policy.offloads_input for policy in work.activations.values()) else 0

    # The fused loss has the logits of one chunk, their gradient, and the fp32 gradient of a head that is trained.
    is_fused = config.model.fused_loss
    way = "unfused" if not is_fused else "compiled" if setup.compiles else "plain"
    logits = LOSS_BYTES[way] * item / 2 * min(config.model.loss_chunk if is_fused else tokens, tokens) * text.vocab_size
    head = model.get_output_embeddings()
    makes_sum = is_fused and (head is None or head.weight.requires_grad)
    head_sum = 4 * text.vocab_size * hidden_width(model) if makes_sum else 0

    # One layer at a time repeats what it did not save, so the largest one decides. Slices do so one after the other.
    slices = config.train.slices
    in_slice = boundary / slices
    mask = mask_bytes(setup)
    in_units = 0.0
    for unit in work.units:
        held, in_one = _gradients(unit, config.train, item)
        made = float(in_one)
        if unit.name in sizes:
            again = _repeated(setup, unit, sizes[unit.name], saving.get(unit.name, 0.0))
            tile = _tile_bytes(unit, config, tiled, item)
            tile += (IN_LAYER + TILED) * in_slice if tile else 0
            made = max(again * in_slice, tile, made + min(again, LAST) * in_slice)
        in_units = max(in_units, held + made)
    in_units += (item * mask) / slices + (2 * boundary if slices > 1 else 0)
    is_tied = any(len(unit.module_names) > 1 and not _is_of_layer(unit) for unit in work.units)

    # Copies that modules around the layers lend. In the backward each gives way to its gradient.
    lent = (unit.layout for unit in work.units if unit.is_lent)
    lent_bytes = sum(tensor.num_elements * layout.schema.grad_width for layout in lent for tensor in layout.tensors)
    beside = mask + passing + lent_bytes + _update_bytes(work)
    beside += _decoded_bytes(work, item) + _adapted_bytes(model, work, item)
    return ActivationBytes(
        saved,
        saved + logits + head_sum + AT_LOSS * boundary + beside,
        saved + in_units + (head_sum if is_tied else 0) + beside,
    )


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What a layer, or its part, has for each token, in boundary activations."""

    products: float
    """c: the outputs of its products and of attention."""
    widest: float
    """f: the widest input of a product."""
    others: float
    """Those of c that are not of the products that have f as input or output."""
    in_mlp: float
    """What the backward of its MLP holds. With experts, these are the rows of all tokens for each expert that they go
    to, what the last products give of them, the outputs of the others, and the gradients of all three."""
    dropped: float
    """Inputs that adapters with dropout save."""

    @property
    def all(self) -> float:
        """All that a compiled layer could save, with its input."""
        return self.products + self.widest + NORMS


def _gradients(unit: Unit, train: TrainConfig, item: int) -> tuple[int, int]:
    """Return the bytes of the gradients of a unit's weights: the sum of the slices before, and those of one slice."""
    count = unit.layout.num_trained
    largest = max((tensor.num_elements for tensor in unit.layout.trained.tensors), default=0)
    if train.slices == 1:
        return 0, item * count
    if train.slices == 2:
        # If groups are added up, the first summand of a tensor is made fp32 before it is written.
        return item * count + (4 * largest if train.groups > 1 else 0), item * count

    # The first summand of a tensor is there until it has become the sum in fp32.
    return 4 * count + item * largest, item * count


def _repeated(setup: Setup, unit: Unit, sizes: _Sizes, saved: float) -> float:
    """Return the boundary activations of the backward of a layer, beside those that it has saved.

    Args:
        setup: the run.
        unit: the layer.
        sizes: what it has for each token.
        saved: those that it has saved.
    """
    if not setup.compiles:
        return max(0.0, _uncompiled(sizes) - max(1.0, saved)) + IN_PLAIN[0] + IN_PLAIN[1] * sizes.widest
    of_mlp = min(max(0.0, saved - 1 - sizes.others), 3 * sizes.widest)
    of_attention = 0.0 if _knows_attention(setup, unit) else ATTENTION_AGAIN * sizes.others
    return sizes.in_mlp - of_mlp + IN_LAYER + of_attention + sizes.dropped


def _uncompiled(sizes: _Sizes) -> float:
    """Return the boundary activations that a layer saves if it is not compiled and keeps its graph."""
    return sizes.all + sizes.widest + UNCOMPILED


def keeps_attention(setup: Setup, unit: Unit) -> bool:
    """Whether a layer keeps what attention gave, though its backward computes the rest again."""
    if not (setup.work.keeps_attention and unit.is_layer):
        return False
    return setup.saved_share == 0 if setup.compiles else not setup.work.activations[unit.name].keeps_graph


def in_tiles(setup: Setup) -> frozenset[str]:
    """The parameters of all modules of layers that run in tiles of tokens, by their names.

    Nothing is tried here: a run may find that some of the modules have to run whole.
    """
    tokens = setup.config.model.tile_tokens
    if tokens is None or setup.tokens <= tokens * setup.config.train.slices:
        return frozenset()

    names = set[str]()
    for unit in setup.work.units:
        for module_name in unit.module_names:
            inside = tiled_names(unit, setup.model.get_submodule(module_name))
            paths = tuple(f"{module_name}.{name}".rstrip(".") + "." for name in inside)
            names.update(tensor.name for tensor in unit.layout.tensors if tensor.name.startswith(paths))
    return frozenset(names)


def mask_bytes(setup: Setup) -> int:
    """Return the bytes of the mask that keeps a group's documents apart, one for each pair of tokens; 0 without one."""
    return setup.tokens * setup.config.data.sequence_length if setup.config.has_mask else 0


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
    if work.policy.state == (Tier.GPU,):
        return PRODUCT_BYTES * largest
    lanes = 1 + (Tier.GPU in work.policy.state or work.policy.streamed_share > 0)
    carried = max((sum(of_unit[n : n + MATRICES_CARRIED]) for of_unit in sizes for n in range(len(of_unit))), default=0)
    return CARRIED_BYTES * carried + PRODUCT_BYTES * lanes * largest


def _is_of_layer(unit: Unit) -> bool:
    """Return whether a unit is a decoder layer, or the experts of one."""
    return unit.is_layer or unit.experts is not None


def _saved(setup: Setup, unit: Unit, sizes: _Sizes) -> float:
    """Return how many boundary activations a layer saves, or its part, without attention that is kept beside."""
    policy = setup.work.activations[unit.name]
    if policy.offloads_input:
        return 0.0

    # The input of experts in units of their own is counted with the unit of their layer's other modules.
    inputs = 0.0 if unit.experts is not None else 1.0 if len(unit.module_names) == 1 else INPUTS_CUT
    share = setup.saved_share
    if not policy.keeps_graph or not share:
        return inputs
    if not setup.compiles:
        return _uncompiled(sizes) + sizes.dropped
    if share == 1:
        return max(inputs, sizes.all) + sizes.dropped
    return max(inputs, min(sizes.products, 1 + share * (sizes.all - 1))) + min(1.0, 1.5 * share) * sizes.dropped


def _knows_attention(setup: Setup, unit: Unit) -> bool:
    """Whether the backward of a layer finds what attention gave."""
    if _saves_attention_beside(setup, unit) or keeps_attention(setup, unit):
        return True
    return setup.work.activations[unit.name].keeps_graph and setup.saved_share >= ATTENTION_FROM


def _saves_attention_beside(setup: Setup, unit: Unit) -> bool:
    """Whether a layer saves what attention gave in addition to all that `_saved` counts."""
    policy = setup.work.activations[unit.name]
    always = setup.compiles and setup.config.model.attention == FLEX and policy.keeps_graph
    is_beside = always and unit.is_layer and 0 < setup.saved_share < ATTENTION_FROM
    leaves = setup.work.offloads_attention and policy.offloads_input
    return is_beside or (keeps_attention(setup, unit) and not leaves)


def _tile_bytes(unit: Unit, config: RunConfig, tiled: frozenset[str], item: int) -> float:
    """Return the bytes of one tile of a layer's modules that run in tiles: what they hold inside, and gradients."""
    inside = [tensor for tensor in unit.layout.tensors if tensor.name in tiled]
    outputs = sum(_outputs(tensor) for tensor in inside)
    grads = sum(tensor.num_elements for tensor in inside) * (4 + item)
    return TILE_REPEATED * outputs * (config.model.tile_tokens or 0) * item + grads


def _sizes(
    unit: Unit,
    width: int,
    absent: frozenset[str],
    attention: float,
    dropped: float,
    text: Any,  # noqa: ANN401 - a config of any family
) -> _Sizes:
    """Return what a layer, or its part, has for each token.

    A token goes to several experts, whose last products are added up at once. Absent are the outputs of what runs in
    tiles, and those of adapters of parameters, with which no token is multiplied.
    """
    names = {tensor.name for tensor in unit.layout.tensors}
    tensors = [t for t in unit.layout.tensors if t.name not in absent and not _is_added(t.name, names)]
    chosen = getattr(text, "num_experts_per_tok", None) or 1
    times = {t.name: chosen if len(t.parameter_shape) == 3 else 1 for t in tensors}
    inputs = {t.name: times[t.name] * _inputs(t) for t in tensors}
    widest = max(inputs.values(), default=0.0)
    outputs = {t.name: _outputs(t) * (times[t.name] if _inputs(t) == width else 1) for t in tensors}
    of_mlp = sum(out for name, out in outputs.items() if widest in (out, out / 2, inputs[name]))
    attends = attention if unit.is_layer else 0.0
    products = sum(outputs.values()) / width + attends
    in_mlp = IN_MLP * widest
    if chosen > 1 and widest == chosen * width:
        first = sum(out for name, out in outputs.items() if times[name] > 1 and inputs[name] == widest)
        in_mlp = 4 * widest + 2 * first
    return _Sizes(products, widest / width, products - of_mlp / width, in_mlp / width, dropped)


def _inputs(tensor: TensorSlice) -> int:
    """Return the elements of each token that a product with a matrix takes; 0 for a vector."""
    return tensor.parameter_shape[-1] if len(tensor.parameter_shape) > 1 else 0


def _is_added(name: str, names: Collection[str]) -> bool:
    """Return whether a parameter gives what an adapter adds to an output, without DoRA, so that it is not saved.

    Args:
        name: of the parameter.
        names: of all parameters of its unit.
    """
    module, separator, _ = name.partition(".lora_B.")
    return bool(separator) and not any(other.startswith(f"{module}.{MAGNITUDE}.") for other in names)


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
