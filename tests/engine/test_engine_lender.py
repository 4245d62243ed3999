"""Parameters of modules round the layers: lent to their forward, with the gradients and bits of any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_gradients import attention_of, far, padded_batch, plain_gradients, streamed_gradients
from tiny_models import BASE, tiny_config
from tiny_runs import PLACES, Outcome, opened, outcome, run_steps
from tiny_vision import IMAGE_TOKEN, TEXT, TOWER, image_batch, text_batch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from megatier.config.schema import TrainConfig
from megatier.errors import UnsupportedModelError
from megatier.models.decoder import LENT_ELEMENTS_MAX, build_skeleton, find_units
from megatier.models.initialiser import Initialiser

NUM_IMAGE_TOKENS = 10
EVERY_TIER = ("gpu", "ram", "ram_streamed", "nvme")
"""A row of LLaVA-NeXT: four of the whole image, four of its one tile, and the end of a line for each of its two."""
CONFIGS: dict[str, dict[str, Any]] = {
    "zaya": {**BASE, "num_experts": 4, "sliding_window": 8, "moe_intermediate_size": 32, "router_hidden_size": 32},
    "hrm_text": {**BASE, "num_layers_per_stack": 2, "H_cycles": 2, "L_cycles": 2},
    "llava_next": {
        "text_config": {"model_type": "llama", **TEXT, "head_dim": 16},
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 16, **TOWER, "patch_size": 8},
        "image_token_index": IMAGE_TOKEN,
        "image_grid_pinpoints": [[16, 16]],
        "vision_feature_select_strategy": "default",
    },
    "blip-2": {
        "text_config": {
            "model_type": "opt",
            "vocab_size": 160,
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "max_position_embeddings": 128,
            "word_embed_proj_dim": 64,
            "dropout": 0.0,
        },
        "vision_config": {**TOWER, "patch_size": 8},
        "qformer_config": {
            **{key: TOWER[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")},
            "num_hidden_layers": 2,
            "vocab_size": 160,
            "encoder_hidden_size": 32,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        "num_query_tokens": 4,
        "image_token_index": IMAGE_TOKEN,
    },
}
OWNED = {
    "zaya": ("model", ["model.input_hidden_states_bias", "model.input_hidden_states_scale"]),
    "hrm_text": ("model", ["model.z_L_init"]),
    "llava_next": ("model", ["model.image_newline"]),
    "blip-2": ("Blip2ForConditionalGeneration", ["query_tokens"]),
}
"""The unit round the layers, and what it has."""
TYPES = [name for name in CONFIGS if name in CONFIG_MAPPING]


def config_of(name: str) -> PretrainedConfig:
    return AutoConfig.for_model(name, **CONFIGS[name])


def batch_of(name: str) -> dict[str, Tensor]:
    if name == "blip-2":
        return image_batch("llava")
    if name != "llava_next":
        return padded_batch()
    batch = text_batch()
    image = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    image[:, 2 : 2 + NUM_IMAGE_TOKENS] = True
    pixels = torch.randn(2, 2, 3, 16, 16, generator=torch.Generator().manual_seed(7))
    return {
        "input_ids": batch["input_ids"].masked_fill(image, IMAGE_TOKEN),
        "attention_mask": torch.ones_like(batch["attention_mask"]),
        "labels": batch["labels"].masked_fill(image, -100),
        "pixel_values": pixels,
        "image_sizes": torch.tensor([[16, 16]] * 2),
    }


@pytest.mark.parametrize("name", TYPES)
def test_gradients_of_modules_around_the_layers_are_those_of_the_plain_model(name: str, tmp_path: Path) -> None:
    config, batch = config_of(name), batch_of(name)
    assert [
        (unit.name, sorted(tensor.name for tensor in unit.layout.tensors))
        for unit in find_units(build_skeleton(config, "sdpa"))
        if unit.is_lent
    ] == [OWNED[name]]
    loss, expected, source = plain_gradients(config, attention_of(config), batch)
    assert all(bool(expected[owned].any()) for owned in OWNED[name][1] if owned in expected)
    for activations in ("keep", "recompute"):
        found_loss, found = streamed_gradients(config, tmp_path, source, activations, batch=batch)
        assert found_loss == loss
        assert [key for key, grad in expected.items() if not torch.equal(found[key], grad)] == []


@pytest.mark.skipif("zaya" not in CONFIG_MAPPING, reason="this transformers has no zaya")
def test_slices_of_a_model_with_something_round_the_layers_have_nearly_the_plain_gradients(tmp_path: Path) -> None:
    config = config_of("zaya")
    loss, expected, source = plain_gradients(config, attention_of(config))
    found_loss, found = streamed_gradients(config, tmp_path, source, slices=2)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert far(found, expected) == {}


@pytest.mark.skipif("zaya" not in CONFIG_MAPPING, reason="this transformers has no zaya")
@pytest.mark.parametrize(
    ("clip", "places"),
    [
        (0.5, ("gpu", "ram_streamed", "nvme")),
        (None, ("gpu", "ram")),
        *(pytest.param(clip, EVERY_TIER, marks=pytest.mark.slow) for clip in (0.5, None)),
    ],
)
def test_a_module_around_the_layers_has_the_same_bits_wherever_it_lies(
    clip: float | None, places: tuple[str, ...], tmp_path: Path
) -> None:
    train = TrainConfig(steps=3, batch=6, groups=2, clip=clip, weight_decay=0.1)
    outcomes: dict[str, Outcome] = {}
    for place in places:
        with opened(config_of("zaya"), tmp_path, PLACES[place], train, compute_dtype="bf16") as session:
            outcomes[place] = outcome(session, run_steps(session, train, 3))
            assert (session.engine.evaluate([padded_batch()]) or 0.0) > 0
    assert set(outcomes.values()) == {outcomes["gpu"]}


def test_what_the_model_itself_owns_is_a_unit_with_the_name_of_its_class() -> None:
    model = build_skeleton(tiny_config("llama"), "sdpa")
    model.register_parameter("gain", nn.Parameter(torch.ones(3, device="meta")))
    [unit] = [unit for unit in find_units(model) if unit.is_lent]
    assert unit.name == "LlamaForCausalLM"
    assert unit.module_names == ("",)
    assert [tensor.name for tensor in unit.layout.tensors] == ["gain"]


def test_large_parameter_round_the_layers_is_refused_by_name() -> None:
    model = build_skeleton(tiny_config("llama"), "sdpa")
    model.get_submodule("model").register_parameter(
        "table", nn.Parameter(torch.ones(LENT_ELEMENTS_MAX + 1, device="meta"))
    )
    with pytest.raises(
        UnsupportedModelError, match=rf"model\.table belongs to .* has {LENT_ELEMENTS_MAX + 1} elements"
    ):
        find_units(model)


@pytest.mark.skipif("zaya" not in CONFIG_MAPPING, reason="this transformers has no zaya")
def test_first_weights_round_the_layers_are_those_of_the_models_own_initialisation() -> None:
    model = build_skeleton(config_of("zaya"), "sdpa")
    [unit] = [unit for unit in find_units(model) if unit.is_lent]
    values = {start: piece.clone() for start, piece in Initialiser(model, 0).read(unit)}
    assert [int(value.sum()) for value in values.values()] == [BASE["hidden_size"], 0]
