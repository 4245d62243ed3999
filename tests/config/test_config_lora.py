"""The section model.lora: its values, on the command line and in YAML, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatier.config.file import from_dict, load, load_given, to_dict
from megatier.config.lora import LoraConfig
from megatier.config.schema import ModelConfig
from megatier.errors import ConfigError

REST = ("--model.path=base", "--data.files=text")


def test_lora_is_read_from_yaml_and_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model:\n  lora:\n    rank: 8\n    targets: [q_proj, '*.layers.[0-3].mlp']\n")
    config = load(path, [*REST, "--model.lora.dropout", "0.1", "--model.lora.modules_to_save=lm_head,norm"])
    assert config.model.adapters == LoraConfig(
        rank=8, dropout=0.1, targets=("q_proj", "*.layers.[0-3].mlp"), modules_to_save=("lm_head", "norm")
    )
    assert from_dict(to_dict(config)) == config
    assert "model.lora" in load_given(path, REST)[1]

    # A pattern is taken as it is written, where YAML would see an alias.
    assert load(None, [*REST, "--model.lora.targets", "*.q_proj"]).model.adapters == LoraConfig(targets=("*.q_proj",))


def test_lora_takes_parameters_with_and_without_modules() -> None:
    words = ["--model.lora.target_parameters", "*.experts.down_proj,gate_up_proj", "--model.lora.targets="]
    found = load(None, [*REST, *words]).model.adapters
    assert found is not None
    assert (found.targets, found.target_parameters) == ((), ("*.experts.down_proj", "gate_up_proj"))
    assert LoraConfig(target_parameters=("down_proj",)).targets == ("all-linear",)


def test_lora_with_nothing_in_it_takes_the_defaults_and_null_is_none() -> None:
    assert load(None, [*REST, "--model.lora={}"]).model.adapters == LoraConfig()
    assert load(None, [*REST, "--model.lora=null"]).model.adapters is None
    assert load(None, REST).model.adapters is None


def test_lora_scales_by_two_unless_alpha_is_given() -> None:
    assert LoraConfig(rank=8).scaled_alpha == 16
    assert LoraConfig(rank=8, alpha=4).scaled_alpha == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "model.lora.rank is 0; it must be at least 1"),
        ({"rank": 2.5}, "model.lora.rank is 2.5"),
        ({"rank": True}, "model.lora.rank is True"),
        ({"alpha": 0}, "model.lora.alpha is 0.0; it must be above 0, or null for twice the rank"),
        ({"dropout": 1}, "model.lora.dropout is 1.0; it must be from 0 to below 1"),
        ({"dropout": "much"}, "model.lora.dropout is 'much'"),
        ({"targets": []}, "model.lora.targets is .*; it must be at least one module, or beside target_parameters"),
        ({"target_parameters": [1]}, "model.lora.target_parameters is .*; it must be a list of text"),
        (
            {"target_parameters": ["down_proj"], "dropout": 0.1},
            "model.lora.dropout does not go with .*: PEFT's lora.ParamWrapper does not work with lora_dropout != 0",
        ),
        (
            {"target_parameters": ["down_proj"], "dora": True},
            "model.lora.dora does not go with .*: PEFT's lora.ParamWrapper does not work with use_dora=True",
        ),
        ({"targets": [1]}, "model.lora.targets is .*; it must be a list of text"),
        ({"targets": ["all-linear", "lm_head"]}, "it must be all-linear alone"),
        ({"dora": 1}, "model.lora.dora is 1; it must be true or false"),
        ({"r": 8}, r"unknown setting model.lora.r; did you mean model.lora.rank\?"),
        ({"target_modules": "q"}, r"unknown setting model.lora.target_modules; did you mean model.lora.targets\?"),
        ({"ranks": 8}, r"unknown setting model.lora.ranks; did you mean rank\?"),
        ({"kind": "ia3"}, "unknown setting model.lora.kind; known are rank, "),
    ],
)
def test_lora_refuses_a_value_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(path="base", lora=settings)


def test_lora_refuses_settings_that_do_not_go_with_it() -> None:
    with pytest.raises(ConfigError, match=r"model\.path is None; it must be the folder or name of a model with model"):
        ModelConfig(config={"model_type": "llama"}, lora={})
    with pytest.raises(ConfigError, match=r"model\.frozen is .*; it must be empty with model\.lora"):
        ModelConfig(path="base", lora={}, frozen=("lm_head",))
    with pytest.raises(ConfigError, match=r"model\.lora is 'q_proj'"):
        load(None, [*REST, "--model.lora=q_proj"])
