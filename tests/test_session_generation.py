"""Generation over a streamed model says once what each of its tokens moves, and this is what moves."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tiny_runs import exactness_config, one_thread, plain_model

import megatier
from megatier.config.schema import TiersConfig
from megatier.errors import mib


def generate(streamed: Any, tokens: int) -> None:
    prompt = torch.ones(2, 3, dtype=torch.long)
    with torch.no_grad(), one_thread():
        streamed.model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize("is_resident", [False, True])
def test_generation_says_once_whether_weights_are_resident_and_what_a_token_moves(
    is_resident: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tiers = TiersConfig(device="cpu", gpu=64 << 20 if is_resident else 256 << 10, ram=64 << 20, update_threads=2)
    options: dict[str, Any] = {"compute_dtype": "fp32", "fused_loss": False}
    caplog.set_level(logging.INFO, logger="megatier")
    with megatier.stream(plain_model(exactness_config("plain")), tiers=tiers, **options) as streamed:
        generate(streamed, 1)
        assert caplog.messages == [], "one forward reads the prompt, and none is of a token"
        moved = streamed._session.store.moved_bytes
        before = moved["ram_to_gpu"]
        generate(streamed, 5)
        per_token = (moved["ram_to_gpu"] - before) // 5
        generate(streamed, 5)

    (message,) = caplog.messages
    if is_resident:
        assert per_token == 0
        assert message == "generation: all weights are at home on the GPU, so a token moves none."
    else:
        assert per_token > 0
        assert message.startswith(f"generation streams: each token moves {mib(per_token)} of weights to the GPU, and")
        assert "reads 0 B from drives" in message
