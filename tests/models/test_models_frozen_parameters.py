"""Patterns of what is frozen: what they name, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tiny_models import tiny_config
from transformers import PreTrainedModel

from megatier.errors import ConfigError
from megatier.models.decoder import build_skeleton
from megatier.models.frozen_parameters import freeze


def skeleton(family: str = "llama") -> PreTrainedModel:
    return build_skeleton(tiny_config(family, num_hidden_layers=12), "sdpa")


def trained(model: PreTrainedModel, patterns: Sequence[str]) -> set[str]:
    freeze(model, patterns)
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_freeze_a_module_leaves_those_whose_name_only_begins_alike() -> None:
    model = skeleton()
    names = {name for name, _ in model.named_parameters()}
    assert trained(model, ["model.layers.1"]) == {n for n in names if not n.startswith("model.layers.1.")}
    assert "model.layers.11.mlp.up_proj.weight" in trained(model, [])


def test_freeze_takes_parameters_and_patterns() -> None:
    patterns = ["lm_head.weight", "model.layers.[0-8]", "*.bias*", "*norm*"]
    found = trained(skeleton(), patterns[:2] + patterns[3:])
    assert {".".join(name.split(".")[:3]) for name in found} == {
        "model.embed_tokens.weight",
        *(f"model.layers.{number}" for number in (9, 10, 11)),
    }
    assert not [name for name in found if "norm" in name]


def test_freeze_the_last_pattern_that_names_a_parameter_decides() -> None:
    assert trained(skeleton(), ["*", "!*.q_proj", "model.layers.0"]) == {
        f"model.layers.{number}.self_attn.q_proj.weight" for number in range(1, 12)
    }


def test_freeze_takes_one_pattern_as_a_string() -> None:
    assert trained(skeleton(), "model.layers.0") == trained(skeleton(), ["model.layers.0"])


def test_freeze_a_tied_head_by_either_name() -> None:
    for name in ("lm_head", "model.embed_tokens"):
        assert "model.embed_tokens.weight" not in trained(skeleton("llama_tied"), [name])


@pytest.mark.parametrize("pattern", ["model.layer.0", "!model.layer.0", "model.layers.0.self_atn"])
def test_freeze_refuses_a_pattern_that_names_nothing(pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.frozen: .* names no parameter .* Near it are model\.layers\.0"):
        freeze(skeleton(), ["lm_head", pattern])


def test_freeze_refuses_a_pattern_that_is_like_no_name() -> None:
    with pytest.raises(ConfigError, match=r"names such as model\.embed_tokens\.weight"):
        freeze(skeleton(), ["?"])


def test_freeze_refuses_to_freeze_everything() -> None:
    with pytest.raises(ConfigError, match="nothing to train"):
        freeze(skeleton(), ["model", "lm_head"])
