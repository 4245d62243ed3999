"""Composite models trained by text alone: each number is that of the plain model, or the type is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import BASE, FAMILIES, LATENT, MOE, known_config
from tiny_runs import one_thread, read_parameters
from tiny_vision import LINEAR, LLAVA_ONEVISION, QWEN_VISION, ROPE, TEXT, TOKENS_OF_QWEN, TOWER, text_batch
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedModel,
    Qwen2AudioForConditionalGeneration,
    VoxtralForConditionalGeneration,
)

import megatier
from megatier.config.schema import TiersConfig
from megatier.errors import UnsupportedModelError
from megatier.tier import Kind

MIB = 1 << 20
TIERS = TiersConfig(device="cpu", gpu=16 * MIB, ram=96 * MIB, io_threads=2, update_threads=2)
IMAGE = 150
LLAMA: dict[str, Any] = {"model_type": "llama", **TEXT, "head_dim": 16}
QWEN2: dict[str, Any] = {"model_type": "qwen2", **TEXT}
MISTRAL: dict[str, Any] = {"model_type": "mistral", **TEXT, "head_dim": 16}
COHERE2: dict[str, Any] = {
    "model_type": "cohere2",
    **TEXT,
    "head_dim": 16,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
SIGLIP: dict[str, Any] = {"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER}
CLIP: dict[str, Any] = {"model_type": "clip_vision_model", "projection_dim": 16, **TOWER}
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
}
GLM_TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": 151,
    "image_start_token_id": 152,
    "image_end_token_id": 153,
    "video_start_token_id": 154,
    "video_end_token_id": 155,
}
GEMMA4_TOKENS: dict[str, Any] = {"image_token_id": IMAGE, "audio_token_id": 151, "video_token_id": 152}
COMPOSITES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "text_config": {**TEXT, "rope_parameters": ROPE},
        "vision_config": {"depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4},
        **TOKENS_OF_QWEN,
    },
    "gemma4_unified": {
        "text_config": {**BASE, **FAMILIES.get("gemma4_unified_text", {})},
        **GEMMA4_TOKENS,
    },
    "mistral3": {
        "text_config": MISTRAL,
        "vision_config": {"model_type": "pixtral", **TOWER, "head_dim": 16},
        "image_token_index": IMAGE,
    },
    "glm4v": {
        "text_config": {**TEXT, "rope_parameters": ROPE},
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 4,
            "image_size": 16,
        },
        **GLM_TOKENS,
    },
    "internvl": {
        "text_config": QWEN2,
        "vision_config": {**TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
        "image_token_id": IMAGE,
        "image_seq_length": 4,
    },
    "aya_vision": {
        "text_config": COHERE2,
        "vision_config": SIGLIP,
        "image_token_index": IMAGE,
        "alignment_intermediate_size": 64,
    },
    "llava_next": {
        "text_config": LLAMA,
        "vision_config": CLIP,
        "image_token_index": IMAGE,
        "image_grid_pinpoints": [[16, 16]],
    },
    "paligemma": {
        "text_config": {**MISTRAL, "model_type": "gemma"},
        "vision_config": {**SIGLIP, "projection_dim": 64},
        "image_token_index": IMAGE,
        "projection_dim": 64,
    },
    "lfm2_vl": {
        "text_config": {"model_type": "lfm2", **TEXT, "layer_types": ["conv", "full_attention"] * 2},
        "vision_config": {
            "model_type": "siglip2_vision_model",
            **SMALL,
            "num_patches": 16,
            "vision_use_head": False,
        },
        "image_token_id": IMAGE,
        "projector_hidden_size": 32,
    },
    "qwen3_5_moe": {
        "text_config": {
            **TEXT,
            **LINEAR,
            **MOE,
            "head_dim": 16,
            "shared_expert_intermediate_size": 32,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0},
        },
        "vision_config": {**QWEN_VISION, "num_position_embeddings": 16},
        **TOKENS_OF_QWEN,
    },
    "cohere2_vision": {
        "text_config": COHERE2,
        "vision_config": SIGLIP,
        "image_token_id": IMAGE,
        "alignment_intermediate_size": 64,
    },
    "llava_onevision": LLAVA_ONEVISION,
    "vipllava": {
        "text_config": LLAMA,
        "vision_config": CLIP,
        "image_token_index": IMAGE,
        "vision_feature_layers": [-1, -2],
    },
    "idefics3": {"text_config": LLAMA, "vision_config": TOWER, "image_token_id": IMAGE, "scale_factor": 2},
    "smolvlm": {"text_config": LLAMA, "vision_config": TOWER, "image_token_id": IMAGE, "scale_factor": 2},
    "deepseek_vl": {"text_config": LLAMA, "vision_config": SIGLIP, "image_token_id": IMAGE},
    "aria": {
        "text_config": {
            **TEXT,
            "head_dim": 16,
            "moe_num_experts": 4,
            "moe_topk": 2,
            "moe_num_shared_experts": 1,
            "intermediate_size": 32,
        },
        "vision_config": {"model_type": "idefics3_vision", **TOWER},
        "image_token_index": IMAGE,
        "projector_patch_to_query_dict": {16: 4},
    },
}
"""Further types whose configs hold the config of a language model, beside those of `tiny_vision`."""
QUICK = (
    *("gemma4_unified", "mistral3", "glm4v", "internvl", "aya_vision", "paligemma"),
    *("aria", "lfm2_vl", "qwen3_5_moe"),
)
"""Each of another text part and projector; the others are slow tests."""
AUDIO: dict[str, Any] = {"num_mel_bins": 16, "max_source_positions": 16}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def composite(model_type: str, options: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    config = known_config(model_type, **options)
    model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    assert isinstance(model, PreTrainedModel)
    model.train()
    return model


def stepped(source: Path | PreTrainedModel, exported: Path) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a step of text at a rate of 0, and an export behind it."""
    options: dict[str, Any] = {"compute_dtype": "fp32", "fused_loss": False, "lr": 0.0, "clip": None}
    with megatier.stream(source, tiers=TIERS, betas=(0.0, 0.999), **options) as streamed:
        loss = streamed.model(**text_batch()).loss
        loss.backward()
        streamed.optimizer.step()
        streamed.export(exported, dtype="fp32")
        return loss.item(), read_parameters(streamed._session, Kind.EXP_AVG)


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in COMPOSITES]
)
def test_composite_trained_by_text_has_the_numbers_of_the_plain_model_and_is_exported_whole(
    model_type: str, tmp_path: Path
) -> None:
    model = composite(model_type, COMPOSITES[model_type])
    model.save_pretrained(tmp_path / "theirs")
    loss = model(**text_batch(), use_cache=False).loss
    loss.backward()
    expected = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    weights = dict(model.named_parameters())
    sources: tuple[Path | PreTrainedModel, ...] = (model, tmp_path / "theirs")
    for number, source in enumerate(sources):
        found_loss, found = stepped(source, tmp_path / f"ours{number}")
        assert found_loss == loss.item()
        assert found.keys() == expected.keys()
        assert [name for name, grad in expected.items() if not torch.equal(found[name], grad)] == []
        result: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / f"ours{number}", output_loading_info=True)
        loaded, report = result
        assert not any(report.values()), report
        assert [name for name, p in loaded.named_parameters() if not torch.equal(p, weights[name])] == []


# ---- what is refused


def test_gemma4_with_inputs_for_each_layer_is_refused_by_name(tmp_path: Path) -> None:
    text = {**BASE, **FAMILIES.get("gemma4_text", {})}
    vision = {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16}
    options = {"text_config": text, "vision_config": vision, "audio_config": None, **GEMMA4_TOKENS}
    model = composite("gemma4", options)
    with pytest.raises(UnsupportedModelError, match=r"Gemma4ForConditionalGeneration computes .*embed_tokens\.weight"):
        stepped(model, tmp_path)


def test_weights_of_a_folder_that_transformers_alone_converts_are_refused_by_name(tmp_path: Path) -> None:
    text = {"model_type": "deepseek_v3", **TEXT, **LATENT}
    options = {"text_config": text, "vision_config": SMALL, "image_token_id": IMAGE}
    composite("kimi_k25", options).save_pretrained(tmp_path / "theirs")
    with pytest.raises(UnsupportedModelError, match=r"PermuteForRope.*save_original_format=False"):
        stepped(tmp_path / "theirs", tmp_path)


def test_florence2_is_refused_by_name(tmp_path: Path) -> None:
    known_config("florence2").save_pretrained(tmp_path / "theirs")
    with pytest.raises(UnsupportedModelError, match="florence2 is an encoder-decoder"):
        stepped(tmp_path / "theirs", tmp_path)


@pytest.mark.parametrize("model_type", ["qwen2_audio", "voxtral"])
def test_model_that_hears_is_refused_by_name(model_type: str, tmp_path: Path) -> None:
    layers = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    small = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48}
    hears = {**AUDIO, **(small if model_type == "qwen2_audio" else layers)}
    config: Any = known_config(model_type, text_config=LLAMA, audio_config=hears)
    kind = Qwen2AudioForConditionalGeneration if model_type == "qwen2_audio" else VoxtralForConditionalGeneration
    model = kind(config)
    with pytest.raises(UnsupportedModelError, match=f"{kind.__name__} is neither a classifier nor the language model"):
        stepped(model, tmp_path)
    model.save_pretrained(tmp_path / "theirs")
    with pytest.raises(UnsupportedModelError, match=f"{model_type} cannot be built from this config"):
        stepped(tmp_path / "theirs", tmp_path)
