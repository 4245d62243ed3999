"""The benchmark of attention's kernels: which options it tries, and which of them it takes for a whole layer."""

from __future__ import annotations

from typing import Any

from bench_attention_kernels import PAIRS, best_options

FLEX = {"kernel": "flex_attention", "tokens": 128}


def test_options_tiles_divide_the_blocks_of_a_mask() -> None:
    options = {name: value for pair in PAIRS for half in pair for name, value in half.items() if "BLOCK_" in name}
    assert len(options) == 6
    assert all(128 % value == 0 for value in options.values())


def test_options_backward_tiles_divide_each_other() -> None:
    for _, backward in PAIRS:
        sizes: dict[str, Any] = {"bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64} | backward
        assert sizes["bwd_BLOCK_N1"] % sizes["bwd_BLOCK_M1"] == 0


def test_best_options_of_a_length_are_the_fastest_of_both_ways() -> None:
    rows: list[dict[str, Any]] = [
        FLEX | {"forward_s": 3.0, "backward_s": 9.0, "options": {}},
        FLEX | {"forward_s": 1.0, "backward_s": 9.5, "options": {"fwd_a": 1, "bwd_a": 1}},
        FLEX | {"forward_s": 2.0, "backward_s": 8.0, "options": {"fwd_b": 1, "bwd_b": 1}},
        FLEX | {"error": "does not fit", "options": {"fwd_c": 1}},
        FLEX | {"tokens": 256, "forward_s": 0.1, "backward_s": 0.1, "options": {"fwd_d": 1, "bwd_d": 1}},
        FLEX | {"kernel": "sdpa", "forward_s": 0.1, "backward_s": 0.1, "options": {}},
    ]
    assert best_options(rows, 128) == {"fwd_a": 1, "bwd_b": 1}
    assert best_options(rows, 512) == {}
