"""Experts that are units of their own: every family with fused experts, against its plain model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_families import NO_DROPOUT, attention_of, far, plain_gradients, streamed_gradients
from tiny_models import tiny_config
from tiny_runs import one_thread

FUSED = [
    "qwen3_moe",
    "qwen2_moe",
    "mixtral",
    "olmoe",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "qwen3_next",
    "minimax_m2",
]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize("family", FUSED)
def test_family_in_parts_has_the_gradients_of_the_plain_model(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    loss, expected, source = plain_gradients(config, attention_of(config))
    for parts in (2, 3):
      for activations in ("keep", "recompute", "offload"):
        found_loss, found = streamed_gradients(config, tmp_path, source, activations, expert_parts=parts)
        d = {name: float((found[name] - g).norm() / g.norm().clamp(min=1e-30)) for name, g in expected.items()}
        print(family, parts, activations, found_loss-loss, max(d.values()), sum(v==0 for v in d.values()), len(d))
