"""Generation over a streamed model says once what each of its tokens moves, and this is what moves."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tiny_runs import exactness_config, plain_model

import megatier
from megatier.byte_counts import format_bytes
from megatier.config.schema import TiersConfig


def generate(streamed: Any, tokens: int) -> None:
    prompt = torch.ones(2, 3, dtype=torch.long, device=streamed.device)
    with torch.no_grad():
        streamed.model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize(
    ("gpu", "limit", "way", "device"),
    [
        (64 << 20, None, "at home", "cpu"),
        (256 << 10, None, "streams", "cpu"),
        (256 << 10, 360 << 10, "streams", "cpu"),
        (256 << 10, 16 << 20, "held", "cpu"),
        pytest.param(64 << 20, None, "at home", "cuda", marks=pytest.mark.gpu),
        pytest.param(256 << 10, None, "held", "cuda", marks=pytest.mark.gpu),
    ],
)
def test_generation_says_once_whether_weights_are_resident_and_what_a_token_moves(
    gpu: int, limit: int | None, way: str, device: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tiers = TiersConfig(device=device, gpu=gpu, gpu_limit=limit, ram=64 << 20, update_threads=2)
    options: dict[str, Any] = {"compute_dtype": "fp32", "fused_loss": False, "compile": False}
    caplog.set_level(logging.INFO, logger="megatier")
    with megatier.stream(plain_model(exactness_config("plain")), tiers=tiers, **options) as streamed:
        generate(streamed, 2)
        assert caplog.messages == [], "two forwards read the prompt, and take what is held"
        moved = streamed._session.store.moved_bytes
        generate(streamed, 5)
        generate(streamed, 5)

        # A longer text moves what its further tokens move.
        before = moved["ram_to_gpu"]
        generate(streamed, 5)
        of_five = moved["ram_to_gpu"] - before
        generate(streamed, 9)
        per_token = (moved["ram_to_gpu"] - before - 2 * of_five) // 4

    (message,) = caplog.messages
    if way == "streams":
        assert per_token > 0
        assert message.startswith(
            f"generation streams: each token moves {format_bytes(per_token)} of weights to the GPU, and"
        )
        assert "reads 0 B from drives" in message
        assert ("holds 0 B more" in message) == (limit is None)
        return
    assert per_token == 0
    if way == "at home":
        assert message == "generation: all weights are at home on the GPU, so a token moves none."
    else:
        assert message.startswith("generation: all weights are resident on the GPU, so a token moves none.")
        assert f"Its free memory holds those that are not at home there, {format_bytes(of_five // 2)}," in message
