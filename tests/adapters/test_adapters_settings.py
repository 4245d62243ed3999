"""Every field of PEFT's LoraConfig: the adapters of a skeleton are those of PEFT, or the field is refused by name."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from tiny_adapters import peft
from tiny_runs import exactness_config, plain_model

from megatier.adapters.given_adapters import add_given
from megatier.adapters.stored_adapters import _IGNORED_SETTINGS, _TAKEN_SETTINGS, checked_settings
from megatier.errors import ConfigError
from megatier.models.decoder import build_skeleton

FIELDS = {field.name for field in dataclasses.fields(peft.LoraConfig)}
REFUSED: dict[str, Any] = {
    "alora_invocation_tokens": [5, 6],
    "arrow_config": {"top_k": 2},
    "bias": "all",
    "init_lora_weights": "pissa",
    "kasa_config": {"beta": 1e-4},
    "layer_replication": [[0, 2], [1, 3]],
    "lora_bias": True,
    "monteclora_config": {"num_groups": 2},
    "trainable_token_indices": [1, 2],
    "use_bdlora": {"nblocks": 2},
    "use_qalora": True,
    "velora_config": {"scale": 1.0},
}
"""Fields that are refused if they ask for something, and what asks for it."""
FIRST_VALUES = ("pissa", "pissa_niter_4", "olora", "loftq", "corda", "eva", "lora_ga", "gaussian", "orthogonal", False)
SAME: dict[str, dict[str, Any]] = {
    "r": {"r": 3},
    "lora_alpha": {"lora_alpha": 5},
    "use_rslora": {"use_rslora": True},
    "use_dora": {"use_dora": True},
    "target_modules": {"target_modules": r".*layers\.[01]\..*\.(q|v)_proj"},
    "all linear": {"target_modules": "all-linear"},
    "exclude_modules": {"exclude_modules": ["layers.1.self_attn.q_proj"]},
    "excluded by expression": {"exclude_modules": r".*layers\.0\..*"},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "rank_pattern": {"rank_pattern": {"up_proj": 2, r"^model.layers.1.self_attn.q_proj": 6}},
    "alpha_pattern": {"alpha_pattern": {"q_proj": 3.0}, "use_rslora": True},
    "layers_to_transform": {"layers_to_transform": [1]},
    "layers_pattern": {"layers_to_transform": 0, "layers_pattern": "layers"},
    "fan_in_fan_out": {"fan_in_fan_out": True},
    "target_parameters": {"target_modules": [], "target_parameters": ["self_attn.q_proj.weight"]},
    "lora_dropout": {"lora_dropout": 0.25},
    "ensure_weight_tying": {"ensure_weight_tying": True},
    "revision": {"revision": "main"},
}
"""Fields that are followed, and values of them."""


def lora(**settings: Any) -> Any:
    chosen = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj", "up_proj"], **settings}
    return peft.LoraConfig(**chosen)


def adapters_in(model: torch.nn.Module) -> tuple[Any, ...]:
    """The trained parameters with their shapes, and the scale and dropout of each layer."""
    trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    layers = {
        name: (dict(module.scaling), {key: getattr(value, "p", 0) for key, value in module.lora_dropout.items()})
        for name, module in model.named_modules()
        if hasattr(module, "lora_dropout")
    }
    return trained, layers


def test_fields_of_peft_are_each_in_one_place_of_the_table() -> None:
    tables = [*_TAKEN_SETTINGS, *_IGNORED_SETTINGS, *REFUSED]
    assert {name: tables.count(name) for name in FIELDS} == dict.fromkeys(FIELDS, 1)


@pytest.mark.parametrize("case", [case for case, given in SAME.items() if given.keys() <= FIELDS])
def test_adapters_of_a_skeleton_are_those_that_peft_makes(case: str) -> None:
    config = exactness_config("plain")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT
        expected = adapters_in(peft.inject_adapter_in_model(lora(**SAME[case]), plain_model(config)))
        model = build_skeleton(config, "sdpa")
        add_given(model, lora(**SAME[case]), "base")
    assert adapters_in(model) == expected
    assert expected[0]


@pytest.mark.parametrize("name", REFUSED)
def test_field_of_peft_that_is_not_trained_here_is_refused_by_name(name: str) -> None:
    given = {"peft_type": "LORA", **lora().to_dict()}
    checked_settings(given, "peft_config")
    with pytest.raises(ConfigError, match=rf"peft_config sets {name} to .* not trained here"):
        checked_settings({**given, name: REFUSED[name]}, "peft_config")
    with pytest.raises(ConfigError, match="peft_config sets of_a_later_version to"):
        checked_settings({**given, "of_a_later_version": True}, "peft_config")


@pytest.mark.parametrize("value", FIRST_VALUES)
def test_first_values_of_new_adapters_that_are_not_pefts_default_are_refused(value: Any) -> None:
    model = build_skeleton(exactness_config("plain"), "sdpa")
    config = lora()
    config.init_lora_weights = value
    with pytest.raises(ConfigError, match="peft_config sets init_lora_weights to"):
        add_given(model, config, "base")


def test_new_adapters_that_are_not_to_be_trained_are_refused() -> None:
    model = build_skeleton(exactness_config("plain"), "sdpa")
    with pytest.raises(ConfigError, match="peft_config sets inference_mode, by which"):
        add_given(model, lora(inference_mode=True), "base")
