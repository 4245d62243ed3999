"""`megatier export --merge`: adapters merged into their base in pieces are those that PEFT merges in RAM."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_commands import command
from tiny_adapters import STACKS, base_folder, peft, stored_adapter
from tiny_gradients import attention_of
from tiny_models import tiny_config
from tiny_runs import plain_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

import megatier
from megatier.adapters.lora import ADAPTER
from megatier.cli import main
from megatier.config.schema import TiersConfig
from megatier.data.tokenizer import byte_tokenizer
from megatier.models import weights


@pytest.fixture(autouse=True)
def _small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "READ_ELEMENTS", 700)


def base_of(config: PretrainedConfig, folder: Path) -> Path:
    plain_model(config, attention_of(config)).bfloat16().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def merged_by_peft(base: Path, adapter: Path) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT asks transformers by a name that it gives up
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(plain, adapter).merge_and_unload()
    return dict(model.state_dict())


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", {"target_modules": ["q_proj", "down_proj", "lm_head", "embed_tokens"]}),
    "saved": ("llama", {"modules_to_save": ["lm_head", "model.norm"], "use_rslora": True}),
    "dora": ("llama_tied", {"use_dora": True}),
    "transposed": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "experts": ("qwen3_moe", {"target_modules": ["q_proj", "o_proj"]}),
    "stacks": ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": list(STACKS), "use_rslora": True}),
    "transposed stacks": ("gpt_oss", {"target_modules": [], "target_parameters": list(STACKS)}),
}


@pytest.mark.parametrize("case", CASES)
def test_export_merged_is_what_peft_merges_bit_for_bit(case: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    base = base_of(tiny_config(family, eos_token_id=2, bos_token_id=1), tmp_path / "base")
    adapter = stored_adapter(base, tmp_path / "adapter", **settings)
    out = tmp_path / "out"
    words = ["export", str(adapter), str(out), "--merge", "--dtype", "fp32", "--shard-size", "40KB"]
    assert main(words) == 0
    found = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
    expected = merged_by_peft(base, adapter)
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
    assert len(list(out.glob("*.safetensors"))) > 1
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).state_dict()
    assert any(not torch.equal(found[name], value) for name, value in plain.items())


def test_export_merged_of_a_run_without_a_checkpoint_takes_what_it_exported(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base")
    settings = {"model.path": str(base), "model.lora.rank": 4, "train.steps": 1, "output.checkpoint_every": 0}
    assert main(command(tmp_path, settings)) == 0
    for source, target in (("run", "a"), ("run/model", "b")):
        assert main(["export", str(tmp_path / source), str(tmp_path / target), "--merge"]) == 0
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("case", ["saved", "dora", "stacks", "transposed stacks"])
def test_hub_weights_over_adapters_are_what_peft_merges_bit_for_bit(case: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    base = base_of(tiny_config(family, eos_token_id=2, bos_token_id=1), tmp_path / "base")
    adapter = stored_adapter(base, tmp_path / "adapter", **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT asks transformers by a name that it gives up
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(plain, adapter, is_trainable=True)
        # What a model is trained with is what its layers have, whatever their config says.
        for wrapper in (module for module in model.modules() if hasattr(module, "lora_A")):
            wrapper.scaling[ADAPTER] = 3.0
        tiers = TiersConfig(device="cpu", gpu=8 << 20, ram=8 << 20)
        with megatier.stream(model, tiers=tiers, compute_dtype="fp32", fused_loss=False) as streamed:
            before = streamed.state_dict()
            found, again = dict(streamed.weights()), dict(streamed.weights())
            after = streamed.state_dict()
        model.merge_and_unload().save_pretrained(tmp_path / "merged")
    expected = load_file(tmp_path / "merged" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []
    assert [name for name, value in again.items() if not torch.equal(value, found[name])] == []
    assert [name for name, value in after.items() if not torch.equal(value, before[name])] == [], "nothing is merged"


def test_export_merged_of_a_run_is_that_of_its_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = base_folder(tmp_path / "base")
    settings = {"model.path": str(base), "model.lora.rank": 4, "train.steps": 2, "output.checkpoint_every": 2}
    assert main(command(tmp_path, settings)) == 0
    run = tmp_path / "run"
    assert main(["export", str(run), str(tmp_path / "a"), "--merge"]) == 0
    assert "model written to" in capsys.readouterr().out

    # The base may have gone elsewhere since.
    moved = base.rename(tmp_path / "moved")
    assert main(["export", str(run / "model"), str(tmp_path / "b"), "--merge", "--base", str(moved)]) == 0
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert one.keys() == other.keys()
    assert all(torch.equal(other[name], value) for name, value in one.items())
    assert main(["export", str(run / "model"), str(tmp_path / "c"), "--merge"]) == 2
    assert f"no such model folder: {base}" in " ".join(capsys.readouterr().err.split())


def test_export_merged_without_adapters_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path, {"train.steps": 1, "output.checkpoint_every": 1})) == 0
    for words, message in (
        (["--merge"], "has no adapters. Leave it out."),
        (["--merge", "--base", "x"], "--base: the run began with a new model, by model.config. Leave it out."),
        (["--base", "x"], "--base: the run began with a new model, by model.config. Leave it out."),
    ):
        assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), *words]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
