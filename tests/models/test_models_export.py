from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from model_folders import fresh, reader
from safetensors import safe_open
from test_durable import watched
from test_models_weights import SHARD_BYTES, stored_tensors
from torch import Tensor

from megatier.errors import ConfigError, TransferError
from megatier.models import weights
from megatier.models.decoder import Unit
from megatier.models.export import export, export_bytes
from megatier.models.safetensors_format import read_header


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tensors of tiny models go out in several pieces too."""
    monkeypatch.setattr(weights, "READ_ELEMENTS", 1000)


def test_export_bf16_rounds_to_nearest_even_as_torch_does(tmp_path: Path) -> None:
    model, units, blocks = fresh("llama")
    blocks["model.norm"][:2] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])
    export(tmp_path / "out", model, units, reader(blocks), torch.bfloat16, 1 << 30)
    assert stored_tensors(tmp_path / "out")["model.norm.weight"][:2].tolist() == [1.0, 1 + 2**-6]


def test_export_one_file_has_no_index_and_says_its_format(tmp_path: Path) -> None:
    model, units, blocks = fresh("llama")
    llama = tmp_path / "llama"
    export(llama, model, units, reader(blocks), torch.float32, 1 << 30)
    assert {path.name for path in llama.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    with safe_open(llama / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    config = json.loads((llama / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float32"
    assert config["use_cache"] is True


def test_export_shards_stay_below_the_limit_and_the_index_lists_all(tmp_path: Path) -> None:
    model, units, blocks = fresh("llama")
    export(tmp_path / "out", model, units, reader(blocks), torch.bfloat16, SHARD_BYTES)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = {path.name: read_header(path) for path in (tmp_path / "out").glob("*.safetensors")}
    assert len(files) > 2
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    sizes = {file: sum(tensor.num_bytes for tensor in tensors.values()) for file, tensors in files.items()}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert all(size <= SHARD_BYTES for size in sizes.values())


def test_export_tied_head_is_stored_once(tmp_path: Path) -> None:
    model, units, blocks = fresh("llama_tied")
    export(tmp_path / "out", model, units, reader(blocks), torch.float32, 1 << 30)
    assert "lm_head.weight" not in stored_tensors(tmp_path / "out")


def test_export_folder_with_files_is_refused_and_untouched(tmp_path: Path) -> None:
    model, units, blocks = fresh("llama")
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="not empty"):
        export(tmp_path, model, units, reader(blocks), torch.float32, 1 << 30)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_export_failing_read_leaves_nothing_behind(tmp_path: Path) -> None:
    model, units, blocks = fresh("llama")

    def read(unit: Unit, start: int, stop: int) -> Tensor:
        if unit.name == "model.layers.2":
            raise TransferError("read", "nvme", "/mnt/x", 4096, 5)
        return blocks[unit.name][start:stop]

    with pytest.raises(TransferError, match="/mnt/x at byte 4096"):
        export(tmp_path / "out", model, units, read, torch.float32, 1 << 30)
    assert list(tmp_path.iterdir()) == []


def test_export_full_disk_is_a_transfer_error_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, units, blocks = fresh("llama")

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(TransferError, match=r"writing the export failed.*No space left"):
        export(tmp_path / "out", model, units, reader(blocks), torch.float32, 1 << 30)
    assert list(tmp_path.iterdir()) == []


def test_export_is_on_the_drive_before_it_has_its_name(tmp_path: Path) -> None:
    model, units, blocks = fresh("llama")
    calls: list[tuple[str, list[str]]] = []

    def see(name: str, args: tuple[Any, ...]) -> None:
        if name != "discard":
            calls.append((name, sorted(path.name for path in args[0].iterdir())))

    with pytest.MonkeyPatch.context() as patch:
        watched(patch, see)
        export(tmp_path / "out", model, units, reader(blocks), torch.float32, 1 << 30)
    files = ["config.json", "generation_config.json", "model.safetensors"]
    assert calls == [("sync_tree", files), ("rename", files), ("sync_tree", ["out"])]


@pytest.mark.parametrize("what", ["sync_tree", "rename"])
def test_export_that_a_drive_refuses_leaves_nothing_behind(what: str, tmp_path: Path) -> None:
    model, units, blocks = fresh("llama")

    def refuse(name: str, _: tuple[Any, ...]) -> None:
        if name == what:
            raise OSError(errno.EIO, "Input/output error")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(TransferError, match="Check the drive"):
        watched(patch, refuse)
        export(tmp_path / "out", model, units, reader(blocks), torch.float32, 1 << 30)
    assert list(tmp_path.iterdir()) == []


def test_export_removes_what_killed_processes_left_of_it_alone(tmp_path: Path) -> None:
    model, units, blocks = fresh("llama")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    gone = [f".out.{dead.pid}.partial", f".out.{os.getpid()}.partial"]
    stays = [".out.1.partial", ".other.1.partial", f".out.b.{dead.pid}.partial", ".out.x.partial"]
    for name in (*gone, *stays):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
    export(tmp_path / "out", model, units, reader(blocks), torch.float32, 1 << 30)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*stays, "out"])
    assert len(list((tmp_path / "out").iterdir())) == 3


def test_export_bytes_are_those_of_the_weights_that_are_written(tmp_path: Path) -> None:
    model, units, blocks = fresh("llama")
    export(tmp_path / "out", model, units, reader(blocks), torch.bfloat16, SHARD_BYTES)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert export_bytes(model, units, torch.bfloat16) == index["metadata"]["total_size"]
