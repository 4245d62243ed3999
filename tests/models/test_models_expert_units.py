"""Layers cut into their experts and the rest: what is where, and what is refused."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FUSED, tiny_config
from torch import nn
from transformers import PreTrainedModel

from megatier.errors import ConfigError, UnsupportedModelError
from megatier.models.decoder import bindings, build_skeleton, find_units
from megatier.models.expert_units import cut_units, max_expert_parts, places_of


def skeleton(family: str) -> PreTrainedModel:
    return build_skeleton(tiny_config(family), "sdpa")


@pytest.mark.parametrize("family", FUSED)
def test_cut_units_family_hold_every_element_of_every_parameter_once(family: str) -> None:
    model = skeleton(family)
    found = places_of(cut_units(model, 3))
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        parts = [tensor for _, tensor in found[name]]
        bounds = [0, *(tensor.elements[1] for tensor in parts)]
        assert [tensor.elements[0] for tensor in parts] == bounds[:-1]
        assert bounds[-1] == parameter.numel()
        assert {tensor.parameter_shape for tensor in parts} == {tuple(parameter.shape)}
        assert len(parts) == (3 if ".experts." in name else 1)


@pytest.mark.parametrize("family", FUSED)
def test_cut_units_family_are_bound_wherever_their_tensors_are_used(family: str) -> None:
    model = skeleton(family)
    for unit in cut_units(model, 2):
        places = [place for name in unit.module_names for place in bindings(model, unit, name)]
        assert {tensor.name for _, _, tensor in places} == {tensor.name for tensor in unit.layout.tensors}


def test_cut_units_of_a_layer_are_its_other_modules_and_ranges_of_experts_as_even_as_can_be() -> None:
    layer, *experts = cut_units(skeleton("qwen3_moe"), 3)[1:5]
    assert layer.name == "model.layers.0"
    assert layer.is_layer
    assert [name.removeprefix("model.layers.0.") for name in layer.module_names] == [
        "self_attn",
        "mlp.gate",
        "input_layernorm",
        "post_attention_layernorm",
    ]
    assert [unit.experts for unit in experts] == [(0, 2), (2, 5), (5, 8)]
    assert [unit.name for unit in experts] == [
        f"model.layers.0.mlp.experts[{a}:{b}]" for a, b in ((0, 2), (2, 5), (5, 8))
    ]
    assert [tensor.shape for tensor in experts[1].layout.tensors] == [(3, 64, 64), (3, 64, 32)]
    assert not any(unit.is_layer for unit in experts)


def test_cut_units_leave_layers_without_experts_whole() -> None:
    model = skeleton("deepseek_v3")
    whole, cut = find_units(model), cut_units(model, 2)
    assert cut[:2] == whole[:2]
    assert cut[-2:] == whole[-2:]
    assert sum(unit.is_layer for unit in cut) == 4


def test_cut_units_in_one_part_are_the_models_own() -> None:
    for family in ("qwen3_moe", "llama", "llama4_text"):
        model = skeleton(family)
        assert cut_units(model, 1) == find_units(model)


def test_most_parts_are_the_experts_of_a_layer() -> None:
    assert [max_expert_parts(skeleton(family)) for family in ("qwen3_moe", "mixtral", "llama")] == [8, 4, 1]


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("llama", "model.expert_parts is 2, but LlamaForCausalLM has no fused experts"),
        ("llama4_text", r"the experts of model.layers.1.feed_forward.experts \(Llama4TextExperts\) take no indices"),
    ],
)
def test_experts_that_cannot_be_cut_are_refused_by_name(family: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"{reason}.*\. Set model\.expert_parts to 1"):
        cut_units(skeleton(family), 2)


def test_more_parts_than_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"expert_parts is 5, but .*experts has 4 experts: set it to at most 4"):
        cut_units(skeleton("mixtral"), 5)


def test_experts_of_an_implementation_that_does_not_skip_are_refused() -> None:
    model = skeleton("gpt_oss")
    model.set_experts_implementation("eager")
    with pytest.raises(UnsupportedModelError, match=r"the eager experts of model\.layers\.0\.mlp\.experts"):
        cut_units(model, 2)


@pytest.mark.parametrize("where", ["model.layers.2", "model.layers.2.mlp"])
def test_parameter_of_a_module_round_the_experts_is_refused(where: str) -> None:
    model = skeleton("qwen3_moe")
    model.get_submodule(where).register_parameter("scale", nn.Parameter(torch.ones(1, device="meta")))
    with pytest.raises(UnsupportedModelError, match=rf"{where}\.scale belongs to a module around the experts"):
        cut_units(model, 2)


def test_parameter_of_the_experts_that_is_of_no_single_one_is_refused() -> None:
    model = skeleton("qwen3_moe")
    model.get_submodule("model.layers.1.mlp.experts").register_parameter(
        "scale", nn.Parameter(torch.ones(3, device="meta"))
    )
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.experts .* not of single experts"):
        cut_units(model, 2)
