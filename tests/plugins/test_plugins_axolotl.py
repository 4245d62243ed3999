"""Axolotl with megatier's plugin, against itself without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import program_runs
import pytest
import torch
import yaml
from program_runs import RANK, SEED, TARGETS, GivenAdapters, first_adapters, folder_with_model, logged, records
from safetensors.torch import load_file

pytest.importorskip("axolotl")
from axolotl.integrations.base import BasePlugin

from megatier.errors import ConfigError
from megatier.plugins.axolotl import MegatierPlugin
from megatier.plugins.refusals import AXOLOTL_KERNELS

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.slow]  # Axolotl is slow to import
PLUGIN = "megatier.plugins.axolotl.MegatierPlugin"
LORA: dict[str, Any] = {"adapter": "lora", "lora_r": RANK, "lora_alpha": 2 * RANK, "lora_target_modules": TARGETS}


class GivenAdaptersPlugin(BasePlugin):
    """Axolotl's way to a callback."""

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        return [GivenAdapters()]


def axolotl(folder: Path, name: str, adapters: Path | None = None, **settings: Any) -> Path:
    """Train for four steps; the folder of the output."""
    config = {
        "base_model": str(folder / "model"),
        "datasets": [{"path": str(folder / "rows.jsonl"), "ds_type": "json", "type": "alpaca"}],
        "dataset_prepared_path": str(folder / f"prepared-{name}"),
        "output_dir": str(folder / name),
        "sequence_len": 512,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_epochs": 1,
        "max_steps": 4,
        "optimizer": "adamw_torch",
        "lr_scheduler": "cosine",
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "bf16": False,
        "tf32": False,
        "logging_steps": 1,
        "save_steps": 4,
        "seed": SEED,
        **settings,
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config))
    program_runs.run("-m", "axolotl.cli.main", "train", str(file), "--launcher", "python", adapters=adapters)
    return folder / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("axolotl")
    folder_with_model(folder / "model")
    records(folder / "rows.jsonl")
    return folder


def tiers(folder: Path) -> dict[str, Any]:
    return {"gpu": "1MiB", "ram": "2MiB", "nvme": [f"{folder}:16MiB"]}


def test_axolotl_with_the_plugin_trains_as_without_it(folder: Path) -> None:
    plain = axolotl(folder, "plain")
    streamed = axolotl(folder, "streamed", plugins=[PLUGIN], megatier={"tiers": tiers(folder)})
    for key in ("loss", "grad_norm", "learning_rate"):
        assert logged(streamed / "checkpoint-4", key) == pytest.approx(logged(plain / "checkpoint-4", key), rel=1e-6)
    expected, found = (load_file(path / "model.safetensors") for path in (plain, streamed))
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name].float(), value, rtol=0, atol=2e-6) for name, value in expected.items())


def test_axolotl_with_the_plugin_trains_adapters_as_without_it(folder: Path) -> None:
    adapters = first_adapters(folder / "model", folder / "adapters.safetensors")
    kernels: dict[str, Any] = dict.fromkeys(AXOLOTL_KERNELS, False)
    plugins = ["test_plugins_axolotl.GivenAdaptersPlugin"]
    plain = axolotl(folder, "plain-lora", adapters, plugins=plugins, **LORA, **kernels)
    section = {"tiers": tiers(folder)}
    streamed = axolotl(folder, "streamed-lora", plugins=[PLUGIN], megatier=section, gradient_checkpointing=True, **LORA)
    for key in ("loss", "grad_norm", "learning_rate"):
        assert logged(streamed / "checkpoint-4", key) == pytest.approx(logged(plain / "checkpoint-4", key), rel=1e-5)
    expected, found = (load_file(path / "adapter_model.safetensors") for path in (plain, streamed))
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], value, rtol=0, atol=1e-5) for name, value in expected.items())


def test_plugin_refuses_settings_as_it_is_registered() -> None:
    config: dict[str, Any] = {"plugins": [PLUGIN], "megatier": {"tiers": {"ram": "1GiB"}}}
    MegatierPlugin().register(config)
    assert config["lora_qkv_kernel"] is False
    with pytest.raises(ConfigError, match="deepspeed: places the weights"):
        MegatierPlugin().register({**config, "lora_qkv_kernel": None, "deepspeed": "zero3.json"})
    with pytest.raises(ConfigError, match=r"unknown setting tiers\.rma"):
        MegatierPlugin().register({**config, "megatier": {"tiers": {"rma": "1GiB"}}})
