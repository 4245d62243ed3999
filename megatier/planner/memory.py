"""Estimates the GPU memory of a step outside the arena: activations, gradients, the loss and libraries.

Each term is a tensor that exists at a peak. There are three peaks: the loss, and in the backward of a layer its MLP and
its attention, of which the larger one counts. Sizes are in these letters:

- b: a boundary activation, which is the hidden sizes of all tokens of a group. c and f are multiples of it.
- c: the outputs of a layer's products and of attention. That of the last product is the next layer's input.
- f: the widest input of a product, which in a gated MLP is that of the last one.
- s: the saved share (`model.saved_share`).

| peak | term | size | constant |
|---|---|---|---|
| all | driver and libraries | 1 GB | `CONTEXT_BYTES` |
| all | what layers save | the second table | |
| all | offloaded inputs and attention on their way | those of 2 layers each | `INPUTS_PASSING`, `ATTENTION_PASSING` |
| all | vision towers (`planner.tower_bytes`), and the pixels of all groups | as measured on shapes | |
| all | mask of documents kept apart (none with flex) | 1 byte for each pair of tokens | |
| all | copies of weights lent to the whole forward | gradient dtype | |
| all | a quantised matrix that is decoded | compute dtype, and pieces in fp32 | `DECODED_BYTES` |
| all | adapted parameters of one unit | 2 of each | `ADAPTED_COPIES` |
| all | FP8 copies of the largest matrix | 2 bytes an element | `FP8_WEIGHTS` |
| all | matrices that Muon updates on the GPU | their products and state | `PRODUCT_BYTES`, `CARRIED_BYTES` |
| loss | logits of a chunk, and their gradient | by the kind of loss | `LOSS_BYTES` |
| loss | sum of the head's gradient, to the end if tied | fp32 | |
| loss | input, output and gradient of the last norm | 3 b | `BOUNDARIES_AT_LOSS` |
| MLP | gate, up, their product; gradients of the three | 6 f, less what is saved of them | `layer_sizes.IN_MLP` |
| MLP | gradients and inputs in FP8 | 1.5 f | `FP8_IN_MLP` |
| MLP | gradient of the layer's output, MLP's input, norm | 3.2 b | `IN_LAYER` |
| MLP | attention that is computed again | 1.25 times its part of c | `ATTENTION_AGAIN` |
| MLP | the same of a layer that is not compiled | what it has not saved, 1.4 b, 2 f | `PLAIN_...` |
| MLP | a module in tiles: one tile, and sums in fp32 | 2.3 times a tile's outputs | `TILE_REPEATED`, `TILED` |
| attention | gradients of all the layer's weights | compute dtype | |
| attention | the activations above | at most 10 b | `ATTENTION_BACKWARD` |
| attention | mask in the compute dtype | 2 bytes for each pair of tokens | |
| backward, slices | gradient sum; whole output's and input's gradient | fp32 (one slice: compute dtype), 2 b | |

With slices, b of MLP and attention is that of one slice.

| layer | saves |
|---|---|
| compiled | 1 + s (c + f + 1), that is its input, c, f and two norms' outputs; for s < 1 at most c |
| attention with a mask of all pairs | of s also a key and value for each query head, and the mask |
| not compiled, graph retained | also f for the activation function, and 6 b for the norms in fp32 |
| checkpointed | 1 b, its input; 4 b if its experts are units (`INPUTS_CUT`) |
| offloaded, or frozen with nothing trained before it | nothing |
| kept attention; flex attention with s < 0.8 (`ATTENTION_FROM`) | attention's output and log-sum-exp as well |
| modules in tiles of tokens | their inputs alone |
| products in FP8 | half of what these take |
| adapters with dropout | each its own input, and a byte for each element; DoRA also what it adds |

A unit that is no layer has the gradients of its weights alone. A frozen layer is counted as if it were trained.

The constants with fractions are fitted. `bench/bench_memory.py` compares all that it has cases of with steps on an
H100 (docs/large_models.md); cases are named beside the constants. No case has FP8 products, adapters or quantised
weights: those terms are counted from the tensors that the code makes.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatier.compute.adapted_parameter import wrappers_in
from megatier.compute.quantised_linear import DECODED_ELEMENTS
from megatier.models.decoder import Unit
from megatier.optim.muon import matrices_of
from megatier.planner.layer_sizes import LayerSizes, in_tiles, is_of_layer, layer_sizes, output_elements
from megatier.planner.tower_bytes import pixel_bytes, tower_bytes
from megatier.schedule.slots import MATRICES_CARRIED
from megatier.setup.attention_rule import FLEX
from megatier.setup.setup import Setup
from megatier.setup.workload import (
    Workload,
    attention_parts,
    boundary_width,
    head_width,
    hidden_width,
    without_input_gradient,
)
from megatier.tier import Tier

CONTEXT_BYTES = 1_000_000_000
"""Bytes that the driver and libraries hold, with their work areas. Cases: all."""
IN_LAYER = 3.2
"""Boundary activations in the backward of an MLP, beside its own. Cases: 8b_little, 8b_nothing."""
ATTENTION_AGAIN = 1.25
"""What attention that is computed again holds over the outputs of all but the MLP's products: also rotated copies.
Cases: 8b_nothing, 70b."""
ATTENTION_BACKWARD = 10
"""The most boundary activations in the backward of attention. Cases: 8b_slices, 32b_muon, 70b."""
PLAIN_BOUNDARIES = 1.4
PLAIN_WIDEST = 2
"""Boundary activations, and widest inputs, in the backward of a layer that is not compiled, beside what it saves.
Cases: 8b_plain, plain_again, plain_kept."""
TILE_REPEATED = 2.3
"""What the backward of a tile holds over the outputs of its products. Cases: 8b_tiles, small_head_tiles."""
TILED = 2
"""Boundary activations of a module that runs in tiles, whole: the gradients of its input and output. Cases as above."""
INPUTS_CUT = 4
"""Least boundary activations that a layer saves if its experts are units: the inputs of both norms, of the attention
and of the experts."""
ATTENTION_FROM = 0.8
"""The least saved share at which the compiler saves attention. Cases: 8b (0.8), 8b_fp8_moments (0.6), 8b_half (0.4)."""
CARRIED_BYTES = 10
"""Bytes of each element of a matrix that is carried: its state and its gradient. No case has state in RAM with it."""
PRODUCT_BYTES = 14
"""Bytes that the products of a matrix take for each of its elements. Newton-Schulz takes 2, and 10 for each element of
the square of the shorter side. Case: 32b_muon, when its new master was split by torch."""
ADAPTED_COPIES = 2
"""Copies of an adapted parameter: its sum with what its adapter adds, and the gradient of that sum."""
DECODED_BYTES = 12
"""Bytes for each number of a piece that is decoded: of three copies in fp32."""
ATTENTION_PASSING = 2
"""Layers whose offloaded attention is on the GPU at once: it comes back one layer ahead."""
INPUTS_PASSING = 2
"""Layers whose offloaded input is on the GPU at once: it leaves while the next one comes, and comes back one
layer ahead. Case: 8b_offload."""
FP8_IN_MLP = 1.5
"""Widest inputs, in bf16, that FP8 copies take in the backward of a product: two of a gradient, one of an input."""
FP8_WEIGHTS = 2
"""Bytes of FP8 copies for each element of a matrix that is multiplied: its rows, and its transpose."""
BOUNDARIES_AT_LOSS = 3
"""Boundary activations at the loss: input, output and gradient of the last norm. Cases: 8b, 3b."""
LOSS_BYTES = {"compiled": 4, "plain": 19, "unfused": 12}
"""Bytes for each logit of a chunk in bf16, by the kind of loss: of logits and their gradient; with fp32 copies if it is
not compiled; and of Hugging Face's loss function if it is not fused. Cases: 8b, 3b; 8b_plain; unfused."""


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
    work = setup.work
    boundary_bytes = setup.tokens * boundary_width(setup.model) * setup.item_bytes
    tiled = in_tiles(setup)
    sizes = layer_sizes(setup, tiled)

    # Units before the first trained one have no backward, so they save nothing.
    without_backward = without_input_gradient(work.units)
    saving: dict[str, float] = {}
    num_attentions = 0
    for unit in work.units:
        has_backward = unit.layout.num_trained or unit.name not in without_backward
        if unit.name in sizes and has_backward:
            saving[unit.name] = _saved_bytes(setup, unit, sizes[unit.name])
            num_attentions += _saves_attention_beside(setup, unit)
    tower = tower_bytes(setup)
    saved = sum(saving.values()) * boundary_bytes + _attention_bytes(setup) * num_attentions + tower.saved

    # One layer at a time computes again what it did not save, so the largest one decides.
    in_units = 0.0
    slices = setup.config.train.slices
    slice_bytes = boundary_bytes / slices
    for unit in work.units:
        earlier_grads, slice_grads = _gradient_bytes(setup, unit)
        backward_bytes = float(slice_grads)
        if unit.name in sizes:
            saved_of_unit = saving.get(unit.name, 0.0)
            recomputed = _backward_activations(setup, unit, sizes[unit.name], saved_of_unit)
            tile_bytes = _tile_bytes(setup, unit, tiled)
            tile_bytes += (IN_LAYER + TILED) * slice_bytes if tile_bytes else 0

            # The MLP has its peak before most gradients of weights are there, and attention when all of them are.
            at_attention = backward_bytes + min(recomputed, ATTENTION_BACKWARD) * slice_bytes
            backward_bytes = max(recomputed * slice_bytes, tile_bytes, at_attention)
        in_units = max(in_units, earlier_grads + backward_bytes)

    # Slices run one after the other, and beside them are the gradients of the whole output and input of a layer.
    mask = mask_bytes(setup)
    in_units += (setup.item_bytes * mask) / slices
    in_units += 2 * boundary_bytes if slices > 1 else 0
    beside_units = mask + _passing_bytes(setup, boundary_bytes) + _weight_bytes(setup)
    beside_units += pixel_bytes(setup).get(Tier.GPU, 0)

    # The head's sum stays until the backward of an embedding that is tied to it, which comes last.
    logits, head_sum = _loss_bytes(setup)
    is_tied = any(len(unit.module_names) > 1 for unit in work.units if not is_of_layer(unit))
    return ActivationBytes(
        saved=saved,
        at_loss=saved + logits + head_sum + BOUNDARIES_AT_LOSS * boundary_bytes + beside_units,
        # When the tower's turn comes, what the layers saved is gone.
        in_backward=max(saved + in_units, tower.saved + tower.in_unit) + (head_sum if is_tied else 0) + beside_units,
    )


# ---------------------------------------------------------------- what layers save


def _saved_bytes(setup: Setup, unit: Unit, sizes: LayerSizes) -> float:
    """Return the boundary activations that a layer, or its part, saves, without attention that is kept beside."""
    policy = setup.work.activations[unit.name]
    if policy.offloads_input:
        return 0.0

    # The input of experts in units of their own is counted with the unit of their layer's other modules.
    inputs = 1.0 if len(unit.module_names) == 1 else INPUTS_CUT
    if unit.experts is not None:
        inputs = 0.0
    share = setup.saved_share
    if not policy.keeps_graph or not share:
        return inputs
    of_mask = _saved_with_mask(setup) if unit.is_layer else 0.0
    if not setup.compiles:
        return sizes.uncompiled + of_mask + sizes.dropped
    if share == 1:
        return max(inputs, sizes.compiled + of_mask) + sizes.dropped

    # The compiler picks whole tensors, so at a share below 1 it saves no more than c.
    chosen = min(sizes.products, 1 + share * (sizes.compiled + of_mask - 1))
    return max(inputs, chosen) + min(1.0, 1.5 * share) * sizes.dropped


def _saved_with_mask(setup: Setup) -> float:
    """Return the boundary activations that attention could save because it has a mask of all pairs of tokens.

    Its kernels take no shared heads with a mask, so each query head gets a copy of its key and value. The mask is made
    anew in each layer, in the compute dtype.
    """
    if not setup.config.has_mask:
        return 0.0
    text = setup.model.config.get_text_config()
    num_heads: int = text.num_attention_heads
    num_copied: int = num_heads - (getattr(text, "num_key_value_heads", None) or num_heads)
    copies = 2 * num_copied * head_width(text)
    return (copies + setup.config.data.sequence_length) / boundary_width(setup.model)


def keeps_attention(setup: Setup, unit: Unit) -> bool:
    """Return whether a layer keeps the output of attention, though its backward recomputes the rest."""
    if not (setup.work.keeps_attention and unit.is_layer):
        return False
    if setup.compiles:
        return setup.saved_share == 0
    return not setup.work.activations[unit.name].keeps_graph


def _saves_attention_beside(setup: Setup, unit: Unit) -> bool:
    """Return whether a layer saves the output of attention in addition to all that `_saved_bytes` counts."""
    policy = setup.work.activations[unit.name]
    if keeps_attention(setup, unit):
        # Offloaded attention leaves the GPU with the input of its layer, and counts as passing.
        leaves = setup.work.offloads_attention and policy.offloads_input
        return not leaves

    # Flex attention is saved whenever a compiled layer saves anything. From ATTENTION_FROM on `_saved_bytes` has it.
    if not (setup.compiles and policy.keeps_graph and unit.is_layer):
        return False
    is_flex = setup.config.model.attention == FLEX
    return is_flex and 0 < setup.saved_share < ATTENTION_FROM


def _attention_bytes(setup: Setup) -> int:
    """Return the bytes of what attention of one layer gives: its output and log-sum-exp."""
    return sum(attention_parts(setup.model.config.get_text_config(), setup.tokens, setup.item_bytes))


# ------------------------------------------------- what the backward of a unit holds


def _gradient_bytes(setup: Setup, unit: Unit) -> tuple[int, int]:
    """Return the bytes of the gradients of a unit's weights: the sum of the slices before, and those of one slice."""
    train = setup.config.train
    slice_grads = setup.item_bytes * unit.layout.num_trained
    if train.slices == 1:
        return 0, slice_grads

    sizes = [tensor.num_elements for tensor in unit.layout.trained.tensors]
    largest = max(sizes, default=0)
    if train.slices == 2:
        # If groups are added up, the first summand of a tensor is made fp32 before it is written.
        summand = 4 * largest if train.groups > 1 else 0
        return slice_grads + summand, slice_grads

    # The first summand of a tensor is there until it has become the sum in fp32.
    total = 4 * unit.layout.num_trained
    return total + setup.item_bytes * largest, slice_grads


def _backward_activations(setup: Setup, unit: Unit, sizes: LayerSizes, saved: float) -> float:
    """Return the boundary activations of the backward of a layer, beside those that it has saved.

    Args:
        setup: the run.
        unit: the layer.
        sizes: what it has for each token.
        saved: those that it has saved.
    """
    if not setup.compiles:
        with_input = max(1.0, saved)
        unsaved = max(0.0, sizes.uncompiled - with_input)
        return unsaved + PLAIN_BOUNDARIES + PLAIN_WIDEST * sizes.widest

    # What is saved beyond the input and the outputs of attention is of the MLP: gate, up and their product.
    beyond = max(0.0, saved - 1 - sizes.others)
    saved_of_mlp = min(beyond, 3 * sizes.widest)
    in_mlp = sizes.in_mlp - saved_of_mlp
    if sizes.in_fp8:
        in_mlp += FP8_IN_MLP * sizes.widest
    in_attention = 0.0 if _knows_attention(setup, unit) else ATTENTION_AGAIN * sizes.others
    return in_mlp + IN_LAYER + in_attention + sizes.dropped


def _knows_attention(setup: Setup, unit: Unit) -> bool:
    """Return whether the backward of a layer finds the output of attention."""
    if _saves_attention_beside(setup, unit) or keeps_attention(setup, unit):
        return True
    keeps_graph = setup.work.activations[unit.name].keeps_graph
    return keeps_graph and setup.saved_share >= ATTENTION_FROM


def _tile_bytes(setup: Setup, unit: Unit, tiled: frozenset[str]) -> float:
    """Return the bytes of one tile of a layer's modules that run in tiles: what they hold inside, and gradients."""
    tensors = [tensor for tensor in unit.layout.tensors if tensor.name in tiled]
    outputs = sum(map(output_elements, tensors))
    tile_tokens = setup.config.model.tile_tokens or 0
    inside = TILE_REPEATED * outputs * tile_tokens * setup.item_bytes

    # Each weight has the gradient of one tile, in the compute dtype, and the sum over all tiles in fp32.
    num_elements = sum(tensor.num_elements for tensor in tensors)
    gradient_bytes = 4 + setup.item_bytes
    return inside + num_elements * gradient_bytes


# --------------------------------------------------------------- what is there beside


def mask_bytes(setup: Setup) -> int:
    """Return the bytes of the mask that keeps a group's documents apart, one for each pair of tokens; 0 without one."""
    return setup.tokens * setup.config.data.sequence_length if setup.config.has_mask else 0


def _passing_bytes(setup: Setup, boundary_bytes: int) -> int:
    """Return the bytes of offloaded activations that are on their way off the GPU or back."""
    passing = 0
    if setup.work.offloads_attention:
        passing += ATTENTION_PASSING * _attention_bytes(setup)
    if any(policy.offloads_input for policy in setup.work.activations.values()):
        passing += INPUTS_PASSING * boundary_bytes
    return passing


def _loss_bytes(setup: Setup) -> tuple[float, int]:
    """Return the bytes of logits and their gradient, and of the fp32 gradient of the head that the loss sums up."""
    vocabulary = setup.model.config.get_text_config().vocab_size
    model = setup.config.model

    # The fused loss has the logits of one chunk, any other those of all tokens.
    kind = "unfused"
    tokens = setup.tokens
    if model.fused_loss:
        kind = "compiled" if setup.compiles else "plain"
        tokens = min(model.loss_chunk, tokens)
    logits = LOSS_BYTES[kind] * setup.item_bytes / 2 * tokens * vocabulary

    # Chunk after chunk adds to it, unless the head is frozen.
    head = setup.model.get_output_embeddings()
    is_trained = head is None or head.weight.requires_grad
    if not (model.fused_loss and is_trained):
        return logits, 0
    return logits, 4 * vocabulary * hidden_width(setup.model)


def _weight_bytes(setup: Setup) -> int:
    """Return the bytes of copies of weights that are outside of slots: lent, decoded, adapted and carried ones."""
    # In the backward each lent copy gives way to its gradient, so they count alike at both peaks.
    lent_bytes = 0
    for unit in setup.work.units:
        if unit.is_lent:
            num_elements = sum(tensor.num_elements for tensor in unit.layout.tensors)
            lent_bytes += num_elements * unit.layout.schema.grad_width
    made_bytes = _decoded_bytes(setup) + _adapted_bytes(setup) + _fp8_bytes(setup)
    return lent_bytes + _update_bytes(setup.work) + made_bytes


def _decoded_bytes(setup: Setup) -> int:
    """Return the bytes of the largest quantised matrix in a product, and of the pieces in which it is decoded."""
    largest = 0
    for unit in setup.work.units:
        for tensor in unit.layout.tensors:
            # A tensor of codes stands for more numbers than it has elements.
            if tensor.stands_for > 1:
                largest = max(largest, tensor.num_parameters)
    piece_elements = min(largest, DECODED_ELEMENTS)
    return largest * setup.item_bytes + piece_elements * DECODED_BYTES


def _fp8_bytes(setup: Setup) -> int:
    """Return the bytes of FP8 copies of the largest matrix whose products are taken in FP8."""
    in_fp8 = setup.work.products.weights
    largest = 0
    for unit in setup.work.units:
        sizes = [tensor.num_parameters for tensor in unit.layout.tensors if tensor.name in in_fp8]
        largest = max([largest, *sizes])
    return FP8_WEIGHTS * largest


def _adapted_bytes(setup: Setup) -> int:
    """Return the bytes of one unit's adapted parameters, of which the forward takes sums, and of their gradients."""
    adapted = wrappers_in(setup.model)
    largest = 0
    for unit in setup.work.units:
        tensors = [tensor for tensor in unit.layout.tensors if tensor.name in adapted]
        num_elements = sum(tensor.num_elements for tensor in tensors)
        largest = max(largest, num_elements)
    return ADAPTED_COPIES * setup.item_bytes * largest


def _update_bytes(work: Workload) -> int:
    """Return the bytes that updates by matrix take: matrices that are carried, one after the other, and their products.

    Updates run under the forward, and those in the immediate mode under the backward.
    """
    largest = 0
    carried = 0
    for unit in work.units:
        if not unit.layout.schema.by_matrix:
            continue
        sizes = [matrix.num_elements for matrix in matrices_of(unit.layout)]
        largest = max([largest, *sizes])

        # One matrix comes and one goes home while the one between them is updated.
        for first in range(len(sizes)):
            at_once = sizes[first : first + MATRICES_CARRIED]
            carried = max(carried, sum(at_once))

    # A run whose state is all on the GPU carries none, and updates on one queue.
    tiers = work.policy.state
    if tiers == (Tier.GPU,):
        return PRODUCT_BYTES * largest

    # Where the GPU has state of its own, two queues update at a time, each on a stream with memory of its own.
    has_second_queue = Tier.GPU in tiers or work.policy.streamed_share > 0
    return CARRIED_BYTES * carried + PRODUCT_BYTES * (1 + has_second_queue) * largest
