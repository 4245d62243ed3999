"""Tells how fast attention's kernels are, and which is the fastest. Pure figures, never a stopwatch.

All kernels here give the same bits in every process. They were measured on an H200: causal, bf16, 32 query heads and 8
key heads of 64 or 128 elements. The free flash kernel, which `numerics.deterministic: false` allows, is slower than
flex attention as well (heads of 128: 173, 306 and 325 TFLOP/s for forward and backward at 1,024, 8,192 and 131,072
tokens). A whole layer with heads of 64 takes 4 % less with flex attention than with `sdpa` at 1,024 tokens, and 14 %
less at 8,192.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from megatier.tier import Phase

Capability = tuple[int, int]
"""What CUDA calls the compute capability of a GPU."""
SDPA = "sdpa"
FLEX = "flex_attention"

MEASURED: dict[int, dict[str, dict[Phase, tuple[tuple[int, float], ...]]]] = {
    64: {
        SDPA: {
            Phase.FORWARD: ((1_024, 182e12), (8_192, 282e12), (32_768, 318e12)),
            Phase.BACKWARD: ((1_024, 168e12), (8_192, 189e12), (32_768, 166e12)),
        },
        FLEX: {
            Phase.FORWARD: ((1_024, 163e12), (8_192, 333e12), (32_768, 402e12)),
            Phase.BACKWARD: ((1_024, 183e12), (8_192, 296e12), (32_768, 337e12)),
        },
    },
    128: {
        SDPA: {
            Phase.FORWARD: ((1_024, 243e12), (8_192, 338e12), (131_072, 341e12)),
            Phase.BACKWARD: ((1_024, 173e12), (8_192, 272e12), (131_072, 185e12)),
        },
        FLEX: {
            Phase.FORWARD: ((1_024, 280e12), (8_192, 406e12), (131_072, 409e12)),
            Phase.BACKWARD: ((1_024, 209e12), (8_192, 367e12), (131_072, 385e12)),
        },
    },
}
"""FLOPs a second by elements of a head, kernel and phase, at some tokens of a sequence. `sdpa` is the deterministic
flash kernel. Heads of 64 at 32,768 tokens were measured on an H100, which was within 4 % of the H200 at 8,192."""
PRODUCT_FLOPS_PER_S = 590e12
"""FLOPs a second of the products of a layer on the same GPU."""
HOPPER = (9, 0)
"""Compute capability of the GPUs on which the kernels were measured."""
OTHERS_TIMES = 1.8
"""How many times as large on other GPUs the share is that the flash kernel has of the rate of products, which it never
passes. The kernel was written for the instructions of an A100. There its forward reaches 73 % of the data sheet's
FLOPs (FlashAttention-2, arXiv 2307.08691), and products reach about 70 %. On the H200 these are 34 and 60 %."""
TOKENS_FROM = 1_024
"""Tokens of the shortest sequence with which they were measured."""
BACKWARD = 2.5
"""FLOPs of attention's backward over those of its forward: five products instead of two."""
REPEATED_KEYS_FROM = 4_096
"""Tokens from which on flex attention also wins where Hugging Face repeats keys and values for it. That moves about 10
hidden sizes a token, 27 ns at 4,096 elements and 3 TB/s. Flex attention saves 28 ns a token at 1,024, and more than 100
at 4,096."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """The attention of a run, as far as the choice of its kernel depends on it."""

    capability: Capability | None
    """Compute capability of the GPU; None: a CPU computes."""
    tokens: int
    """Tokens of a sequence."""
    head_size: int
    """Elements of a head."""
    repeats_keys: bool
    """Whether Hugging Face repeats keys and values for flex attention: if several query heads share a key head, and the
    number of query heads is no power of two."""
    compiles: bool
    """Whether layers are compiled."""
    is_bf16: bool
    """Whether it computes in bf16."""
    cuts_documents: bool
    """Whether a group of documents that are apart is cut into slices."""
    unsupported: str | None
    """Why the model cannot take flex attention, or has never been measured with it; None: it can."""


def choose_attention(attention: Attention) -> tuple[str, str]:
    """Return the fastest repeatable kernel for a run, and why it is not flex attention; empty if it is, or on a CPU."""
    # Flex attention has no backward on a CPU, so there is nothing to choose and no reason to tell.
    if attention.capability is None:
        return SDPA, ""

    reasons = {
        f"this GPU has compute capability {'.'.join(map(str, attention.capability))}, and the kernels were measured on "
        "9.0 alone": attention.capability != HOPPER,
        attention.unsupported: attention.unsupported is not None,
        "layers are not compiled": not attention.compiles,
        "it computes in fp32": not attention.is_bf16,
        f"heads have {attention.head_size} elements, and the kernels were measured with "
        f"{' and '.join(map(str, MEASURED))} alone": attention.head_size not in MEASURED,
        f"sequences of {attention.tokens} tokens are shorter than those that were measured": (
            attention.tokens < TOKENS_FROM
        ),
        "a mask by blocks cannot be cut into slices": attention.cuts_documents,
        f"keys would be repeated, which only pays from {REPEATED_KEYS_FROM:,} tokens on": (
            attention.repeats_keys and attention.tokens < REPEATED_KEYS_FROM
        ),
        "it is slower at this length": (_seconds_per_flop(FLEX, attention) > _seconds_per_flop(SDPA, attention)),
    }
    why = next((reason for reason, holds in reasons.items() if holds), None)
    return (FLEX, "") if why is None else (SDPA, str(why))


def estimate_efficiency(
    kernel: str, head_size: int, tokens: int, phase: Phase, capability: Capability = HOPPER
) -> float:
    """Return the FLOPs a second of a kernel over those of products on the same GPU.

    Of heads of other sizes, and of lengths beyond those that were measured, the nearest counts. In between the rate
    goes with the logarithm of the length. `eager` and other kernels count as `sdpa`, and on GPUs other than Hopper's,
    where nobody measured them, all kernels do (`OTHERS_TIMES`).

    Args:
        kernel: as in `model.attention`.
        head_size: elements of a head.
        tokens: tokens of a sequence.
        phase: forward or backward.
        capability: compute capability of the GPU.
    """
    if capability != HOPPER:
        return min(1.0, OTHERS_TIMES * estimate_efficiency(SDPA, head_size, tokens, phase))

    # A plan needs some figure for every model, so it takes sizes that `choose_attention` refuses because they were not
    # measured.
    nearest = min(MEASURED, key=lambda size: abs(size - head_size))
    kernels = MEASURED[nearest]
    points = kernels.get(kernel, kernels[SDPA])[phase]
    shortest, first_rate = points[0]
    if tokens <= shortest:
        return first_rate / PRODUCT_FLOPS_PER_S

    # Lengths that were measured are multiples of each other, so in between the logarithm counts.
    for (low, low_rate), (high, high_rate) in pairwise(points):
        if tokens <= high:
            share = math.log(tokens / low) / math.log(high / low)
            rate = low_rate + share * (high_rate - low_rate)
            return rate / PRODUCT_FLOPS_PER_S
    _, last_rate = points[-1]
    return last_rate / PRODUCT_FLOPS_PER_S


def _seconds_per_flop(kernel: str, attention: Attention) -> float:
    """Return the seconds of forward and backward for each FLOP of the forward, on the GPU that was measured."""
    forward, backward = (estimate_efficiency(kernel, attention.head_size, attention.tokens, phase) for phase in Phase)
    return (1 / forward + BACKWARD / backward) / PRODUCT_FLOPS_PER_S
