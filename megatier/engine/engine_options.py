"""Defines the options of a model's forward and backward, which `session` takes from the config."""

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
    """Dtype in which the model is loaded, which its buffers follow. A unit's weights have the dtype of their schema."""
    device: torch.device
    """The device on which units compute."""
    activations: Mapping[str, Activations]
    """The policy of each unit."""
    groups: int = 1
    """Groups of a step, over all ranks."""
    slices: int = 1
    """Slices that a group is cut into."""
    fused_loss: bool = True
    """Compute head and loss as one node, if the model allows it."""
    loss_chunk: int = 1024
    """Tokens whose logits the fused loss computes at once."""
    tile_tokens: int | None = None
    """The most tokens on which norms, MLPs and experts of a layer work at once; None: on all of a slice."""
    compilation: Compilation | None = None
    """How to compile the units and the loss; None: not at all."""
    keeps_attention: bool = False
    """Keep attention's results until the backward, where an uncompiled forward is recomputed."""
    offloads_attention: bool = False
    """Offload these results as well, together with offloaded inputs."""
    fp8_products: Sequence[str] = ()
    """The names of the modules that multiply in FP8."""
    fp32_products: bool = False
    """Compute bf16 matrix products in fp32, for a CPU without bf16 instructions."""
    any_shape: bool = False
    """Whether each batch may have another size."""
    seed: int | None = None
    """Seed of the random numbers in a forward, from which each step and group gets its own. None: torch's generators
    are left alone, as user loops expect."""
    max_skips: int = 0
    """Consecutive steps that may be skipped because they are not finite (deferred mode). One more is an error."""
