"""Says how a model computes, as far as it can be chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatier.compute.compilation import Compilation
from megatier.tier import Activations


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Numeric choices and policies."""

    dtype: torch.dtype
    """Dtype in which the model is loaded; its buffers follow it. The weights of a unit have that of their schema."""
    device: torch.device
    """The device on which units compute."""
    activations: Mapping[str, Activations]
    """The policy of each unit."""
    groups: int = 1
    """Groups of a step, over all ranks."""
    slices: int = 1
    """Slices that a group is cut into."""
    fused_loss: bool = True
    """Take head and loss as one node, if the model allows it."""
    loss_chunk: int = 1024
    """Tokens whose logits the fused loss makes at once."""
    tile_tokens: int | None = None
    """The most tokens on which norms, MLPs and experts of a layer work at once; None: on all of a slice."""
    compilation: Compilation | None = None
    """How to compile the units and the loss; None: not at all."""
    keeps_attention: bool = False
    """Keep what attention gave until the backward, where the rest of an uncompiled forward is made again."""
    offloads_attention: bool = False
    """Take that off the GPU too, with inputs that are offloaded."""
    fp8_products: Sequence[str] = ()
    """The names of the modules that take their products in FP8."""
    fp32_products: bool = False
    """Take bf16 products in fp32, for a CPU without bf16 instructions."""
    any_shape: bool = False
    """Whether each batch may have another size."""
    seed: int | None = None
    """Seed of the random numbers that a forward draws, for each step and group its own; None: torch's generators go on
    as they are, as loops of others expect."""
    max_skips: int = 0
    """Steps in a row that may be left out because they are not finite (deferred mode); one more is an error."""
