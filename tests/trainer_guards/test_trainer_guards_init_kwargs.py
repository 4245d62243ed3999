"""What `model_init_kwargs` ask of `megatier.stream`, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatier.errors import ConfigError
from megatier.trainer_guards.init_kwargs import read_init_kwargs


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"dtype": None, "attn_implementation": None, "anything": None}, {}),
        ({"dtype": "auto", "use_cache": True, "revision": "main", "trust_remote_code": False}, {}),
        ({"dtype": torch.bfloat16, "attn_implementation": "eager"}, {"compute_dtype": "bf16", "attention": "eager"}),
        ({"torch_dtype": "float32"}, {"compute_dtype": "fp32"}),
    ],
)
def test_init_kwargs_are_arguments_of_stream(given: dict[str, Any], found: dict[str, Any]) -> None:
    assert read_init_kwargs(given, {"tile_tokens": 8}) == found


@pytest.mark.parametrize(
    "given", [{"dtype": "float16"}, {"revision": "v2"}, {"trust_remote_code": True}, {"use_kernels": True}, {"x": 1}]
)
def test_init_kwargs_that_cannot_be_followed_are_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"model_init_kwargs has {next(iter(given))} "):
        read_init_kwargs(given, {})


def test_init_kwargs_that_stream_kwargs_contradict_are_refused() -> None:
    with pytest.raises(ConfigError, match="stream_kwargs has compute_dtype 'bf16', and model_init_kwargs 'fp32'"):
        read_init_kwargs({"dtype": "float32"}, {"compute_dtype": "bf16"})
