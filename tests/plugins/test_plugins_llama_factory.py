"""LLaMA-Factory under megatier's launcher, against itself under its own."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import program_runs
import pytest
import torch
from program_runs import RANK, SEED, TARGETS, first_adapters, folder_with_model, logged, records
from safetensors.torch import load_file

from megatier.errors import ConfigError
from megatier.plugins import llama_factory

needs_it = pytest.mark.skipif(importlib.util.find_spec("llamafactory") is None, reason="LLaMA-Factory is not installed")
PLAIN = """
import json, sys
from llamafactory.train.tuner import run_exp
from program_runs import GivenAdapters
run_exp(json.loads(sys.argv[1]), [GivenAdapters()] if sys.argv[2] else [])
"""
LORA: dict[str, Any] = {"finetuning_type": "lora", "lora_rank": RANK, "lora_target": ",".join(TARGETS)}


def arguments(folder: Path, name: str, **settings: Any) -> dict[str, Any]:
    """Four steps."""
    return {
        "model_name_or_path": str(folder / "model"),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "rows",
        "dataset_dir": str(folder),
        "template": "default",
        "cutoff_len": 64,
        "output_dir": str(folder / name),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_steps": 4,
        "report_to": "none",
        "seed": SEED,
        **settings,
    }


def plain(folder: Path, name: str, adapters: Path | None = None, **settings: Any) -> Path:
    given = json.dumps(arguments(folder, name, **settings))
    program_runs.run("-c", PLAIN, given, "given" if adapters else "", adapters=adapters)
    return folder / name


def streamed(folder: Path, name: str, **settings: Any) -> Path:
    tiers = {"gpu": "1MiB", "ram": "2MiB", "nvme": [f"{folder}:16MiB"]}
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(arguments(folder, name, megatier={"tiers": tiers}, **settings)))
    program_runs.run("-m", "megatier.plugins.llama_factory", str(file))
    return folder / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama_factory")
    folder_with_model(folder / "model")
    records(folder / "rows.jsonl")
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.jsonl"}}))
    return folder


@needs_it
@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "freeze"])
def test_llama_factory_under_this_launcher_trains_as_under_its_own(method: str, folder: Path) -> None:
    given: dict[str, Any] = {
        "finetuning_type": method,
        **({"freeze_trainable_layers": 1} if method == "freeze" else {}),
    }
    expected, found = plain(folder, f"plain-{method}", **given), streamed(folder, f"streamed-{method}", **given)
    for key in ("loss", "grad_norm", "learning_rate"):
        assert logged(found, key) == pytest.approx(logged(expected, key), rel=1e-6)
    weights = [load_file(path / "model.safetensors") for path in (expected, found)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.allclose(weights[1][name], value, rtol=0, atol=2e-6) for name, value in weights[0].items())


@needs_it
@pytest.mark.slow
def test_llama_factory_under_this_launcher_trains_adapters_as_under_its_own(folder: Path) -> None:
    adapters = first_adapters(folder / "model", folder / "adapters.safetensors")
    expected, found = plain(folder, "plain-lora", adapters, **LORA), streamed(folder, "streamed-lora", **LORA)
    for key in ("loss", "grad_norm", "learning_rate"):
        assert logged(found, key) == pytest.approx(logged(expected, key), rel=1e-5)
    weights = [load_file(path / "adapter_model.safetensors") for path in (expected, found)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.allclose(weights[1][name], value, rtol=0, atol=1e-5) for name, value in weights[0].items())


@needs_it
@pytest.mark.slow
def test_llama_factory_under_this_launcher_pretrains(folder: Path) -> None:
    done = streamed(folder, "streamed-pt", stage="pt", bf16=True, use_cpu=True, packing=False)
    losses = logged(done, "loss")
    assert losses[-1] < losses[0]


def test_launcher_without_llama_factory_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llamafactory", None)
    monkeypatch.delitem(sys.modules, "llamafactory.train.tuner", raising=False)
    with pytest.raises(ConfigError, match=r"pip install llamafactory\."):
        llama_factory.run({})
