"""Configs of Axolotl become ours, key by key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from converted import AXOLOTL, findings, settings, written

from megatier.convert.source import convert
from megatier.errors import ConfigError


def test_convert_axolotl(tmp_path: Path) -> None:
    made = convert(written(tmp_path, AXOLOTL))
    assert made.trainer == "Axolotl"
    assert made.settings == {
        "model.path": "meta-llama/Llama-3.2-1B",
        "model.lora": {
            "rank": 16,
            "alpha": 32,
            "dropout": 0.05,
            "targets": ["all-linear"],
            "rslora": False,
            "dora": False,
            "modules_to_save": [],
        },
        "model.compute_dtype": "bf16",
        "data.files": ["data/chats.jsonl"],
        "data.chat": "messages",
        "data.sequence_length": 4096,
        "data.holdout_fraction": 0.05,
        "train.batch": 8,
        "train.groups": 4,
        "train.epochs": 2.0,
        "train.seed": 42,
        "train.activations": "recompute",
        "train.moments": "bf16",
        "train.learning_rate": 2e-4,
        "train.weight_decay": 0.0,
        "train.beta1": 0.9,
        "train.beta2": 0.999,
        "train.eps": 1e-8,
        "train.clip": 1.0,
        "train.schedule": "cosine",
        "train.warmup_ratio": 0.1,
        "train.evaluate_every": 50,
        "train.early_stopping_patience": 3,
        "output.directory": "./outputs/lora-out",
        "output.checkpoint_every": 100,
        "output.push_to_hub": "somebody/llama-1b-chats",
        "output.report_to": ["wandb"],
    }
    assert "WANDB_PROJECT" in findings(made, "carried")["wandb_project"]
    assert findings(made, "default") == {}


AXOLOTL_LEAST: dict[str, Any] = {"base_model": "a/b", "datasets": [{"path": "a.jsonl", "type": "completion"}]}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, {"data.files": ["a.jsonl"], "data.text_field": "text", "train.epochs": 1.0, "data.sequence_length": 512}),
        (
            {"datasets": [{"path": "org/x", "type": "alpaca", "split": "a"}]},
            {"data.dataset": "org/x", "data.split": "a"},
        ),
        ({"datasets": [{"path": "/a", "type": "sharegpt"}] * 2}, {"data.files": ["/a", "/a"], "data.chat": "sharegpt"}),
        ({"bf16": False}, {"model.compute_dtype": "fp32"}),
        (
            {"bf16": False, "fp16": True, "sdp_attention": True},
            {"model.compute_dtype": "bf16", "model.attention": "sdpa"},
        ),
        ({"bf16": "full"}, {"model.compute_dtype": "bf16"}),
        ({"gradient_checkpointing": "offload"}, {"train.activations": "offload"}),
        ({"max_steps": 7, "num_epochs": 3, "optimizer": "muon"}, {"train.steps": 7, "train.optimizer": "muon"}),
        (
            {"max_steps": 7, "save_steps": 0.5, "eval_steps": 2.0},
            {"output.checkpoint_every": 4, "train.evaluate_every": 2},
        ),
        ({"eval_steps": 5, "load_best_model_at_end": True}, {"output.load_best_model_at_end": True}),
        ({"use_mlflow": True, "use_tensorboard": True}, {"output.report_to": ["mlflow", "tensorboard"]}),
        ({"adapter": "lora"}, {"train.activations": "keep"}),
    ],
    ids=str,
)
def test_convert_axolotl_values(more: dict[str, Any], expected: dict[str, object], tmp_path: Path) -> None:
    made = settings(tmp_path, {**AXOLOTL_LEAST, **more})
    assert {key: made[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("more", "key", "words"),
    [
        ({"datasets": [{"path": "a.jsonl", "type": "input_output"}]}, "datasets", "by hand: datasets are files of one"),
        ({"datasets": [{"path": "a/b", "type": "alpaca"}] * 2}, "datasets", "by hand: datasets are files of one shape"),
        ({"datasets": "a"}, "datasets", "set data.files or data.dataset"),
        ({"datasets": []}, "datasets", "set data.files or data.dataset"),
        ({"datasets": [{"type": "alpaca"}]}, "datasets", "by hand"),
        ({"rl": False}, "rl", "off, as here"),
        ({"wandb_project": "p", "wandb_mode": "offline"}, "wandb_mode", "set WANDB_MODE in the environment"),
        ({"wandb_project": "p", "wandb_entity": "e"}, "wandb_entity", "set WANDB_ENTITY in the environment"),
        ({"liger_rope": True}, "liger_rope", "layers run as transformers has them"),
        ({"early_stopping_patience": 2}, "early_stopping_patience", "set it with train.evaluate_every"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end", "set it with train.evaluate_every"),
        ({"hub_model_id": "name"}, "hub_model_id", "output.push_to_hub is owner/name"),
        ({"load_in_4bit": True}, "load_in_4bit", "the base stays in full precision"),
        ({}, "warmup_steps", "Axolotl warms up for 3 %"),
        ({"mine": 1}, "mine", "no key of Axolotl that is known here"),
        ({"flash_attention": True}, "flash_attention", "which keeps documents apart"),
        ({"optimizer": "adafactor"}, "optimizer", "train.optimizer is adamw, muon or lion"),
    ],
)
def test_convert_axolotl_keys_that_cannot_be_carried_say_why(
    more: dict[str, Any], key: str, words: str, tmp_path: Path
) -> None:
    assert words in findings(convert(written(tmp_path, {**AXOLOTL_LEAST, **more})), "left")[key]


def test_convert_axolotl_all_linear_layers_go_before_those_that_are_named(tmp_path: Path) -> None:
    adapter = {"adapter": "lora", "lora_target_linear": True, "lora_target_modules": ["q_proj"]}
    lora = settings(tmp_path, {**AXOLOTL_LEAST, **adapter})["model.lora"]
    assert isinstance(lora, dict)
    assert lora["targets"] == ["all-linear"]


def test_convert_axolotl_keys_of_a_dataset_that_are_not_taken_are_named(tmp_path: Path) -> None:
    dataset = {
        "path": "a.jsonl",
        "type": "chat_template",
        "split": "train[:9]",
        "train_on_eos": "all",
        "ds_type": "json",
    }
    made = convert(written(tmp_path, {**AXOLOTL_LEAST, "datasets": [dataset]}))
    (found,) = [finding for finding in made.findings if finding.key == "datasets"]
    assert found.differs
    assert found.explanation.endswith("; not taken: split, train_on_eos")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"rl": "dpo"}, "rl is set; `megatier train` does supervised training alone"),
        ({"adapter": "llama-adapter"}, "adapter is llama-adapter; megatier trains lora, or the whole model"),
    ],
)
def test_convert_axolotl_other_training_is_refused(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        convert(written(tmp_path, {**AXOLOTL_LEAST, **more}))
