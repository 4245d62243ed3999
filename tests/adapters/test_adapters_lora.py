"""Adapters in a skeleton: what their targets name, and what is refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from tiny_models import tiny_config
from transformers import PreTrainedModel

from megatier.adapters.first_weights import base_name
from megatier.adapters.lora import add_adapters
from megatier.compute.adapted_parameter import wrappers_in
from megatier.config.lora import LoraConfig
from megatier.errors import ConfigError
from megatier.models.decoder import build_skeleton, find_units
from megatier.models.expert_units import cut_units, max_expert_parts

pytest.importorskip("peft")


def adapted(family: str = "llama", **settings: Any) -> PreTrainedModel:
    model = build_skeleton(tiny_config(family), "sdpa")
    add_adapters(model, LoraConfig(**settings), "base")
    return model


def modules(model: PreTrainedModel) -> set[str]:
    """The modules that have an adapter."""
    parts = (".lora_A.", ".lora_embedding_A.")
    return {name.partition(part)[0] for name, _ in model.named_parameters() for part in parts if part in name}


def test_add_adapters_to_all_linear_layers_leaves_the_head() -> None:
    found = modules(adapted())
    assert len(found) == 4 * 7
    assert not [name for name in found if "layers" not in name]


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        (("q_proj", "v_proj"), 8),
        ("model.layers.[0-1]", 14),
        ("model.layers.[0-1].mlp,*.k_proj", 10),
        (("model.layers.3.self_attn.q_proj",), 1),
        (("embed_tokens", "lm_head"), 2),
    ],
)
def test_add_adapters_takes_ends_of_names_and_patterns(targets: Any, count: int) -> None:
    assert len(modules(adapted(targets=targets))) == count


@pytest.mark.parametrize(
    ("names", "layers"),
    [
        (("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), "0123"),
        (("model.layers.2.mlp.experts.down_proj",), "2"),
        ("model.layers.[1-2].mlp.experts.gate_up_proj", "12"),
        ("model.layers.[0-1]", "01"),
    ],
)
def test_add_adapters_takes_names_of_parameters_and_patterns_of_stacks(names: Any, layers: str) -> None:
    model = adapted("qwen3_moe", targets=(), target_parameters=names)
    found = {base_name(name) for name in wrappers_in(model)}
    assert {name.split(".")[2] for name in found} == set(layers)
    assert all(".experts." in name for name in found)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * len(found)


@pytest.mark.parametrize("targets", [("q_proj",), ("all-linear",)])
def test_add_adapters_gives_them_to_modules_beside_parameters(targets: tuple[str, ...]) -> None:
    found = modules(adapted("mixtral", targets=targets, target_parameters=("experts.down_proj",)))
    assert len([name for name in found if name.endswith(".experts")]) == 4
    assert len([name for name in found if ".self_attn." in name]) == (4 if targets == ("q_proj",) else 16)


def test_experts_with_adapters_are_not_cut_into_parts() -> None:
    model = adapted("qwen3_moe", targets=("q_proj",), target_parameters=("mlp.experts.down_proj",))
    assert max_expert_parts(model) == 1
    with pytest.raises(ConfigError, match=r"model\.expert_parts is 2, but experts of model\.layers\.0 have adapters"):
        cut_units(model, 2)


def test_add_adapters_trains_them_alone_as_parts_of_their_units() -> None:
    model = adapted(targets=("q_proj", "lm_head"), modules_to_save=("model.norm",))
    trained = {unit.name: [t.name for t in unit.layout.trained.tensors] for unit in find_units(model)}
    assert trained["model.embed_tokens"] == []
    assert trained["model.norm"] == ["model.norm.modules_to_save.default.weight"]
    assert trained["lm_head"] == ["lm_head.lora_A.default.weight", "lm_head.lora_B.default.weight"]
    for number in range(4):
        name = f"model.layers.{number}"
        assert trained[name] == [f"{name}.self_attn.q_proj.lora_{part}.default.weight" for part in "AB"]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen2_moe", "deepseek_v3"])
def test_add_adapters_to_all_linear_layers_leaves_experts_and_routers(family: str) -> None:
    found = modules(adapted(family))
    assert found
    assert not [name for name in found if name.endswith(("experts", ".gate"))]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no such target": ("llama", {"targets": ("q_prj",)}, r"targets: 'q_prj' names no module .* It has q_proj"),
    "a pattern": ("llama", {"targets": ("*.nothing",)}, r"targets: '\*\.nothing' names no module"),
    "one of several": ("llama", {"targets": ("q_proj", "x_y")}, "'x_y' names no module"),
    "tied head": ("llama_tied", {"targets": ("lm_head",)}, "the weight of lm_head is both"),
    "tied embedding": (
        "gemma2",
        {"targets": ("embed_tokens",)},
        "the weight of model.embed_tokens is both",
    ),
    "tied copy": (
        "llama_tied",
        {"modules_to_save": ("lm_head",)},
        "the weight of lm_head is both",
    ),
    "a norm": ("llama", {"targets": ("input_layernorm",)}, "PEFT .* makes no such adapters: Target module"),
    "no such copy": ("llama", {"modules_to_save": ("head",)}, "modules_to_save: 'head' names no module"),
    "a layer": (
        "llama",
        {"modules_to_save": ("model.layers.1",)},
        "save: model.layers.1 holds whole layers",
    ),
    "experts": (
        "qwen3_moe",
        {"targets": ("q_proj", "gate")},
        "PEFT takes 'gate' for a part of the experts, .* name what is to have adapters in target_parameters",
    ),
    "no such parameter": (
        "qwen3_moe",
        {"target_parameters": ("experts.up_proj",)},
        "target_parameters: 'experts.up_proj' names no parameter of Qwen3MoeForCausalLM, which has "
        "mlp.experts.down_proj, mlp.experts.gate_up_proj",
    ),
    "no stack": ("llama", {"target_parameters": ("*.o_proj.weight",)}, "LlamaForCausalLM, which has no stacked ones"),
    "a vector": (
        "llama",
        {"target_parameters": ("input_layernorm.weight",)},
        "PEFT .* makes no such adapters: lora.ParamWrapper was initialized with 1 dimensional Parameter",
    ),
    "twice": ("llama", {"target_parameters": ("q_proj.weight",)}, "PEFT .* makes no such adapters: Trying to wrap"),
    "tied parameter": (
        "llama_tied",
        {"targets": ("q_proj",), "target_parameters": ("embed_tokens.weight",)},
        "the weight of model.embed_tokens is both",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_add_adapters_refuses_what_cannot_be_adapted_and_says_why(case: str) -> None:
    family, settings, message = REFUSED[case]
    with pytest.raises(ConfigError, match=rf"model\.lora.*{message}"):
        adapted(family, **settings)


def test_add_adapters_without_peft_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"needs peft .*: pip install 'megatier\[lora\]'"):
        adapted()
