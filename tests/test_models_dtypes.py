"""Buffers and parameters compute in the dtype that `from_pretrained` gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_gradients import attention_of, padded_batch, streamed_gradients
from tiny_models import BASE, FAMILIES, known_config, tiny_config
from tiny_runs import ModelWeights, plain_model
from transformers import PretrainedConfig

from megatier.models.decoder import build_skeleton
from megatier.models.dtypes import buffer_dtypes

OTHERS: dict[str, dict[str, Any]] = {
    "minimax": {
        **BASE,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "block_size": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "xglm": {
        "vocab_size": 160,
        "d_model": 64,
        "ffn_dim": 96,
        "num_layers": 4,
        "attention_heads": 4,
        "max_position_embeddings": 128,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "layerdrop": 0.0,
    },
    "ernie4_5_moe": {**BASE, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1},
    "inkling2_text": {
        **BASE,
        "moe_intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "falcon_mamba": {"vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
}


def config_of(model_type: str) -> PretrainedConfig:
    if model_type in FAMILIES:
        return tiny_config(model_type)
    return known_config(model_type, **OTHERS[model_type])


@pytest.mark.parametrize("model_type", ["gemma2", "gemma4_text", "deepseek_v3", "glm4_moe", "minimax_m2", *OTHERS])
def test_buffers_have_the_dtypes_of_a_model_that_is_loaded_in_bf16(model_type: str, tmp_path: Path) -> None:
    config = config_of(model_type)
    plain = plain_model(config, attention_of(config))
    plain.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path, dtype=torch.bfloat16)
    expected = {name: buffer.dtype for name, buffer in loaded.named_buffers(remove_duplicate=False)}
    skeleton = build_skeleton(config, "sdpa")
    assert buffer_dtypes(skeleton, torch.bfloat16) == expected
    in_fp32 = {name: buffer.dtype for name, buffer in skeleton.named_buffers(remove_duplicate=False)}
    assert buffer_dtypes(skeleton, torch.float32) == in_fp32


@pytest.mark.parametrize("model_type", ["minimax", "xglm"])
def test_model_whose_buffers_are_in_bf16_has_the_gradients_of_the_plain_one(model_type: str, tmp_path: Path) -> None:
    config = config_of(model_type)
    source = plain_model(config, attention_of(config))
    source.save_pretrained(tmp_path / "model")
    plain = type(source).from_pretrained(tmp_path / "model", dtype=torch.bfloat16).train()
    loss = plain(**padded_batch(), use_cache=False).loss
    loss.backward()
    found_loss, found = streamed_gradients(config, tmp_path, ModelWeights(plain), compute_dtype="bf16")
    assert found_loss == loss.item()
    expected = {name: parameter.grad.float() for name, parameter in plain.named_parameters()}
    assert [name for name, grad in expected.items() if not torch.equal(found[name], grad)] == []


@pytest.mark.parametrize("model_type", ["ernie4_5_moe", "inkling2_text"])
def test_model_with_parameters_in_fp32_has_the_gradients_of_the_plain_one(model_type: str, tmp_path: Path) -> None:
    """Where these hold values of bf16, which is what compute copies have. Their gradients are rounded to it once."""
    config = config_of(model_type)
    source = plain_model(config, attention_of(config))
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.copy_(parameter.bfloat16())
    source.save_pretrained(tmp_path / "model")
    plain = type(source).from_pretrained(tmp_path / "model", dtype=torch.bfloat16).train()
    assert {parameter.dtype for parameter in plain.parameters()} == {torch.bfloat16, torch.float32}
    loss = plain(**padded_batch(), use_cache=False).loss
    loss.backward()
    found_loss, found = streamed_gradients(config, tmp_path, ModelWeights(plain), compute_dtype="bf16")
    assert found_loss == loss.item()
    grads = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}
    expected = {name: grad.bfloat16().float() for name, grad in grads.items()}
    others = {name for name, grad in expected.items() if not torch.equal(found[name], grad)}
    # Inkling 2 hands its embeddings to every layer, whose gradients are added up in another order.
    assert others <= {"model.embed_tokens.weight", "model.embed_tokens.embed_norm.weight"}
    assert all((found[name] - expected[name]).norm() < 0.01 * expected[name].norm() for name in others)
