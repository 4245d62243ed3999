"""TRL's trainers with `peft_config` over a streamed model, whose reference is the model without its adapters."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from streamed_loops import TIERS
from tiny_adapters import STACKS, peft
from tiny_models import tiny_config
from tiny_runs import exactness_config, plain_model
from trainer_runs import logged
from transformers import AutoModelForCausalLM, Trainer, set_seed

import megatier
from megatier.errors import ConfigError

pytest.importorskip("trl")

import test_integrations_grpo as grpo
from test_integrations_trl_trainer import (
    TRAINERS,
    build,
    check_takes_the_same_steps,
    steps_of,
    streamed_class,
    tokenizer,
)

pytestmark = pytest.mark.filterwarnings("default")  # of TRL and datasets
FP32 = {"compute_dtype": "fp32", "compile": False}
KINDS = ("sft", "dpo", "kto", "grpo", "grpo_beta")
"""Trainers; of GRPO without a reference and with one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model."""
    path = tmp_path_factory.mktemp("model")
    plain_model(exactness_config("plain")).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


def lora(**settings: Any) -> Any:
    """Adapters as a script of TRL's asks for them."""
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "up_proj"], **settings)


def adapted(folder: str, *, is_trained: bool = False) -> Any:
    """A `PeftModel` in RAM."""
    set_seed(1)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), lora())
    for parameter in model.parameters():
        if is_trained and parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.02)
    return model


def made(make: Any, kind: str, model: Any, output: Path, *, device: str = "cpu", **given: Any) -> Trainer:
    """A trainer of ten steps without clipping, over a folder or a model. Of GRPO with a reference and without."""
    if kind.startswith("grpo"):

        def start(model: Any, *args: Any, **kwargs: Any) -> Trainer:
            trainer: Trainer = make(model, *args, **kwargs, **given)
            return trainer

        return grpo.trainer(start, model, output, device, beta=0.5 if kind == "grpo_beta" else 0.0)
    if kind != "sft":
        given = {"ref_model": None, **given}
    return build(make, model, kind, output, given=given, max_grad_norm=0.0, use_cpu=device == "cpu")


def makers(kind: str) -> tuple[Any, Any]:
    """TRL's trainer, and the same over a streamed model."""
    return (grpo.PLAIN, grpo.STREAMED) if kind.startswith("grpo") else (TRAINERS[kind], streamed_class(kind))


DROPPED = {"lora_dropout": 0.1, "use_rslora": True}


# On a GPU PEFT computes the first magnitudes of DoRA there, where sums have another order than on a CPU.
@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    ("kind", "settings", "device"),
    [
        *itertools.product(KINDS, ({}, {"use_dora": True, **DROPPED}), ["cpu"]),
        *(pytest.param(kind, settings, "cuda", marks=pytest.mark.gpu) for kind in KINDS for settings in ({}, DROPPED)),
    ],
)
def test_trl_with_peft_config_takes_the_steps_of_the_plain_trainer_bit_for_bit(
    kind: str, settings: dict[str, Any], device: Any, folder: str, tmp_path: Path
) -> None:
    path = grpo.saved(tmp_path) if kind.startswith("grpo") else folder
    make, make_streamed = makers(kind)
    plain = made(make, kind, path, tmp_path / "plain", device=device, peft_config=lora(**settings))
    options = {"tiers": replace(TIERS, device=device), "stream_kwargs": FP32}
    trainer: Any = made(make_streamed, kind, path, tmp_path, device=device, peft_config=lora(**settings), **options)
    with trainer.streamed as streamed:
        assert getattr(trainer, "ref_model", None) is None
        check_takes_the_same_steps(plain, trainer, streamed)


def test_trl_with_peft_config_adapts_experts_as_the_plain_trainer_does_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "model"
    plain_model(tiny_config("qwen3_moe", vocab_size=len(tokenizer()))).save_pretrained(path)
    tokenizer().save_pretrained(path)
    make, make_streamed = makers("sft")
    config = lora(target_parameters=list(STACKS))
    config.target_modules = {"q_proj"}
    plain = made(make, "sft", str(path), tmp_path / "plain", peft_config=config)
    given = {"tiers": TIERS, "stream_kwargs": FP32, "peft_config": config}
    trainer: Any = made(make_streamed, "sft", str(path), tmp_path / "streamed", **given)
    with trainer.streamed as streamed:
        check_takes_the_same_steps(plain, trainer, streamed)


def test_trl_with_clipping_and_the_adamw_of_torch_differs_by_last_digits(folder: str, tmp_path: Path) -> None:
    found = []
    for make, options in zip(makers("dpo"), ({}, {"tiers": TIERS, "stream_kwargs": FP32}), strict=True):
        given = {"peft_config": lora(), "ref_model": None, **options}
        found.append(steps_of(build(make, folder, "dpo", tmp_path, given=given, max_grad_norm=0.01)))
    assert found[0][0][0] == found[1][0][0]
    for plain, streamed in zip(*found, strict=True):
        assert streamed == pytest.approx(plain, rel=1e-6)


def test_trl_over_a_model_that_was_streamed_with_peft_config_takes_the_base_for_its_reference(
    folder: str, tmp_path: Path
) -> None:
    found = []
    for reference in (None, plain_model(exactness_config("plain"))):
        options: dict[str, Any] = {"compute_dtype": "fp32", "fused_loss": False, "accumulation_steps": 2}
        with megatier.stream(folder, tiers=TIERS, peft_config=lora(), seed=5, **options) as streamed:
            given = {"ref_model": reference}
            found.append(steps_of(build(streamed_class("dpo"), streamed, "dpo", tmp_path, max_steps=3, given=given)))
            with pytest.raises(ConfigError, match="has one adapter, and another one, 'ref'"):
                build(streamed_class("dpo"), streamed, "dpo", tmp_path, given={"ref_model": None})
    assert found[0] == found[1]


def test_trl_with_peft_config_evaluates_saves_and_goes_on_bit_for_bit(folder: str, tmp_path: Path) -> None:
    found: list[list[list[float]]] = []
    for resumed in (None, str(tmp_path / "run" / "checkpoint-4")):
        given = {"peft_config": lora(), "ref_model": None, "tiers": TIERS, "stream_kwargs": FP32}
        options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4, "max_steps": 6}
        trainer: Any = build(streamed_class("dpo"), folder, "dpo", tmp_path / "run", given=given, **options)
        with trainer.streamed:
            trainer.train(resume_from_checkpoint=resumed)
            found.append([logged(trainer, "loss"), logged(trainer, "grad_norm")])
            assert trainer.evaluate(trainer.train_dataset.select(range(8)))["eval_rewards/margins"] != 0
            trainer.save_model(str(tmp_path / "saved"))
    assert found[0] == found[1], "the state of a Trainer's checkpoint has the logs of the steps before"

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    saved = peft.PeftModel.from_pretrained(base, tmp_path / "saved")
    assert any(parameter.any() for name, parameter in saved.named_parameters() if ".lora_B." in name)


@pytest.mark.parametrize("kind", ["dpo", "kto", "grpo_beta"])
def test_trl_that_asks_for_a_second_adapter_as_its_reference_is_refused(kind: str, folder: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"tiers": TIERS, "accumulation_steps": 2, "fused_loss": False, **FP32}
    with (
        megatier.stream(adapted(folder, is_trained=True), **settings) as streamed,
        pytest.raises(ConfigError, match=r"asked for\. TRL does so .* give ref_model\. The reference of new ones"),
    ):
        made(makers(kind)[1], kind, streamed, tmp_path)


def test_trl_with_peft_config_for_a_model_that_is_streamed_already_is_refused(folder: str, tmp_path: Path) -> None:
    make = streamed_class("sft")
    with (
        megatier.stream(folder, tiers=TIERS, accumulation_steps=2, fused_loss=False) as streamed,
        pytest.raises(ConfigError, match=r"peft_config: megatier\.stream has opened this model already"),
    ):
        made(make, "sft", streamed, tmp_path, peft_config=lora())
    with pytest.raises(ConfigError, match="peft_config comes twice"):
        made(make, "sft", folder, tmp_path, peft_config=lora(), stream_kwargs={"peft_config": lora()})
    with pytest.raises(ConfigError, match="init_lora_weights to 'gaussian'"):
        made(make, "sft", folder, tmp_path, peft_config=lora(init_lora_weights="gaussian"))
    with pytest.raises(ConfigError, match="peft_config is a dict; it must be a LoraConfig"):
        made(make, "sft", folder, tmp_path, peft_config={"r": 4})


def test_trl_takes_a_streamed_model_with_adapters_for_a_peft_model_with_one_of_them(
    folder: str, tmp_path: Path
) -> None:
    trainer: Any = made(streamed_class("sft"), "sft", folder, tmp_path, peft_config=lora(), tiers=TIERS)
    with trainer.streamed as streamed:
        model = trainer.model
        assert isinstance(model, peft.PeftModel)
        assert model.get_base_model() is streamed.model
        assert model.active_adapters == ["default"]
        assert model.to(streamed.device) is model
        model.set_adapter("default")
        for ask in (model.add_adapter, model.load_adapter, model.set_adapter):
            with pytest.raises(ConfigError, match="a streamed model has one adapter, and another one, 'other'"):
                ask("other")
