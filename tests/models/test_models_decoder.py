from __future__ import annotations

import functools

import pytest
import torch
from tiny_models import FAMILIES, tiny_config
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.trainer import Trainer

from megatier.errors import UnsupportedModelError
from megatier.models.decoder import bindings, build_skeleton, decay_parameter_names, decoder_layers, find_units


@functools.cache
def normal_model(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32)
    assert isinstance(model, PreTrainedModel)
    model.eval()
    return model


def skeleton(family: str) -> PreTrainedModel:
    return build_skeleton(tiny_config(family), "sdpa")


@pytest.mark.parametrize("family", FAMILIES)
def test_units_family_hold_every_parameter_once(family: str) -> None:
    model = skeleton(family)
    units = find_units(model)
    placed = {tensor.name: tensor.shape for unit in units for tensor in unit.layout.tensors}
    assert sum(len(unit.layout.tensors) for unit in units) == len(placed)
    assert placed == {name: tuple(parameter.shape) for name, parameter in normal_model(family).named_parameters()}
    assert sum(unit.is_layer for unit in units) == len(decoder_layers(model)) >= 4
    order = [name for name, _ in model.named_modules()]
    assert [unit.name for unit in units] == sorted((unit.name for unit in units), key=order.index)


@pytest.mark.parametrize("family", FAMILIES)
def test_bindings_family_filled_with_a_normal_models_weights_compute_the_same(family: str) -> None:
    normal, model = normal_model(family), skeleton(family).eval()
    weights = dict(normal.named_parameters())
    units = find_units(model)
    places = [place for unit in units for module in unit.module_names for place in bindings(model, unit, module)]
    for parameters, leaf, tensor in places:
        parameters[leaf] = weights[tensor.name].detach()
    token_ids = torch.arange(3, 27).view(2, 12)
    normal.set_attn_implementation(model.config._attn_implementation)
    with torch.no_grad():
        assert torch.equal(model(token_ids).logits, normal(token_ids, use_cache=False).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_decays_family_are_those_of_the_trainer(family: str) -> None:
    model = skeleton(family)
    own = {name for name, _ in model.named_parameters()}
    expected = Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]
    assert decay_parameter_names(model) == own & set(expected)


def test_units_tied_head_is_one_unit_with_two_modules() -> None:
    units = find_units(skeleton("llama_tied"))
    assert units[0].module_names == ("model.embed_tokens", "lm_head")
    assert [tensor.name for tensor in units[0].layout.tensors] == ["model.embed_tokens.weight"]
    assert "lm_head" not in [unit.name for unit in units]


def test_bindings_tied_head_puts_the_same_slice_into_both_modules() -> None:
    model = skeleton("llama_tied")
    unit = find_units(model)[0]
    [(embedding, _, first)] = bindings(model, unit, "model.embed_tokens")
    [(head, leaf, second)] = bindings(model, unit, "lm_head")
    assert leaf == "weight"
    assert embedding is model.get_submodule("model.embed_tokens")._parameters
    assert head is model.get_submodule("lm_head")._parameters
    assert first == second


def test_skeleton_model_without_sdpa_falls_back_to_eager() -> None:
    assert skeleton("gpt_oss").config._attn_implementation == "eager"
    assert skeleton("llama").config._attn_implementation == "sdpa"


def test_skeleton_built_leaves_the_callers_config_and_random_state_alone() -> None:
    config = tiny_config("llama")
    before, state = config.to_dict(), torch.get_rng_state()
    model = build_skeleton(config, "eager")
    assert config.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config.use_cache is False
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (tiny_config("llama", quantization_config={"quant_method": "fp8"}), "quantised"),
        (AutoConfig.for_model("t5"), "encoder-decoder"),
        (AutoConfig.for_model("vit"), "type vit is neither a classifier nor the language model"),
    ],
    ids=["quantised", "encoder-decoder", "no language model"],
)
def test_skeleton_unsupported_config_is_refused(config: object, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        build_skeleton(config, "sdpa")  # type: ignore[arg-type]


def test_units_weight_shared_by_two_layers_is_refused() -> None:
    model = skeleton("llama")
    layers = decoder_layers(model)
    layers[2].get_submodule("mlp")._parameters["shared"] = layers[1].get_parameter("mlp.up_proj.weight")
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM.*layers\.1\.mlp\.up_proj\.weight.*layers\.2"):
        find_units(model)


def test_units_integer_parameter_is_refused() -> None:
    model = skeleton("llama")
    packed = nn.Parameter(torch.empty(4, dtype=torch.int8, device="meta"), requires_grad=False)
    decoder_layers(model)[0].get_submodule("mlp").register_parameter("packed", packed)
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.mlp\.packed is torch\.int8"):
        find_units(model)


def test_units_model_without_layers_is_refused() -> None:
    model = skeleton("llama")
    model.get_decoder().layers = nn.ModuleList()
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has no list"):
        find_units(model)


def test_units_module_round_others_takes_their_parameters_too() -> None:
    model = skeleton("llama")
    model.lm_head = nn.Sequential(nn.Linear(64, 8, device="meta"), nn.Linear(8, 160, device="meta"))
    model.lm_head.register_parameter("scale", nn.Parameter(torch.empty(1, device="meta")))
    head = find_units(model)[-1]
    assert head.name == "lm_head"
    assert [tensor.name for tensor in head.layout.tensors] == [
        "lm_head.scale",
        "lm_head.0.weight",
        "lm_head.0.bias",
        "lm_head.1.weight",
        "lm_head.1.bias",
    ]
