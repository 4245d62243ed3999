"""`model.attention: auto` becomes a kernel by the model's config, the GPU and the settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_setups import ROUND

from megatier.config.data_section import DataConfig
from megatier.config.schema import ModelConfig, RunConfig, TiersConfig, TrainConfig
from megatier.schedule.budgets import Budgets
from megatier.setup.attention_choice import choose_kernel
from megatier.setup.machine import Machine
from megatier.setup.skeleton import model_config_of

WIDE = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}


def config_of(shape: dict[str, Any], model: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(config={"model_type": "llama"} | WIDE | shape, **model or {}),
        data=DataConfig(files=("x",), tokenizer="bytes", sequence_length=8192),
        tiers=TiersConfig(),
        train=TrainConfig(**train),
    )


def kernel(config: RunConfig, **machine: Any) -> tuple[RunConfig, str]:
    """What the rule chooses on a machine that has a GPU on which the kernels were measured, or on another one."""
    some = Machine.elsewhere(config.tiers, ROUND, Budgets(0, 0, 0))
    return choose_kernel(config, model_config_of(config.model), replace(some, **machine))


def test_kernel_on_a_cpu_is_sdpa() -> None:
    config = config_of({}, {"compile": False})
    found, why = kernel(config, device=torch.device("cpu"), capability=None)
    assert (found.model.attention, why) == ("sdpa", "")


def test_kernel_for_a_measured_gpu_is_flex_attention() -> None:
    found, why = kernel(config_of({}))
    assert (found.model.attention, why) == ("flex_attention", "")
    assert kernel(found) == (found, "")


@pytest.mark.parametrize(
    ("capability", "expected"), [(None, "flex_attention"), (9.0, "flex_attention"), (12.0, "sdpa")]
)
def test_kernel_elsewhere_is_that_of_the_gpu_that_the_rates_name(capability: float | None, expected: str) -> None:
    config = config_of({})
    machine = Machine.elsewhere(config.tiers, replace(ROUND, compute_capability=capability), Budgets(0, 0, 0))
    found, _ = choose_kernel(config, model_config_of(config.model), machine)
    assert found.model.attention == expected


def test_kernel_here_is_that_of_the_gpu_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    config = config_of({})
    here = Machine.here(replace(config.tiers, gpu=1 << 20, ram=1 << 20))
    found, why = choose_kernel(config, model_config_of(config.model), here)
    assert found.model.attention == "sdpa"
    assert "8.6" in why


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
def test_kernel_that_is_named_stays(attention: str) -> None:
    config = config_of({}, {"attention": attention})
    assert kernel(config) == (config, "")


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ({"attention_dropout": 0.1}, "dropout"),
        ({"model_type": "gemma2"}, "another kind of attention (sliding_attention)"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding window"),
        ({"model_type": "gpt2"}, "transformers gives gpt2 no flex attention"),
        ({"model_type": "llama", "head_dim": 96}, "heads have 96 elements"),
        ({"model_type": "deepseek_v3", "qk_nope_head_dim": 64, "qk_rope_head_dim": 64}, "flex attention|compressed"),
    ],
)
def test_kernel_of_a_model_that_was_not_measured_is_sdpa_with_the_reason(shape: dict[str, Any], why: str) -> None:
    found, reason = kernel(config_of(shape))
    assert found.model.attention == "sdpa"
    assert any(part in reason for part in why.split("|")), reason


def test_kernel_of_slices_of_documents_apart_is_sdpa() -> None:
    config = config_of({}, slices=2, batch=2)
    data = DataConfig(files=("x",), tokenizer="bytes", sequence_length=8192, cross_documents=False)
    config = RunConfig(model=config.model, data=data, train=config.train)
    found, why = kernel(config)
    assert found.model.attention == "sdpa"
    assert "cut into slices" in why


def test_kernel_that_no_gpu_computes_is_sdpa_also_without_compilation() -> None:
    found, why = kernel(config_of({}, {"compile": False}))
    assert found.model.attention == "sdpa"
    assert "not compiled" in why


@pytest.mark.parametrize(("tokens", "kept"), [(1024, False), (4096, True), (131_072, True)])
def test_attention_is_kept_where_it_is_long_unless_the_config_says_otherwise(tokens: int, kept: bool) -> None:
    assert TrainConfig().keeps_attention(tokens) is kept
    assert TrainConfig(kept_attention=False).keeps_attention(tokens) is False
    assert TrainConfig(kept_attention=True).keeps_attention(tokens) is True
