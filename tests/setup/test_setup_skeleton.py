"""A run's model without its weights: what of a hub repository it is made from."""

from __future__ import annotations

import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from small_commands import command
from tiny_adapters import base_folder
from tiny_quantised import quantised_folders

from megatier.cli import main
from megatier.config.schema import ModelConfig
from megatier.setup.skeleton import model_config_of, skeleton_of

NAME = "someone/model"


class Hub:
    """A stand-in for the hub's client, with one repository. A file is downloaded once, into a snapshot."""

    def __init__(self, repository: Path, cache: Path) -> None:
        self._repository = repository
        self._snapshot = cache / "snapshots" / "1"
        self._snapshot.mkdir(parents=True)

    def download(self, repo_id: str, allow_patterns: list[str]) -> str:
        assert repo_id == NAME
        for file in self._repository.iterdir():
            is_asked = any(fnmatch(file.name, pattern) for pattern in allow_patterns)
            if is_asked and not (self._snapshot / file.name).exists():
                shutil.copy(file, self._snapshot)
        return str(self._snapshot)

    def has_weights(self) -> bool:
        return any(self._snapshot.glob("*.safetensors"))


def hub_of(repository: Path, tmp_path: Path, patch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(repository, tmp_path / "cache")
    patch.setattr("huggingface_hub.snapshot_download", hub.download)
    return hub


@pytest.mark.parametrize("lora", [{}, {"model.lora.rank": 2}])
def test_plan_of_a_model_of_the_hub_downloads_no_weights(
    lora: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = hub_of(base_folder(tmp_path / "repository"), tmp_path, monkeypatch)
    words = command(tmp_path, {"model.path": NAME, "data.tokenizer": "bytes", **lora})
    config = tmp_path / "run.yaml"
    config.write_text(f"model: {{path: {NAME}}}")
    assert main(["plan", str(config), *words[1:]]) == 0, capsys.readouterr().err
    assert not hub.has_weights()

    assert main(words) == 0, capsys.readouterr().err
    assert hub.has_weights()


def test_skeleton_of_a_quantised_base_of_the_hub_is_made_from_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised, _ = quantised_folders(tmp_path, "channel")
    hub = hub_of(quantised, tmp_path, monkeypatch)
    config = ModelConfig(path=NAME, lora={"rank": 2})
    model_config = model_config_of(config)
    assert not hub.has_weights()
    skeleton_of(config, model_config)
    assert hub.has_weights()
