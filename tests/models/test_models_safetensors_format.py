"""Safetensors files of strangers: headers and indices that are refused, and constant memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from model_folders import NORM, fresh, reader, skeleton_of
from warm_python import WarmPython

from megatier.errors import TransferError, UnsupportedModelError
from megatier.models import weights
from megatier.models.decoder import find_units
from megatier.models.export import export
from megatier.models.safetensors_format import read_header
from megatier.models.weights import SafetensorsFolder


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tensors of tiny models come in several pieces too."""
    monkeypatch.setattr(weights, "READ_ELEMENTS", 1000)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A small checkpoint in one file."""
    model, units, blocks = fresh("llama")
    export(tmp_path / "llama", model, units, reader(blocks), torch.float32, 1 << 30)
    return tmp_path / "llama"


def header(entries: object, data: bytes = bytes(64)) -> bytes:
    raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cut off"),
        (b"\x08\x00", "cut off"),
        ((1 << 63).to_bytes(8, "little") + b"{}", "cut off"),
        (header(b"{"), "no valid JSON"),
        (header(b"\xff\xfe"), "no valid JSON"),
        (header(b"[" * 100_000), "no valid JSON"),
        (header(b'{"a":1,"a":2}'), "a key comes twice"),
        (header([]), "no JSON object"),
        (header({"a": 1}), "entry for tensor a is malformed"),
        (header({"a": entry(dtype=None)}), "entry for tensor a is malformed"),
        (header({"a": entry(data_offsets=[0])}), "entry for tensor a is malformed"),
        (header({"a": entry(data_offsets=[56, 72])}), "tensor a lies outside the file"),
        (header({"a": entry(data_offsets=[-16, 0])}), "tensor a lies outside the file"),
        (header({"a": entry(data_offsets=[16, 0])}), "tensor a lies outside the file"),
        (header({"a": entry(data_offsets=[0.0, 16])}), "tensor a lies outside the file"),
        (header({"a": entry(shape=[-4])}), "tensor a lies outside the file"),
        (header({"a": entry(shape=[True])}), "tensor a lies outside the file"),
        (header({"a": entry(shape=[1 << 63])}), "tensor a lies outside the file"),
        (header({"a": entry(shape=[1 << 62] * 99)}), "tensor a lies outside the file"),
        (header({"a": entry(shape=[5])}), r"tensor a has 16 bytes, which is not F32 of shape \(5,\)"),
        (header({"a": entry(dtype="BF16")}), "tensor a has 16 bytes"),
        (header({"a": entry(), "b": entry(data_offsets=[12, 28])}), "tensors a and b overlap"),
    ],
)
def test_header_hostile_is_refused_by_file_and_tensor(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("file_name", ["../model.safetensors", "/etc/passwd", "..", "", "absent.safetensors"])
def test_checkpoint_index_that_leaves_the_folder_is_refused(file_name: str, llama: Path, tmp_path: Path) -> None:
    (llama / "model.safetensors").rename(tmp_path / "model.safetensors")
    index = llama / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {NORM: file_name}}))
    with pytest.raises(UnsupportedModelError, match="is no file in this folder"):
        SafetensorsFolder(llama, skeleton_of(llama))


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_checkpoint_index_malformed_is_refused(content: str, llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    (llama / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UnsupportedModelError, match="index"):
        SafetensorsFolder(llama, skeleton_of(llama))


def test_checkpoint_tensor_that_only_the_index_knows_is_refused(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "one.safetensors")
    weight_map = {NORM: "one.safetensors", "model.ghost": "one.safetensors"}
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UnsupportedModelError, match=r"one\.safetensors: tensor model\.ghost is missing"):
        SafetensorsFolder(llama, skeleton_of(llama))


def test_checkpoint_folder_without_weights_is_refused(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match=r"neither model\.safetensors nor"):
        SafetensorsFolder(llama, skeleton_of(llama))


def test_checkpoint_file_cut_while_reading_is_a_transfer_error(llama: Path) -> None:
    model = skeleton_of(llama)
    checkpoint, unit = SafetensorsFolder(llama, model), find_units(model)[-1]
    with (llama / "model.safetensors").open("r+b") as file:
        file.truncate(read_header(llama / "model.safetensors")["lm_head.weight"].offset + 100)
    with pytest.raises(TransferError, match=r"model\.safetensors at byte"):
        list(checkpoint.read(unit))


BIG_FILE = """
import resource, sys
from pathlib import Path
from typing import Any
from transformers import AutoConfig
from megatier.models.decoder import build_skeleton, find_units
from megatier.models.safetensors_format import write_header
from megatier.models.weights import SafetensorsFolder
import torch

folder = Path(sys.argv[1])
config = AutoConfig.for_model("llama", vocab_size=63488, hidden_size=1024, intermediate_size=64, num_hidden_layers=1,
                              num_attention_heads=1, num_key_value_heads=1, head_dim=2, tie_word_embeddings=True)
model = build_skeleton(config, "sdpa")
header = write_header((name, torch.float32, tuple(p.shape)) for name, p in model.named_parameters())
path = folder / "model.safetensors"
path.write_bytes(header)
with path.open("r+b") as file:
    file.truncate(len(header) + 4 * sum(p.numel() for p in model.parameters()))
assert path.stat().st_size > 256_000_000
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
checkpoint = SafetensorsFolder(folder, model)
elements = sum(piece.numel() for unit in find_units(model) for _, piece in checkpoint.read(unit))
assert elements == sum(p.numel() for p in model.parameters())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_checkpoint_large_file_is_read_in_constant_memory(tmp_path: Path, python: WarmPython) -> None:
    result = python.run(["-c", BIG_FILE, tmp_path])
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[-1]) < 64 << 10, "KiB of memory more than before"
