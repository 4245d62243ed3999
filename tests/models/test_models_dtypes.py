"""Buffers and parameters compute in the dtype that `from_pretrained` gives them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_gradients import attention_of, padded_batch, streamed_gradients
from tiny_models import BASE, FAMILIES, IN_FP32, IS_OLD, known_config, tiny_config
from tiny_runs import ModelWeights, plain_model
from transformers import PretrainedConfig

from megatier.errors import UnsupportedModelError
from megatier.models.decoder import build_skeleton, find_units
from megatier.models.dtypes import IN_FP32 as IN_FP32_UNIT
from megatier.models.dtypes import VECTORS, buffer_dtypes, with_schemas
from megatier.models.expert_units import cut_units, places_of
from megatier.models.frozen_parameters import freeze
from megatier.state import ADAMW, ADAMW_BF16, ADAMW_FP32, MUON

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
    "falcon_mamba": {"vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    **IN_FP32,
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


@pytest.mark.parametrize("model_type", [*IN_FP32, "deepseek_v4", "hy_v4"])
def test_model_with_parameters_in_fp32_has_the_gradients_of_the_plain_one(model_type: str, tmp_path: Path) -> None:
    config = config_of(model_type)
    source = plain_model(config, attention_of(config))
    source.save_pretrained(tmp_path / "model")
    plain = type(source).from_pretrained(tmp_path / "model", dtype=torch.bfloat16).train()
    assert {parameter.dtype for parameter in plain.parameters()} == {torch.bfloat16, torch.float32}
    try:
        loss = plain(**padded_batch(), use_cache=False).loss
    except RuntimeError as error:
        if IS_OLD and "same dtype" in str(error):
            pytest.skip("this transformers multiplies parameters in fp32 by activations in bf16")
        raise
    loss.backward()
    found_loss, found = streamed_gradients(config, tmp_path, ModelWeights(plain), compute_dtype="bf16")
    assert found_loss == loss.item()
    expected = {name: p.grad.float() for name, p in plain.named_parameters() if p.grad is not None}
    others = {name for name, grad in expected.items() if not torch.equal(found[name], grad)}
    # Inkling 2 hands its embeddings to every layer, whose gradients are added up in another order.
    assert others <= {"model.embed_tokens.weight", "model.embed_tokens.embed_norm.weight"}
    assert all((found[name] - expected[name]).norm() < 0.01 * expected[name].norm() for name in others)


def test_parameters_in_fp32_inside_of_bf16_units_are_one_unit_that_the_decoder_lends() -> None:
    model = build_skeleton(config_of("ernie4_5_moe"), "sdpa")
    found = with_schemas(model, find_units(model), "bf16")
    gates = [f"model.layers.{layer}.mlp.gate" for layer in (1, 2, 3)]
    names = [name for gate in gates for name in (f"{gate}.weight", f"{gate}.moe_statics.e_score_correction_bias")]
    first, *others = found
    assert (first.name, first.module_names, first.is_lent) == (IN_FP32_UNIT, ("model",), True)
    assert {tensor.name for tensor in first.layout.tensors} == set(names)
    assert first.layout.frozen == set(names[1::2])
    assert first.layout.schema is ADAMW_FP32
    assert [unit.name for unit in others] == [unit.name for unit in find_units(model)]
    assert {unit.layout.schema for unit in others} == {ADAMW_BF16}
    assert places_of(found).keys() == dict(model.named_parameters()).keys()


@pytest.mark.skipif("hy_v4" not in FAMILIES, reason="this transformers has no hy_v4")
def test_unit_of_which_all_stays_in_fp32_is_not_lent() -> None:
    """The head of Hy-V4 would be too large for that."""
    model = build_skeleton(config_of("hy_v4"), "sdpa")
    found = {unit.name: unit for unit in with_schemas(model, find_units(model), "bf16")}
    wide = {name for name, unit in found.items() if unit.layout.schema is ADAMW_FP32}
    assert wide == {IN_FP32_UNIT, "model.hc_head", "lm_head"}
    assert [name for name, unit in found.items() if unit.is_lent] == [IN_FP32_UNIT]


@pytest.mark.parametrize("parts", [1, 2])
def test_parameters_in_fp32_of_a_single_layer_are_lent_by_the_module_around_it(parts: int) -> None:
    options = {**IN_FP32["ernie4_5_moe"], "moe_layer_start_index": 3}
    model = build_skeleton(known_config("ernie4_5_moe", **options), "sdpa")
    [lent] = [unit for unit in with_schemas(model, cut_units(model, parts), "bf16") if unit.is_lent]
    assert lent.module_names == ("model" if parts == 1 else "model.layers.3",)


@pytest.mark.parametrize(("model_type", "compute_dtype"), [("ernie4_5_moe", "fp32"), ("qwen3_moe", "bf16")])
def test_units_without_parameters_of_another_dtype_stay_as_they_are(model_type: str, compute_dtype: str) -> None:
    model = build_skeleton(config_of(model_type), "sdpa")
    units = cut_units(model, 2)
    for moments in ("fp32", "bf16"):
        wanted = ADAMW[compute_dtype, moments]
        expected = [replace(unit, layout=replace(unit.layout, schema=wanted)) for unit in units]
        assert list(with_schemas(model, units, compute_dtype, moments)) == expected


def test_parts_of_experts_of_which_some_parameters_are_in_fp32_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_skeleton(config_of("qwen3_moe"), "sdpa")
    monkeypatch.setattr(model, "_keep_in_fp32_modules_strict", {"down_proj"})
    assert any(unit.is_lent for unit in with_schemas(model, cut_units(model, 1), "bf16"))
    with pytest.raises(UnsupportedModelError, match=r"experts\[0:4\] stay in fp32, .* Set model.expert_parts to 1"):
        with_schemas(model, cut_units(model, 2), "bf16")


@pytest.mark.parametrize(("model_type", "parts"), [("qwen3_moe", 1), ("qwen3_moe", 2), ("ernie4_5_moe", 1)])
@pytest.mark.parametrize("compute_dtype", ["bf16", "fp32"])
def test_muon_trains_matrices_and_stacks_of_experts_in_layers(model_type: str, parts: int, compute_dtype: str) -> None:
    model = build_skeleton(config_of(model_type), "sdpa")
    found = with_schemas(model, cut_units(model, parts), compute_dtype, "bf16", "muon")
    muon = MUON[compute_dtype]
    assert {unit.layout.schema for unit in found if unit.is_layer or unit.experts is not None} == {muon}
    trained = {tensor.name for unit in found if unit.layout.schema is muon for tensor in unit.layout.trained.tensors}
    # Routers of ERNIE stay in fp32 beside bf16, and their optimizer must not depend on the compute dtype.
    assert trained == {
        name
        for name, parameter in model.named_parameters()
        if name.startswith("model.layers.") and parameter.dim() > 1 and not (model_type[0] == "e" and ".gate." in name)
    }
    assert places_of(found).keys() == dict(model.named_parameters()).keys()
    [vectors] = [unit for unit in found if unit.name == VECTORS]
    assert vectors.is_lent
    assert vectors.layout.schema is ADAMW[compute_dtype, "bf16"]
    assert "model.layers.0.input_layernorm.weight" in {tensor.name for tensor in vectors.layout.tensors}


def test_muon_leaves_vectors_that_are_frozen_where_they_are() -> None:
    model = build_skeleton(config_of("qwen3_moe"), "sdpa")
    freeze(model, ("*norm*",))
    units = find_units(model)
    found = with_schemas(model, units, "bf16", "fp32", "muon")
    assert [unit.name for unit in found] == [unit.name for unit in units]
    assert {unit.layout.schema for unit in found if unit.is_layer} == {MUON["bf16"]}


def test_muon_trains_no_matrix_that_is_no_weight() -> None:
    """The state matrix of Mamba has two dimensions, its convolution three."""
    model = build_skeleton(config_of("falcon_mamba"), "sdpa")
    found = with_schemas(model, find_units(model), "bf16", "fp32", "muon")
    names = {tensor.name.split(".", 3)[-1] for unit in found if unit.is_layer for tensor in unit.layout.tensors}
    assert names == {f"mixer.{name}_proj.weight" for name in ("in", "x", "dt", "out")}


def test_muon_refuses_parts_of_experts_that_have_biases() -> None:
    model = build_skeleton(config_of("gpt_oss"), "eager")
    with pytest.raises(UnsupportedModelError, match=r"experts\[0:2\] .* are no matrices for Muon, .*expert_parts to 1"):
        with_schemas(model, cut_units(model, 2), "bf16", "fp32", "muon")
