"""`megatier convert`: what MegaTrain's, LLaMA-Factory's and DeepSpeed's files become, key by key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatier.cli import main
from megatier.config.file import load
from megatier.config.lora import LoraConfig
from megatier.convert.conversion import Conversion
from megatier.convert.source import convert
from megatier.errors import ConfigError

MICRO = "train_micro_batch_size_per_gpu"
EXAMPLES = Path(__file__).parents[2] / "examples" / "convert"
"""Files as the trainers' users have them."""
MEGATRAIN = (EXAMPLES / "megatrain.yaml").read_text()  # 2e-5 in it is text to plain YAML
LLAMA_FACTORY = (EXAMPLES / "llama_factory.yaml").read_text()
AXOLOTL = (EXAMPLES / "axolotl.yaml").read_text()
ACCELERATE = (EXAMPLES / "accelerate.yaml").read_text()
Z3_OFFLOAD = (EXAMPLES / "ds_z3_offload.json").read_text()  # goes with Hugging Face's Trainer and LLaMA-Factory
INFINITY = (EXAMPLES / "ds_z3_infinity.json").read_text()


def written(folder: Path, content: object) -> Path:
    """A file with text, or with JSON."""
    path = folder / "other.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def settings(folder: Path, content: object) -> dict[str, object]:
    return convert(written(folder, content)).settings


def findings(made: Conversion, outcome: str) -> dict[str, str]:
    return {finding.key: finding.words for finding in made.findings if finding.outcome == outcome}


def leaves(tree: dict[str, Any], before: str = "") -> set[str]:
    keys: set[str] = set()
    for name, value in tree.items():
        keys |= leaves(value, f"{before}{name}.") if isinstance(value, dict) else {before + name}
    return keys


@pytest.mark.parametrize("content", [MEGATRAIN, LLAMA_FACTORY, AXOLOTL, ACCELERATE, Z3_OFFLOAD, INFINITY])
def test_convert_names_each_key_once(content: str, tmp_path: Path) -> None:
    made = convert(written(tmp_path, content))
    tree = yaml.safe_load(content)
    there = [finding.key for finding in made.findings if finding.value != "(not given)"]
    assert sorted(there) == sorted(leaves(tree))
    assert all(finding.words and "\n" not in str(finding) for finding in made.findings)
    assert not any("known here" in finding.words for finding in made.findings), "each of them has a reason of its own"


def test_convert_megatrain(tmp_path: Path) -> None:
    made = convert(written(tmp_path, MEGATRAIN))
    assert made.trainer == "MegaTrain"
    assert made.settings == {
        "model.path": "Qwen/Qwen2.5-7B-Instruct",
        "model.compute_dtype": "bf16",
        "data.files": ["data/dataset_info.json#metamath"],
        "data.sequence_length": 2048,
        "train.batch": 128,
        "train.groups": 4,
        "train.steps": 250,
        "train.seed": 7,
        "train.activations": "recompute",
        "train.learning_rate": 2e-5,
        "train.schedule": "constant",
        "train.weight_decay": 0.05,
        "train.clip": 0.5,
        "train.beta1": 0.9,
        "train.beta2": 0.95,
        "train.eps": 1e-8,
    }
    assert "MegaTrain counts micro-batches, 4 a step" in findings(made, "carried")["training.num_steps"]
    assert "borders of documents" in findings(made, "left")["model.attn_implementation"]


def test_convert_megatrain_defaults_that_change_numbers_are_its_own(tmp_path: Path) -> None:
    made = convert(written(tmp_path, "model: {name: a/b}\ndataset: {path: saved/train}\n"))
    of_it: dict[str, object] = {
        "train.batch": 96,
        "train.steps": 100,
        "train.learning_rate": 1e-5,
        "train.weight_decay": 0.01,
    }
    of_it |= {"train.seed": 42, "train.schedule": "constant"}
    assert of_it.items() <= made.settings.items()
    assert made.settings["data.files"] == ["saved/train"]
    assert 'columns {"prompt": "query", "response": "response"}' in findings(made, "left")["dataset.query_field"]


def test_convert_megatrain_several_gpus_and_vision_are_named(tmp_path: Path) -> None:
    text = "model: {name: a/b, devices: [0, 1], dtype: float16, trust_remote_code: true}\n"
    text += "dataset: {name: x, system_prompt: be brief, train_on_prompt: true}\n"
    text += "vlm: {freeze_vision_encoder: true}\ntraining: {batch_size: 6}\noptimizer: {type: lion}\n"
    made = convert(written(tmp_path, text))
    assert made.settings["train.batch"] == 6
    keys = {
        "model.devices",
        "model.dtype",
        "model.trust_remote_code",
        "dataset.system_prompt",
        "dataset.train_on_prompt",
    }
    assert findings(made, "left").keys() == keys | {"vlm.freeze_vision_encoder", "optimizer.type"}


def test_convert_deepspeed_auto_stays_at_the_default_and_says_so(tmp_path: Path) -> None:
    made = convert(written(tmp_path, Z3_OFFLOAD))
    assert made.trainer == "DeepSpeed"
    assert made.settings == {"output.export": True, "output.export_dtype": "bf16"}
    found = findings(made, "default")
    assert found["train_batch_size"] == "train.batch stays at its default, 8"
    assert found["gradient_clipping"] == "train.clip stays at its default, 1.0"
    assert found["bf16.enabled"] == "model.compute_dtype stays at its default, bf16"
    assert "RAM" in findings(made, "carried")["zero_optimization.offload_optimizer.device"]
    assert "loss scaling" in findings(made, "left")["fp16.loss_scale"]


def test_convert_deepspeed_infinity(tmp_path: Path) -> None:
    made = convert(written(tmp_path, INFINITY))
    assert made.settings == {
        "train.batch": 64,
        "train.groups": 16,  # passes of 4 sequences: one GPU does what two did
        "train.clip": 0.8,
        "model.compute_dtype": "bf16",
        "train.beta1": 0.9,
        "train.beta2": 0.95,
        "train.learning_rate": 3e-4,
        "train.eps": 1e-9,
        "train.weight_decay": 0.1,
        "train.schedule": "cosine",
        "train.steps": 5000,
        "train.warmup_steps": 200,
        "train.min_learning_rate_ratio": 0.1,
        "tiers.nvme": ["/mnt/b", "/mnt/a"],
        "tiers.gpu_direct": True,
        "train.activations": "offload",
        "output.tensorboard": True,
    }
    left = findings(made, "left")
    assert "tiers.ram" in left["zero_optimization.offload_param.max_in_cpu"]
    assert "metrics.jsonl" in left["wall_clock_breakdown"]
    assert "tiers.io_threads" in left["aio.queue_depth"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            {"train.batch": 8, "train.groups": 2},
        ),
        ({"train_micro_batch_size_per_gpu": 4}, {"train.batch": 4, "train.groups": 1}),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 3}, {"train.batch": 12, "train.groups": 3}),
        ({"train_batch_size": 12, "gradient_accumulation_steps": "auto"}, {"train.batch": 12}),
        ({"train_batch_size": None, "gradient_accumulation_steps": 4}, {}),
        ({"zero_optimization": {}, "gradient_clipping": 0.0}, {"train.clip": None}),
        ({"zero_optimization": {"cpu_offload": True}}, {}),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": False}}, {"model.compute_dtype": "fp32"}),
        ({"fp16": {"enabled": True, "loss_scale": 0}}, {}),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": "auto"}}, {}),
        ({"bfloat16": {"enabled": True}}, {"model.compute_dtype": "bf16"}),
    ],
)
def test_convert_deepspeed_batches_and_types(content: object, expected: dict[str, object], tmp_path: Path) -> None:
    assert settings(tmp_path, content) == expected


def test_convert_deepspeed_batch_that_is_auto_follows_from_the_others(tmp_path: Path) -> None:
    made = convert(written(tmp_path, {"train_batch_size": "auto", MICRO: 4, "gradient_accumulation_steps": "auto"}))
    assert made.settings == {"train.batch": 4, "train.groups": 1}
    assert findings(made, "carried")["train_batch_size"] == "train.batch: 4; from the other two"
    assert findings(made, "default") == {"gradient_accumulation_steps": "train.groups stays at its default, 1"}
    made = convert(written(tmp_path, {"train_batch_size": 12, MICRO: "auto"}))
    assert findings(made, "default") == {MICRO: "train.groups stays at its default, 1"}


def test_convert_deepspeed_schedule_sets_the_rate_as_there(tmp_path: Path) -> None:
    params = {"warmup_max_lr": 1e-4, "warmup_min_lr": 1e-8, "warmup_num_steps": 50, "total_num_steps": 500}
    content = {
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": params},
    }
    made = convert(written(tmp_path, content))
    assert made.settings == {
        "train.learning_rate": 1e-4,
        "train.schedule": "linear",
        "train.steps": 500,
        "train.warmup_steps": 50,
    }
    assert "not logarithmically" in findings(made, "carried")["scheduler.params.warmup_num_steps"]
    assert "rises from 0" in findings(made, "left")["scheduler.params.warmup_min_lr"]


def test_convert_deepspeed_cosine_without_its_least_stays_at_our_default(tmp_path: Path) -> None:
    content = {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 500}}}
    assert settings(tmp_path, content) == {"train.schedule": "cosine", "train.steps": 500}
    content["scheduler"]["params"]["cos_min_ratio"] = "auto"  # type: ignore[index]
    made = convert(written(tmp_path, content))
    assert made.settings == {"train.schedule": "cosine", "train.steps": 500}
    least = "train.min_learning_rate_ratio stays at its default, 0.0"
    assert findings(made, "default") == {"scheduler.params.cos_min_ratio": least}


def test_convert_deepspeed_betas_that_are_auto_name_both(tmp_path: Path) -> None:
    made = convert(written(tmp_path, {"fp16": {}, "optimizer": {"type": "AdamW", "params": {"betas": "auto"}}}))
    words = "train.beta1 stays at its default, 0.9; train.beta2 stays at its default, 0.999"
    assert findings(made, "default") == {"optimizer.params.betas": words}
    assert made.settings == {}


def test_convert_muon_of_deepspeed_leaves_its_learning_rate_which_has_another_scale(tmp_path: Path) -> None:
    params = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    made = convert(
        written(tmp_path, {"zero_optimization": {"stage": 3}, "optimizer": {"type": "Muon", "params": params}})
    )
    assert made.settings == {"train.optimizer": "muon", "train.momentum": 0.9}
    assert "set train.learning_rate" in findings(made, "carried")["optimizer.type"]
    left = findings(made, "left")
    assert left["optimizer.params.lr"] == left["optimizer.params.weight_decay"] == "a setting of another form of Muon"


@pytest.mark.parametrize(("value", "optimizer"), [("true", "muon"), ("false", "adamw")])
def test_convert_muon_of_llama_factory(value: str, optimizer: str, tmp_path: Path) -> None:
    made = convert(written(tmp_path, f"{LLAMA_FACTORY}use_muon: {value}\n"))
    assert made.settings["train.optimizer"] == optimizer


@pytest.mark.parametrize(("betas", "expected"), [(None, 0.99), ([0.95, 0.98], 0.98)])
def test_convert_lion_of_deepspeed_has_its_own_second_beta(
    betas: list[float] | None, expected: float, tmp_path: Path
) -> None:
    params = {"lr": 3e-5} | ({"betas": betas} if betas else {})
    made = convert(
        written(tmp_path, {"zero_optimization": {"stage": 3}, "optimizer": {"type": "Lion", "params": params}})
    )
    assert made.settings["train.optimizer"] == "lion"
    assert made.settings["train.learning_rate"] == 3e-5
    assert made.settings["train.beta2"] == expected


@pytest.mark.parametrize(
    ("value", "changed", "words"),
    [
        ("adamw_torch_fused", {}, "AdamW, as train.optimizer says"),
        (
            "paged_adamw_8bit",
            {"train.moments": "bf16"},
            "train.moments: bf16; train.moments: fp8 has 8 bits too, and has been tried less",
        ),
        ("muon", {"train.optimizer": "muon"}, "train.optimizer: muon; in Moonshot's form"),
        ("lion_8bit", {"train.optimizer": "lion"}, "train.optimizer: lion; its momentum is in fp32 here"),
        ("adafactor", {}, None),
    ],
)
def test_convert_optim_of_llama_factory(value: str, changed: dict[str, str], words: str | None, tmp_path: Path) -> None:
    made = convert(written(tmp_path, f"{LLAMA_FACTORY}optim: {value}\n"))
    assert {
        key: value for key, value in made.settings.items() if key in ("train.optimizer", "train.moments")
    } == changed
    assert findings(made, "carried").get("optim") == words
    assert findings(made, "left").get("optim") == (None if words else "train.optimizer is adamw, muon or lion")


def test_convert_deepspeed_other_optimizer_leaves_its_settings(tmp_path: Path) -> None:
    content = {
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "Lamb", "params": {"lr": 3e-5, "betas": [0.9, 0.99]}},
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5}},
        "my_own": {"key": 1},
    }
    made = convert(written(tmp_path, content))
    assert made.settings == {}
    left = findings(made, "left")
    assert left["optimizer.params.lr"] == "a setting of another optimizer than AdamW"
    assert left["scheduler.params.cycle_min_lr"] == "a setting of that schedule"
    assert left["my_own.key"] == "no key of DeepSpeed that is known here"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- a\n- b\n", "holds no settings by name"),
        ("just words", "holds no settings by name"),
        ("{]", "is no valid JSON: Expecting property name enclosed in double quotes: line 1 column 2"),
        ("a: [", "is no valid YAML"),
        ("foo: 1\nbar: 2\n", "no config that `megatier convert` reads. It must be MegaTrain's YAML"),
        ("model: {path: a}\ntrain: {steps: 3}\n", "is a config of megatier already; `megatier config show"),
        ("training: 3\nmodel: {name: a}\n", "training is a section"),
        ("training: {batch_size: many}\n", "training.batch_size is many; it must be a number"),
        ("training: {batch_size: 0}\n", "training.batch_size is 0; it must be a whole number of at least 1"),
        ("training: {batch_size: 2.5}\n", "it must be a whole number"),
        ("training: {learning_rate: .nan}\n", "training.learning_rate is NaN; it must be a number"),
        ("training: {}\nmodel: {dtype: int8}\n", "model.dtype is int8; it must be one of bfloat16, float16, float32"),
        ('{"train_batch_size": 1, "train_batch_size": 2}', "train_batch_size is given twice"),
        ({"train_batch_size": True}, "train_batch_size is true; it must be a number"),
        ('{"train_batch_size": 1' + "0" * 400 + "}", "it must be a number"),
        (
            {"train_batch_size": 10, MICRO: 4},
            "no multiple of train_micro",
        ),
        ({"bf16": {"enabled": "yes"}}, "bf16.enabled is yes; it must be true or false"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "both enabled"),
        ({"zero_optimization": {"offload_param": {"device": "disk"}}}, "it must be one of none, cpu, nvme, auto"),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme"}}},
            "offload_param.nvme_path, a directory",
        ),
        ({"fp16": {}, "optimizer": {"params": {"betas": [0.9]}}}, "it must be a list of 2 numbers"),
        ('{"bf16": ' * 900 + "1" + "}" * 900, "too deep"),
    ],
)
def test_convert_bad_input_is_refused(content: object, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ConfigError, match=str(path)) as refused:
        convert(path)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("content", "differing"),
    [
        (
            MEGATRAIN,
            {
                "model.dtype",
                "model.attn_implementation",
                "dataset.max_seq_len",
                "training.gradient_accumulation_steps",
                "training.weight_decay",
            },
        ),
        (INFINITY, {"optimizer.params.weight_decay"}),
        (
            LLAMA_FACTORY,
            {"cutoff_len", "per_device_train_batch_size", "template", "max_samples"},
        ),
        (AXOLOTL, {"sequence_len", "micro_batch_size", "optimizer"}),
        (ACCELERATE, {"deepspeed_config.gradient_accumulation_steps"}),
        (
            {
                "train_batch_size": "auto",
                "fp16": {"enabled": True, "loss_scale": 0},
                "optimizer": {"type": "AdamW", "params": {"lr": "auto", "bias_correction": False}},
                "aio": {"block_size": 1},
                "mine": 1,
            },
            {"train_batch_size", "fp16.enabled", "optimizer.params.lr", "optimizer.params.bias_correction", "mine"},
        ),
    ],
)
def test_convert_finds_the_keys_by_which_numbers_may_differ(
    content: object, differing: set[str], tmp_path: Path
) -> None:
    made = convert(written(tmp_path, content))
    assert {finding.key for finding in made.findings if finding.differs} == differing


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
    assert found.words.endswith("; not taken: split, train_on_eos")


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


def test_convert_accelerate(tmp_path: Path) -> None:
    made = convert(written(tmp_path, ACCELERATE))
    assert made.trainer == "accelerate"
    assert made.settings == {
        "model.compute_dtype": "bf16",
        "model.compile": True,
        "train.clip": 0.5,
        "tiers.nvme": ["/mnt/a", "/mnt/b"],
        "output.export": True,
        "output.export_dtype": "bf16",
    }
    assert "torchrun" in findings(made, "left")["num_processes"]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"mixed_precision": "no", "use_cpu": True}, {"model.compute_dtype": "fp32", "tiers.device": "cpu"}),
        ({"mixed_precision": False}, {"model.compute_dtype": "fp32"}),
        ({"mixed_precision": "fp8"}, {"model.compute_dtype": "bf16", "numerics.products": "fp8"}),
        ({"mixed_precision": "fp16"}, {}),
        ({"fsdp_config": {"fsdp_activation_checkpointing": True}}, {"train.activations": "recompute"}),
        ({"deepspeed_config": {"offload_param_nvme_path": "none", "gradient_clipping": "auto"}}, {}),
        ({"dynamo_config": {"dynamo_backend": "EAGER"}}, {}),
    ],
)
def test_convert_accelerate_values(more: dict[str, Any], expected: dict[str, object], tmp_path: Path) -> None:
    content = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", **more}
    assert settings(tmp_path, content) == expected


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
