"""`megatier convert`: what MegaTrain's and DeepSpeed's files become, and what all converters share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from converted import ACCELERATE, AXOLOTL, INFINITY, LLAMA_FACTORY, MEGATRAIN, Z3_OFFLOAD, findings, settings, written

from megatier.convert.source import convert
from megatier.errors import ConfigError

MICRO = "train_micro_batch_size_per_gpu"


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
    assert all(finding.explanation and "\n" not in str(finding) for finding in made.findings)
    assert not any("known here" in finding.explanation for finding in made.findings), (
        "each of them has a reason of its own"
    )


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


def test_convert_of_a_key_that_comes_twice_in_yaml_names_one_remedy(tmp_path: Path) -> None:
    path = written(tmp_path, "a: 1\na: 2\n")
    with pytest.raises(ConfigError, match=r"no valid YAML: a is given twice, again in line 2\. Remove one of them\.$"):
        convert(path)


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


@pytest.mark.parametrize("content", [LLAMA_FACTORY, AXOLOTL])
def test_convert_steps_that_are_no_whole_number_are_refused(content: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_steps.*whole number"):
        convert(written(tmp_path, yaml.safe_load(content) | {"max_steps": 1.5}))


@pytest.mark.parametrize("more", [{}, {"max_steps": -1}])
@pytest.mark.parametrize("content", [LLAMA_FACTORY, AXOLOTL])
@pytest.mark.parametrize("key", ["eval_steps", "save_steps"])
def test_convert_share_of_steps_whose_number_is_not_known_is_refused(
    content: str, key: str, more: dict[str, int], tmp_path: Path
) -> None:
    source = yaml.safe_load(content)
    source.pop("max_steps", None)
    with pytest.raises(ConfigError, match=rf"{key} is 0\.1, a share of all steps.*Set max_steps"):
        convert(written(tmp_path, source | {key: 0.1} | more))
