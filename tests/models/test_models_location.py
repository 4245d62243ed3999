"""Where a model lies: a folder, taken as it is, or downloaded from the hub."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatier.errors import ConfigError
from megatier.models.location import resolve


def test_resolve_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("path", ["/no/such/folder", "./model", "../model", "a/b/c", "~/no such model"])
def test_resolve_absent_path_is_no_hub_id(path: str) -> None:
    with pytest.raises(ConfigError, match="no such model folder"):
        resolve(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may be another user")
def test_resolve_folder_that_may_not_be_read_names_it(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    tmp_path.chmod(0o700)
    os.seteuid(65534)
    try:
        with pytest.raises(ConfigError, match=r"cannot read \S+/model: Permission denied\. Check your rights there"):
            resolve(str(tmp_path / "model"))
    finally:
        os.seteuid(0)


def test_resolve_unreachable_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(repo_id: str, allow_patterns: list[str]) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(ConfigError, match=r"someone/model is no local folder.*check the name, the network"):
        resolve("someone/model")


def test_resolve_hub_id_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def download(repo_id: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve("someone/model") == resolve("someone/model", weights=False) == tmp_path
    with_weights, without = asked
    assert set(with_weights) - set(without) == {"*.safetensors"}
    assert "*.json" in without
