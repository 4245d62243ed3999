"""Estimates the seconds of one use of a unit: matrix products, attention, and what runs beside them.

In the forward a product takes 2 FLOPs for each parameter and token. The backward takes twice as many: half for the
gradient of the input, and half for the gradient of the weight, which frozen weights do not have. Causal attention takes
2 x sequence x width FLOPs for each token in the forward, and twice that with a mask of all pairs, because its kernel
also computes masked pairs. Its backward takes 2.5 times as many. Attention in compiled layers has the measured rate of
its kernel (`setup.attention_rule`).

Two things are not counted: the blocks that a block mask skips, which are more for shorter documents, and products that
tiles of tokens recompute where only sums follow.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from typing import Any

import numpy as np

from megatier.compute.adapted_parameter import matrices_in, wrappers_in
from megatier.forecast.jobs import ComputeSeconds
from megatier.layout import TensorSlice
from megatier.models.decoder import Unit
from megatier.planner.layer_sizes import in_tiles, is_of_layer
from megatier.planner.memory import keeps_attention
from megatier.planner.tower_bytes import tower_flops
from megatier.schedule.rates import UPDATE_BYTES, Rates
from megatier.setup.attention_rule import BACKWARD, FLEX, HOPPER, estimate_efficiency
from megatier.setup.setup import Setup
from megatier.setup.workload import head_width, hidden_width
from megatier.tier import Phase

REPEATED_AT = 0.0, 0.1, 0.15, 0.3, 0.5, 0.8, 1.0
REPEATED = 0.7, 0.6, 0.55, 0.39, 0.16, 0.03, 0.0
"""The share of a compiled layer's forward that its backward repeats, at these saved shares, measured on layers of 8B
shape. At 0, as under recompute, that is all but the last product."""
FP8_TIMES = 1.4
"""The assumed speed of products in FP8 over that of bf16, where it was not measured."""
ROUNDED_BYTES = {Phase.FORWARD: 5, Phase.BACKWARD: 3}
"""Bytes that move for each number of a stack that is rounded to FP8: two reads of bf16, or one, and a write."""


def unit_seconds(setup: Setup, head: str, rates: Rates) -> ComputeSeconds:
    """Return the seconds that one group takes in each unit, by unit and phase.

    Args:
        setup: the run.
        head: name of the module that computes logits.
        rates: the rates of the GPU.
    """
    compute = _UnitSeconds(setup, rates)
    seconds: dict[tuple[str, Phase], float] = {}
    for unit in setup.work.units:
        if is_of_layer(unit):
            forward, backward = compute.of_layer(unit)
        elif head in unit.module_names:
            forward, backward = compute.of_head(unit)
        elif tower_flops(setup, unit):
            forward, backward = compute.of_tower(unit)
        else:
            # Embeddings only look up rows, and norms have no matrix, so both count as 0.
            continue
        seconds[unit.name, Phase.FORWARD] = forward
        seconds[unit.name, Phase.BACKWARD] = backward
    return seconds


class _UnitSeconds:
    """Computes the seconds of a run's units from what they have in common."""

    def __init__(self, setup: Setup, rates: Rates) -> None:
        self._setup = setup
        self._activations = setup.work.activations
        self._slices = setup.config.train.slices
        self._tiled = in_tiles(setup)
        self._adapted = wrappers_in(setup.model)
        self._beside = matrices_in(setup.model)
        self._text = setup.model.config.get_text_config()
        self._num_experts, self._chosen_share = _experts(self._text)
        self._flops_per_s = rates.flops_per_s
        self._in_fp8 = setup.work.products.weights
        self._fp8_flops_per_s = rates.fp8_flops_per_s or FP8_TIMES * rates.flops_per_s

        # AdamW on the GPU is bound by memory, so its rate gives the bandwidth of the memory.
        self._memory_bytes_per_s = rates.gpu_update_parameters_per_s * UPDATE_BYTES

    def of_layer(self, unit: Unit) -> tuple[float, float]:
        """Return the seconds of forward and backward of a decoder layer, or of a unit of its experts."""
        products = self._product_flops(unit.layout.tensors)
        repeated, attention_repeated = self._repeated_shares(unit)
        repeated = self._with_tiles(unit, products, repeated)
        forward = products / self._flops_per_s - self._gained_seconds(unit.layout.tensors)
        frozen = [tensor for tensor in unit.layout.tensors if tensor.name in unit.layout.frozen]

        # The backward has two products for each of the forward: for the gradients of the input and of the weight.
        # Frozen weights lack the second one.
        spared = self._frozen_flops(unit, products) / self._flops_per_s - self._gained_seconds(frozen)
        backward = forward * (2 + repeated) - spared

        # Experts that are units of their own have no attention.
        attention = self._attention_seconds() if unit.is_layer else dict.fromkeys(Phase, 0.0)
        again = attention[Phase.FORWARD] * attention_repeated
        backward += attention[Phase.BACKWARD] * BACKWARD + again
        backward += self._sum_seconds(unit)

        # The backward adapts the parameters again, and the gradients of the adapters take as long once more.
        adapting = self._adapting_seconds(unit)
        forward += adapting
        backward += 2 * adapting

        forward += self._rounding_seconds(unit, Phase.FORWARD)
        backward += self._rounding_seconds(unit, Phase.BACKWARD)

        # The modules of a unit share its FLOPs.
        num_uses = len(unit.module_names)
        return (forward + attention[Phase.FORWARD]) / num_uses, backward / num_uses

    def of_tower(self, unit: Unit) -> tuple[float, float]:
        """Return the seconds of forward and backward of a unit of a vision tower."""
        forward = tower_flops(self._setup, unit) / self._flops_per_s
        repeated, _ = self._repeated_shares(unit)

        # A frozen unit only passes on the gradient of its input. If nothing before it is trained, it has no backward.
        products = 2 if unit.layout.num_trained else 1
        num_uses = len(unit.module_names)
        return forward / num_uses, forward * (products + repeated) / num_uses

    def of_head(self, unit: Unit) -> tuple[float, float]:
        """Return the seconds of forward and backward of the head, with the loss."""
        # An embedding that is tied to the head is another use of the unit, so the FLOPs are divided by the uses.
        products = self._product_flops(unit.layout.tensors)
        num_uses = len(unit.module_names)
        forward = products / self._flops_per_s / num_uses
        is_frozen = self._frozen_flops(unit, products) != 0
        # A frozen head only passes on the gradient of its input.
        backward = forward if is_frozen else 2 * forward

        # A fused loss makes the head's gradients in the forward, chunk after chunk.
        if self._setup.config.model.fused_loss:
            return forward + backward, 0.0
        return forward, backward

    def _product_flops(self, tensors: Iterable[TensorSlice]) -> float:
        """Return the FLOPs of a group's products with parameters, without the matrices of parameter adapters."""
        multiplied = [tensor for tensor in tensors if tensor.name not in self._beside]
        return self._flops(multiplied)

    def _frozen_flops(self, unit: Unit, products: float) -> float:
        """Return the FLOPs of the weight gradients that frozen weights spare.

        Args:
            unit: the unit.
            products: the FLOPs of all its products in the forward.
        """
        frozen = products - self._product_flops(unit.layout.trained.tensors)

        # A frozen parameter with an adapter needs this gradient after all: that of the adapted sum.
        adapted = _select_named(unit.layout.tensors, self._adapted)
        return frozen - self._flops(adapted)

    def _gained_seconds(self, tensors: Iterable[TensorSlice]) -> float:
        """Return the seconds that products in FP8 save a group."""
        if not self._in_fp8:
            return 0.0
        return self._flops(_select_named(tensors, self._in_fp8)) * (1 / self._flops_per_s - 1 / self._fp8_flops_per_s)

    def _flops(self, tensors: Iterable[TensorSlice]) -> float:
        """Return the FLOPs of a group's products with matrices. Of experts, only those that a token goes to count."""
        num_active = 0.0
        for tensor in tensors:
            num_dimensions = len(tensor.shape)

            # Norms and biases are vectors. They are bound by memory, and their time is in the rates of a layer.
            if num_dimensions < 2:
                continue
            is_of_expert = num_dimensions == 3 and tensor.parameter_shape[0] == self._num_experts
            share = self._chosen_share if is_of_expert else 1.0
            num_active += tensor.num_parameters * share
        return num_active * 2 * self._setup.tokens

    def _attention_seconds(self) -> dict[Phase, float]:
        """Return the seconds of a layer's attention by phase, each for the FLOPs of one forward."""
        config = self._setup.config
        sequence = config.data.sequence_length
        width = head_width(self._text)

        # Without a mask attention is causal, and kernels skip the pairs above the diagonal.
        flops_per_pair = 4 if config.has_mask else 2
        flops_per_token = flops_per_pair * sequence * self._text.num_attention_heads * width
        flops = flops_per_token * self._setup.tokens

        seconds = {}
        for phase in Phase:
            # In uncompiled layers attention counts like a product.
            share = 1.0
            if self._setup.compiles:
                # If a CPU compiles, the plan takes the rates of a Hopper GPU.
                capability = self._setup.machine.capability or HOPPER
                share = estimate_efficiency(config.model.attention, width, sequence, phase, capability)
            seconds[phase] = flops / (self._flops_per_s * share)
        return seconds

    def _repeated_shares(self, unit: Unit) -> tuple[float, float]:
        """Return the shares of the forward's products and of its attention that the backward recomputes.

        The compiler saves first what spares most FLOPs for each byte. It counts 4 x sequence FLOPs for an element of
        attention, and 2 x hidden size for an element of a product. If it saves anything, it saves flex attention.
        """
        setup = self._setup
        share = setup.saved_share if self._activations[unit.name].keeps_graph else 0.0

        # Between the measured shares the value is interpolated.
        products = float(np.interp(share, REPEATED_AT, REPEATED))
        if keeps_attention(setup, unit):
            return products, 0.0
        if not share:
            return products, 1.0

        config = setup.config
        is_flex = config.model.attention == FLEX
        saves_attention_first = is_flex or 2 * config.data.sequence_length > hidden_width(setup.model)
        if setup.compiles and saves_attention_first:
            return products, 0.0
        return products, products

    def _with_tiles(self, unit: Unit, products: float, repeated: float) -> float:
        """Return the share of a unit's products that the backward recomputes, including those in tiles of tokens.

        Args:
            unit: a layer, or experts of one.
            products: FLOPs of all its products.
            repeated: the recomputed share of products outside of tiles.
        """
        if not (self._tiled and products):
            return repeated
        tiled = _select_named(unit.layout.tensors, self._tiled)
        share = self._flops(tiled) / products
        outside = (1 - share) * repeated

        # The backward recomputes each tile, and once more if an uncompiled forward runs again around the tiles.
        runs_again = not (self._setup.compiles or self._activations[unit.name].keeps_graph)
        return outside + share * (1 + repeated * runs_again)

    def _sum_seconds(self, unit: Unit) -> float:
        """Return the seconds that a group's tiles of tokens take to write and add up the gradients of their weights.

        Each tile writes a gradient for each of its weights. Then the gradient and the sum in fp32 are read, and the sum
        is written.
        """
        tile_tokens = self._setup.config.model.tile_tokens
        if tile_tokens is None:
            return 0.0
        trained = _select_named(unit.layout.trained.tensors, self._tiled)
        num_elements = sum(tensor.num_elements for tensor in trained)
        num_bytes = num_elements * (8 + 2 * unit.layout.schema.grad_width)

        # Each slice is cut into tiles separately, so its last tile may be short.
        slice_tokens = self._setup.tokens / self._slices
        num_tiles = self._slices * math.ceil(slice_tokens / tile_tokens)
        return num_tiles * num_bytes / self._memory_bytes_per_s

    def _rounding_seconds(self, unit: Unit, phase: Phase) -> float:
        """Return the seconds that rounding stacks of experts to FP8 takes.

        Only some tokens go to each expert, so rounding weighs more here than in linear layers, whose rate includes it.
        """
        num_elements = 0
        for tensor in _select_named(unit.layout.tensors, self._in_fp8):
            is_stack = len(tensor.shape) == 3
            if is_stack:
                num_elements += tensor.num_elements

        # Each slice rounds them again.
        num_bytes = self._slices * ROUNDED_BYTES[phase] * num_elements
        return num_bytes / self._memory_bytes_per_s

    def _adapting_seconds(self, unit: Unit) -> float:
        """Return the seconds that adapting the parameters of a unit takes, which is bound by GPU memory.

        PEFT computes each sum twice. Each time it reads the parameter and writes as many bytes.
        """
        adapted = _select_named(unit.layout.tensors, self._adapted)
        num_elements = sum(tensor.num_elements for tensor in adapted)

        # Two reads and two writes, in each slice.
        num_moved = self._slices * 4 * num_elements
        return num_moved * unit.layout.schema.grad_width / self._memory_bytes_per_s


def _select_named(tensors: Iterable[TensorSlice], names: Container[str]) -> list[TensorSlice]:
    """Return the tensors whose names are among `names`."""
    return [tensor for tensor in tensors if tensor.name in names]


def _experts(text: Any) -> tuple[int, float]:  # noqa: ANN401 - a config of any family
    """Return the number of a layer's experts and the share that one token is sent to; 0 and 1 without experts."""
    # Model families name this number differently.
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if num_experts := getattr(text, name, None):
            chosen = getattr(text, "num_experts_per_tok", None) or num_experts
            return num_experts, chosen / num_experts
    return 0, 1.0
