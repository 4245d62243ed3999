"""Datasets that the library `datasets` loads: out of folders, and what is said where one cannot be had."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatier.config.data_section import DataConfig
from megatier.data import hub
from megatier.data.packed_text import PackedText
from megatier.data.text import read_documents
from megatier.data.tokenizer import byte_tokenizer
from megatier.errors import DataError

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setattr(importlib.import_module(module), "HF_HUB_OFFLINE", True)


def write(folder: Path, split: str, texts: list[str]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{split}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def test_documents_of_a_folder_are_those_of_its_split(tmp_path: Path) -> None:
    write(tmp_path / "set", "train", ["one", "", "two"])
    write(tmp_path / "set", "test", ["three"])
    config = DataConfig(dataset=str(tmp_path / "set"))
    assert list(read_documents(config)) == ["one", "two"]
    assert list(read_documents(config, "test")) == ["three"]
    assert list(read_documents(DataConfig(dataset=str(tmp_path / "set"), split="train[1:]+test"))) == ["two", "three"]


def test_build_holds_out_the_split_that_is_named(tmp_path: Path) -> None:
    write(tmp_path / "set", "train", ["abc"] * 20)
    write(tmp_path / "set", "validation", ["xyz"] * 3)
    config = DataConfig(dataset=str(tmp_path / "set"), holdout_split="validation", sequence_length=4, tokenizer="bytes")
    text = PackedText.build(config, byte_tokenizer(), tmp_path / "run")
    assert (text.num_tokens, text.held_out.num_tokens) == (80, 12)
    assert {bytes(row[:3]) for batch in text.holdout(2) for row in batch["input_ids"].tolist()} == {b"xyz"}


def test_build_of_too_little_text_says_so(tmp_path: Path) -> None:
    write(tmp_path / "set", "train", ["abc"])
    config = DataConfig(dataset=str(tmp_path / "set"), holdout_fraction=0, sequence_length=99, tokenizer="bytes")
    with pytest.raises(DataError, match=r"has 4 tokens to train on, .* 99\. Give it more text or lower"):
        PackedText.build(config, byte_tokenizer(), tmp_path / "run")


def test_documents_malformed_row_names_dataset_split_and_row(tmp_path: Path) -> None:
    write(tmp_path / "set", "train", ["one", "two"])
    with pytest.raises(DataError, match=r"set \(train\), row 1, row 2: no text under 'body'"):
        list(read_documents(DataConfig(dataset=str(tmp_path / "set"), text_field="body")))


def test_documents_of_a_dataset_without_text_says_so(tmp_path: Path) -> None:
    write(tmp_path / "set", "train", ["", ""])
    with pytest.raises(DataError, match=r"no text in .*set. Check data.dataset, data.split"):
        list(read_documents(DataConfig(dataset=str(tmp_path / "set"))))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "nope"}, r"set cannot be loaded: .*nope.*train.* Check data\.dataset"),
        ({"subset": "nope"}, r"set cannot be loaded: BuilderConfig 'nope' not found"),
        ({"dataset": "/no/such/folder"}, r"/no/such/folder cannot be loaded: Couldn't find"),
    ],
)
def test_load_what_is_not_there_says_what_is(
    tmp_path: Path, settings: dict[str, Any], message: str, streaming: bool
) -> None:
    write(tmp_path / "set", "train", ["one"])
    config = DataConfig(**{"dataset": str(tmp_path / "set"), "streaming": streaming, **settings})
    with pytest.raises(DataError, match=message):
        (hub.stream if streaming else hub.load)(config, config.split)


@pytest.mark.usefixtures("_offline")
@pytest.mark.parametrize("load", [hub.load, hub.stream])
def test_load_without_a_network_tells_the_way_round(load: Any) -> None:
    with pytest.raises(DataError, match=r"org/name cannot be loaded: Couldn't reach .*hf download --repo-type dataset"):
        load(DataConfig(dataset="org/name"), "train")


def test_load_without_the_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs the library datasets: pip install 'megatier\[datasets\]'"):
        hub.load(DataConfig(dataset="org/name"), "train")


def test_load_damaged_file_says_which_dataset(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.parquet").write_bytes(np.arange(99).tobytes())
    with pytest.raises(DataError, match=r"data\.dataset: .*set cannot be loaded"):
        hub.load(DataConfig(dataset=str(tmp_path / "set")), "train")


def test_stream_of_a_branch_that_moved_goes_on_at_its_commit(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "support" / "small_hub.py"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    made = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout) == {
        "rows": [90, "old 0", "old 89"],
        "is_same": True,
        "commits": ["a" * 40, "a" * 40, "b" * 40],
    }
