"""Configs of LLaMA-Factory become ours, key by key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from converted import LLAMA_FACTORY, findings, settings, written

from megatier.cli import main
from megatier.config.file import load
from megatier.config.lora import LoraConfig
from megatier.convert.source import convert
from megatier.errors import ConfigError


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"report_to": "wandb,comet"}, {"output.report_to": ["wandb"]}),
        ({"report_to": ["tensorboard", "none"]}, {"output.report_to": ["tensorboard"]}),
        ({"push_to_hub": True, "hub_model_id": "a/b"}, {"output.push_to_hub": "a/b"}),
        ({"max_samples": 9}, {"data.max_samples": 9}),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
            {"train.min_learning_rate_ratio": 0.1},
        ),
        ({"eval_steps": 5, "early_stopping_steps": 2}, {"train.early_stopping_patience": 2}),
        ({"report_to": "comet", "hub_model_id": "a/b", "early_stopping_steps": 2}, {}),
    ],
)
def test_convert_llama_factory_trackers_hub_and_early_stopping(
    more: dict[str, object], expected: dict[str, object], tmp_path: Path
) -> None:
    made = settings(tmp_path, {"model_name_or_path": "a", "dataset": "x", "finetuning_type": "full", **more})
    new = {"output.report_to", "output.push_to_hub", "data.max_samples", "train.early_stopping_patience"}
    new.add("train.min_learning_rate_ratio")
    assert {key: value for key, value in made.items() if key in new} == expected


def test_convert_llama_factory(tmp_path: Path) -> None:
    made = convert(written(tmp_path, LLAMA_FACTORY))
    assert made.trainer == "LLaMA-Factory"
    assert made.settings == {
        "model.path": "meta-llama/Meta-Llama-3-8B-Instruct",
        "model.compute_dtype": "bf16",
        "data.files": ["data/dataset_info.json#identity", "data/dataset_info.json#alpaca_en_demo"],
        "data.sequence_length": 2048,
        "data.holdout_fraction": 0.0,
        "train.batch": 2,
        "train.groups": 2,
        "train.epochs": 3.0,
        "train.seed": 42,
        "train.activations": "recompute",
        "train.learning_rate": 1e-5,
        "train.weight_decay": 0.0,
        "train.beta1": 0.9,
        "train.beta2": 0.999,
        "train.eps": 1e-8,
        "train.clip": 1.0,
        "train.schedule": "cosine",
        "train.warmup_ratio": 0.1,
        "output.directory": "saves/llama3-8b/full/sft",
        "output.checkpoint_every": 500,
    }
    assert findings(made, "left").keys() == {"do_train", "template", "max_samples", "logging_steps"}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"max_steps": 200, "warmup_ratio": 0.1}, {"train.steps": 200, "train.warmup_ratio": 0.1}),
        ({"max_steps": -1, "num_train_epochs": 2}, {"train.epochs": 2}),
        (
            {"max_steps": 250, "eval_steps": 0.1, "save_steps": 0.33},
            {"train.evaluate_every": 25, "output.checkpoint_every": 83},
        ),
        ({"warmup_steps": 7, "warmup_ratio": 0.1}, {"train.warmup_steps": 7}),
        ({"flash_attn": "disabled", "val_size": 0.1}, {"model.attention": "eager", "data.holdout_fraction": 0.1}),
        ({"dataset": ["a", "b"], "dataset_dir": "my/"}, {"data.files": [f"my/dataset_info.json#{n}" for n in "ab"]}),
        ({"bf16": False}, {"model.compute_dtype": "fp32"}),
    ],
)
def test_convert_llama_factory_values_that_depend_on_others(
    more: dict[str, object], expected: dict[str, object], tmp_path: Path
) -> None:
    made = settings(tmp_path, {"model_name_or_path": "a", "dataset": "x", "finetuning_type": "full", **more})
    assert {key: made[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, {"rank": 8, "alpha": 16, "targets": ["all-linear"]}),
        ({"lora_rank": 64, "lora_alpha": 32, "lora_dropout": 0.1}, {"rank": 64, "alpha": 32, "dropout": 0.1}),
        ({"lora_target": "q_proj, v_proj", "additional_target": "norm"}, {"targets": ["q_proj", "v_proj"]}),
        ({"lora_target": ["q_proj"], "use_dora": True, "use_rslora": True}, {"targets": ["q_proj"], "dora": True}),
    ],
)
def test_convert_llama_factory_adapters(more: dict[str, object], expected: dict[str, object], tmp_path: Path) -> None:
    source = {"model_name_or_path": "a", "dataset": "x", "finetuning_type": "lora", **more}
    made = convert(written(tmp_path, source))
    given: Any = made.settings["model.lora"]
    lora = LoraConfig.of(given)
    assert {key: lora.to_dict()[key] for key in expected} == expected
    assert set(findings(made, "carried")) >= {"finetuning_type", *more}

    # LLaMA-Factory trains adapters unless it is told otherwise.
    del source["finetuning_type"]
    assert convert(written(tmp_path, source)).settings == made.settings
    main(["convert", str(written(tmp_path, source)), "--output", str(tmp_path / "run.yaml")])
    assert load(tmp_path / "run.yaml").model.adapters == lora


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"finetuning_type": "oft"}, "finetuning_type is oft; megatier trains full or lora"),
        ({"stage": "dpo"}, "stage is dpo; `megatier train` does sft and pt"),
        ({"cutoff_len": 1}, "cutoff_len is 1; it must be a whole number of at least 2"),
    ],
)
def test_convert_llama_factory_run_of_another_kind_is_refused(
    more: dict[str, object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        convert(written(tmp_path, {"model_name_or_path": "a", "dataset": "x", **more}))
