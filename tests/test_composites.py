"""Composite models trained by text alone: each number is that of the plain model, or the type is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from composite_models import COMPOSITES, GEMMA4_TOKENS, IMAGE, LLAMA, SMALL, composite_config
from tiny_models import BASE, FAMILIES, LATENT, known_config
from tiny_runs import read_parameters
from tiny_vision import TEXT, text_batch
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
QUICK = (
    *("gemma4_unified", "mistral3", "glm4v", "internvl", "aya_vision", "paligemma"),
    *("aria", "lfm2_vl", "qwen3_5_moe", "paligemma2", "emu3", "chameleon"),
)
"""Each of another text part and projector; the others are slow tests."""
AUDIO: dict[str, Any] = {"num_mel_bins": 16, "max_source_positions": 16}


def composite(name: str, options: dict[str, Any] | None = None) -> PreTrainedModel:
    torch.manual_seed(0)
    model: Any = AutoModelForImageTextToText.from_config(composite_config(name, options), dtype=torch.float32)
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
    "name", [pytest.param(each, marks=[] if each in QUICK else [pytest.mark.slow]) for each in COMPOSITES]
)
def test_composite_trained_by_text_has_the_numbers_of_the_plain_model_and_is_exported_whole(
    name: str, tmp_path: Path
) -> None:
    model = composite(name)
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
    model.save_pretrained(tmp_path / "theirs")
    sources: tuple[Path | PreTrainedModel, ...] = (model, tmp_path / "theirs")
    for source in sources:
        with pytest.raises(UnsupportedModelError, match=f"{kind.__name__} is neither a classifier nor the language"):
            stepped(source, tmp_path)
