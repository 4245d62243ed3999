"""GPU memory beside the arena: what a step's activations, its loss and libraries take. A model of it, not a count.

In hidden sizes a token, c = (outputs of a layer's products) / hidden + 1.4 is what a compiled layer saves at a saved
share of 0.8. The peak is at the loss, when all layers have saved theirs, or in the backward, where one layer repeats
what it did not save (a frozen layer is counted as if it were trained; one with nothing trained below it saves nothing):

    at the loss      saved + 4 x chunk x vocabulary + 4 x head parameters + 2 boundaries
    in the backward  saved + 2.3 c of one slice + 4 boundaries

and, where documents are apart, a mask of one byte a pair of tokens, which a layer's attention has in the compute dtype
as well. Not for flex_attention, whose mask is by blocks.

Fitted to nine runs of two Llama shapes on a GPU, with which tests/test_planner_memory.py compares it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel

from megatier.config.schema import RunConfig
from megatier.models.decoder import Unit
from megatier.session.workload import COMPUTE_DTYPES, Workload, boundary_width, hidden_width

CONTEXT_BYTES = 1_000_000_000
"""What the driver and libraries hold."""
BESIDE_PRODUCTS = 1.4
"""Hidden sizes a token that a layer saves beside the outputs of its products."""
SAVED = ((0.0, 0.0), (0.1, 0.21), (0.15, 0.27), (0.3, 0.48), (0.6, 0.83), (0.8, 1.0), (1.0, 1.43))
"""Saved share, and what is then saved over what is saved at 0.8, measured; but always the input."""
REPEATED = 2.3
"""What one layer's backward holds while it repeats its forward, over what the layer saves at 0.8."""
INPUTS_CUT = 4
"""Boundary activations that a layer saves at least whose experts are units: inputs of both norms, of the attention and
of the experts."""
BOUNDARIES = {"loss": 2, "backward": 4}
"""Boundary activations under way, with their gradients."""


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """What a step takes at its two peaks, in bytes."""

    saved: float
    """By all layers, from the forward to the backward."""
    at_loss: float
    in_backward: float

    @property
    def peak(self) -> float:
        """The larger one, with the context."""
        return max(self.at_loss, self.in_backward) + CONTEXT_BYTES


def activation_bytes(model: PreTrainedModel, config: RunConfig, work: Workload, *, compiles: bool) -> ActivationBytes:
    """Estimate what a run needs beside its arena.

    Args:
        model: its skeleton.
        config: its settings.
        work: its units.
        compiles: whether layers are compiled.
    """
    text = model.config.get_text_config()
    item = COMPUTE_DTYPES[config.model.compute_dtype].itemsize
    width = boundary_width(model)
    boundary = work.rows * config.data.sequence_length * width * item
    layers = [unit for unit in work.units if _is_of_layer(unit)]
    lowest = next((i for i, unit in enumerate(work.units) if unit.layout.num_trained), 0)
    reached = [unit for unit in work.units[lowest:] if _is_of_layer(unit)]  # below, nothing waits for a backward
    saved = sum(_saved(unit, width, config, work, compiles) for unit in reached) * boundary
    largest = max((_products(unit, width) for unit in layers), default=0.0)
    chunk = config.model.loss_chunk if config.model.fused_loss else work.rows * config.data.sequence_length
    logits = 2 * item * min(chunk, work.rows * config.data.sequence_length) * text.vocab_size
    head = model.get_output_embeddings()
    makes_sum = config.model.fused_loss and (head is None or head.weight.requires_grad)
    head_sum = 4 * text.vocab_size * hidden_width(model) if makes_sum else 0
    mask = mask_bytes(config, work)
    in_layer = REPEATED * largest * boundary + item * mask
    return ActivationBytes(
        saved,
        saved + logits + head_sum + BOUNDARIES["loss"] * boundary + mask,
        saved + in_layer / config.train.slices + BOUNDARIES["backward"] * boundary + mask,
    )


def mask_bytes(config: RunConfig, work: Workload) -> int:
    """Of a group's mask where documents are apart: a byte a pair of tokens; 0 where it is by blocks."""
    return work.rows * config.data.sequence_length**2 if config.has_mask else 0


def _is_of_layer(unit: Unit) -> bool:
    """Whether it is one, or the experts of one."""
    return unit.is_layer or unit.experts is not None


def _saved(unit: Unit, width: int, config: RunConfig, work: Workload, compiles: bool) -> float:
    """Boundary activations' worth that a layer saves, or its part."""
    policy = work.activations[unit.name]
    if policy.offloads_input:
        return 0.0
    inputs = 0.0 if unit.experts is not None else 1.0 if len(unit.module_names) == 1 else INPUTS_CUT
    share = config.model.saved_share if compiles else 1.0
    if not policy.keeps_graph or not share:
        return inputs
    return max(inputs, interpolated(SAVED, share) * _products(unit, width))


def interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """The value of a broken line through points, the first and last of which hold beyond them."""
    xs, ys = zip(*points, strict=True)
    return float(np.interp(at, xs, ys))


def _products(unit: Unit, width: int) -> float:
    """Outputs of a layer's products, in boundary widths; of experts as if a token went to one, of a part its share."""
    rows = [
        tensor.shape[-2] * tensor.num_elements / math.prod(tensor.parameter_shape)
        for tensor in unit.layout.tensors
        if len(tensor.shape) >= 2
    ]
    return sum(rows) / width + (BESIDE_PRODUCTS if unit.experts is None else 0.0)
