"""A trainer that is handed a model on meta trains its folder, as the plain trainer does a loaded model."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from program_runs import folder_with_model
from safetensors.torch import load_file
from tiny_adapters import peft
from trainer_runs import Rows, arguments, logged
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer

from megatier.errors import ConfigError
from megatier.plugins.program_trainer import Opening, ProgramTraining, check_same_config, over

pytestmark = pytest.mark.filterwarnings("default")  # of PEFT and transformers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_with_model(tmp_path / "model")


def on_meta(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, device_map={"": "meta"})


def streamed_trainer(model: Any, folder: Path, opened: ExitStack, **options: Any) -> Any:
    section = {"tiers": {"gpu": 1 << 20, "ram": 1 << 20, "nvme": (f"{folder}:16MiB",)}}
    made: Any = over(Trainer, Opening(section, torch.float32, opened))
    assert issubclass(made, ProgramTraining)
    return made(model=model, args=arguments(folder / "run", **options), train_dataset=Rows(60))


def test_model_on_meta_is_trained_from_its_folder_as_a_loaded_one(folder: Path, tmp_path: Path) -> None:
    plain = Trainer(AutoModelForCausalLM.from_pretrained(folder), arguments(tmp_path / "a"), train_dataset=Rows(60))
    plain.train()
    with ExitStack() as opened:
        model = on_meta(folder)
        trainer = streamed_trainer(model, tmp_path, opened)
        trainer.train()
        model.save_pretrained(str(tmp_path / "saved"))
    assert logged(trainer, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-6)
    assert logged(trainer, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=1e-6)
    assert plain.model is not None
    found = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(torch.allclose(found[n].float(), p, rtol=0, atol=2e-6) for n, p in plain.model.named_parameters())


def test_what_a_program_has_frozen_stays_frozen_and_is_run_again_if_it_says_so(folder: Path, tmp_path: Path) -> None:
    model = on_meta(folder)
    model.model.embed_tokens.requires_grad_(False)
    model.gradient_checkpointing_enable()
    with ExitStack() as opened:
        trainer = streamed_trainer(model, tmp_path, opened, max_steps=1)
        trainer.train()
        trained = {name: one.requires_grad for name, one in trainer.streamed.model.named_parameters()}
        expected = {name: one.requires_grad for name, one in model.named_parameters()}
        assert trained == expected
        before = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
        assert torch.equal(trainer.streamed.read("model.embed_tokens.weight"), before)


def test_adapters_on_meta_are_trained_and_saved_as_adapters(folder: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(on_meta(folder), config)
    with ExitStack() as opened:
        trainer = streamed_trainer(model, tmp_path, opened, max_steps=2)
        trainer.train()
        model.save_pretrained(str(tmp_path / "saved"))
    found = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert len(found) == 6
    assert any(value.count_nonzero() for name, value in found.items() if "lora_B" in name)


def test_model_that_was_changed_after_loading_is_refused(folder: Path, tmp_path: Path) -> None:
    model = on_meta(folder)
    model.config.rope_parameters["rope_theta"] = 5.0
    with (
        ExitStack() as opened,
        pytest.raises(ConfigError, match=r"rope_parameters\.rope_theta is 5\.0 here"),
    ):
        streamed_trainer(model, tmp_path, opened)


def test_entries_of_a_config_that_change_no_training_may_differ() -> None:
    check_same_config(LlamaConfig(use_cache=False, max_position_embeddings=9, pad_token_id=3), LlamaConfig())
    with pytest.raises(ConfigError, match="the model's vocab_size is 40 here and 32000 in its folder"):
        check_same_config(LlamaConfig(vocab_size=40), LlamaConfig())
