"""The rule by which attention's kernel is chosen, and the figures behind it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatier.session.attention_rule import FLEX, HOPPER, MEASURED, SDPA, Attention, chosen, efficiency
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


@pytest.mark.parametrize("tokens", [1024, 2048, 8192, 131_072, 1 << 20])
def test_kernel_of_a_measured_gpu_is_flex_attention_at_every_measured_length(tokens: int) -> None:
    assert chosen(replace(LLAMA, tokens=tokens)) == (FLEX, "")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"capability": (8, 0)}, "compute capability 8.0"),
        ({"tokens": 512}, "sequences of 512 tokens are shorter"),
        ({"head_size": 64}, "heads have 64 elements"),
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
    kernel, reason = chosen(replace(LLAMA, **changes))
    assert kernel == SDPA
    assert why in reason


def test_kernel_of_a_cpu_is_sdpa_without_a_word() -> None:
    assert chosen(replace(LLAMA, capability=None)) == (SDPA, "")


def test_kernel_that_repeats_keys_is_flex_attention_for_long_sequences() -> None:
    assert chosen(replace(LLAMA, repeats_keys=True, tokens=4096)) == (FLEX, "")


@pytest.mark.parametrize("kernel", [SDPA, FLEX])
@pytest.mark.parametrize("phase", Phase)
def test_efficiency_is_that_of_measured_lengths_and_lies_in_between(kernel: str, phase: Phase) -> None:
    points = MEASURED[kernel][phase]
    assert [round(efficiency(kernel, tokens, phase) * 590) for tokens, _ in points] == [r / 1e12 for _, r in points]
    assert efficiency(kernel, 16, phase) == efficiency(kernel, 1024, phase)
    assert efficiency(kernel, 1 << 24, phase) == efficiency(kernel, 131_072, phase)
    low, high = sorted(efficiency(kernel, tokens, phase) for tokens in (1024, 8192))
    assert low < efficiency(kernel, 3000, phase) < high
