"""The rule by which attention's kernel is chosen, and the figures behind it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatier.setup.attention_rule import (
    FLEX,
    HOPPER,
    MEASURED,
    OTHERS_TIMES,
    PRODUCT_FLOPS_PER_S,
    SDPA,
    TOKENS_FROM,
    Attention,
    choose_attention,
    estimate_efficiency,
)
from megatier.tier import Phase

LLAMA = Attention(
    capability=HOPPER,
    tokens=8192,
    head_size=128,
    repeats_keys=False,
    compiles=True,
    is_bf16=True,
    cuts_documents=False,
    unsupported=None,
)


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("tokens", [1024, 2048, 8192, 131_072, 1 << 20])
def test_kernel_of_a_measured_gpu_is_flex_attention_at_every_measured_length(head_size: int, tokens: int) -> None:
    assert choose_attention(replace(LLAMA, head_size=head_size, tokens=tokens)) == (FLEX, "")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"capability": (8, 0)}, "compute capability 8.0"),
        ({"tokens": 512}, "sequences of 512 tokens are shorter"),
        ({"head_size": 80}, "heads have 80 elements, and the kernels were measured with 64 and 128 alone"),
        ({"compiles": False}, "layers are not compiled"),
        ({"is_bf16": False}, "fp32"),
        ({"cuts_documents": True}, "cannot be cut into slices"),
        ({"repeats_keys": True, "tokens": 2048}, "keys would be repeated"),
        ({"unsupported": "scores are capped"}, "scores are capped"),
    ],
)
def test_kernel_is_sdpa_with_the_reason_where_flex_attention_was_not_measured(
    changes: dict[str, Any], why: str
) -> None:
    kernel, reason = choose_attention(replace(LLAMA, **changes))
    assert kernel == SDPA
    assert why in reason


def test_kernel_of_a_cpu_is_sdpa_without_a_word() -> None:
    assert choose_attention(replace(LLAMA, capability=None)) == (SDPA, "")


def test_kernel_that_repeats_keys_is_flex_attention_for_long_sequences() -> None:
    assert choose_attention(replace(LLAMA, repeats_keys=True, tokens=4096)) == (FLEX, "")


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("kernel", [SDPA, FLEX])
@pytest.mark.parametrize("phase", Phase)
def test_efficiency_is_that_of_measured_lengths_and_lies_in_between(head_size: int, kernel: str, phase: Phase) -> None:
    points = MEASURED[head_size][kernel][phase]
    found = {
        tokens: estimate_efficiency(kernel, head_size, tokens, phase) for tokens in (16, 1024, 3000, 8192, 1 << 24)
    }
    assert [estimate_efficiency(kernel, head_size, tokens, phase) for tokens, _ in points] == [
        rate / PRODUCT_FLOPS_PER_S for _, rate in points
    ]
    assert found[16] == found[1024]
    assert found[1 << 24] == points[-1][1] / PRODUCT_FLOPS_PER_S
    assert found[1024] < found[3000] < found[8192]


@pytest.mark.parametrize(("head_size", "nearest"), [(16, 64), (80, 64), (112, 128), (256, 128)])
def test_efficiency_of_heads_that_were_not_measured_is_that_of_the_nearest(head_size: int, nearest: int) -> None:
    assert estimate_efficiency(FLEX, head_size, 8192, Phase.FORWARD) == estimate_efficiency(
        FLEX, nearest, 8192, Phase.FORWARD
    )


@pytest.mark.parametrize("kernel", [SDPA, FLEX])
@pytest.mark.parametrize("phase", Phase)
def test_efficiency_on_other_gpus_is_larger_than_on_hopper_and_below_that_of_products(
    kernel: str, phase: Phase
) -> None:
    measured = estimate_efficiency(SDPA, 128, 8192, phase)
    assert estimate_efficiency(kernel, 128, 8192, phase, (8, 9)) == min(1.0, OTHERS_TIMES * measured) > measured
    assert estimate_efficiency(kernel, 128, 8192, phase, (9, 0)) == estimate_efficiency(kernel, 128, 8192, phase)


def test_lengths_that_were_measured_begin_where_the_rule_does() -> None:
    begins = {
        points[0][0] for kernels in MEASURED.values() for phases in kernels.values() for points in phases.values()
    }
    assert begins == {TOKENS_FROM}
