"""Adapters in a skeleton: what their targets name, and what is refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from tiny_models import tiny_config
from transformers import PreTrainedModel

from megatier.adapters.lora import add_adapters
from megatier.config.lora import LoraConfig
from megatier.errors import ConfigError
from megatier.models.decoder import build_skeleton, find_units

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
    "experts": ("qwen3_moe", {"targets": ("q_proj", "gate")}, "PEFT takes 'gate' for a part of the experts"),
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
