"""Datasets as LLaMA-Factory's `dataset_info.json` describes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatier.config.data_section import DataConfig
from megatier.data.conversation import Conversation
from megatier.data.text import read_documents
from megatier.errors import DataError

USER, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
OPENAI = {
    "formatting": "sharegpt",
    "columns": {"messages": "messages"},
    "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
}


def read(folder: Path, dataset: dict[str, Any], record: dict[str, Any]) -> list[str | Conversation]:
    (folder / "a.json").write_text(json.dumps([record]))
    info = folder / "dataset_info.json"
    info.write_text(json.dumps({"mine": {"file_name": "a.json", **dataset}}))
    return list(read_documents(DataConfig(files=(f"{info}#mine",))))


@pytest.mark.parametrize(
    ("dataset", "record"),
    [
        ({}, {"instruction": "Why?", "input": "", "output": "So.", "system": "not a column", "history": [["a", "b"]]}),
        ({"columns": {"prompt": "q", "response": "a"}, "split": "train"}, {"q": "Why?", "a": "So.", "input": "x"}),
        (
            {"formatting": "sharegpt"},
            {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]},
        ),
        (OPENAI, {"messages": [USER, ANSWER]}),
    ],
)
def test_describe_dataset_becomes_messages(tmp_path: Path, dataset: dict[str, Any], record: dict[str, Any]) -> None:
    [found] = read(tmp_path, dataset, record)
    assert isinstance(found, Conversation)
    assert found.messages == [USER, ANSWER]


def test_describe_columns_name_system_and_history(tmp_path: Path) -> None:
    columns = {"prompt": "instruction", "response": "output", "system": "who", "history": "before"}
    record = {"instruction": "Why?", "output": "So.", "who": "Be brief.", "before": [["a", "b"]]}
    [found] = read(tmp_path, {"columns": columns}, record)
    assert isinstance(found, Conversation)
    assert [message["content"] for message in found.messages] == ["Be brief.", "a", "b", "Why?", "So."]


def test_describe_text_for_pre_training_is_text(tmp_path: Path) -> None:
    assert read(tmp_path, {"columns": {"prompt": "body"}}, {"body": "words"}) == ["words"]


def test_describe_folder_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    for name in ("b.jsonl", "a.jsonl"):
        (tmp_path / "parts" / name).write_text(json.dumps({"body": name}))
    (tmp_path / "parts" / "README.md").touch()
    assert read(tmp_path, {"file_name": "parts", "columns": {"prompt": "body"}}, {}) == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"file_name": None, "hf_hub_url": "a/b"}, "has no file_name. Only local files are read"),
        ({"ranking": True}, "ranking cannot be used here"),
        ({"columns": {"prompt": "p", "images": "i"}}, "its records have images. Set data.images to true"),
        ({"columns": {"response": "a"}}, "columns has no prompt"),
        ({"columns": {"prompt": 3}}, "columns and tags must be objects of text"),
        ({"formatting": "mine"}, "formatting 'mine' without"),
        ({"formatting": "sharegpt", "columns": {"prompt": "p"}}, "without a messages column"),
        ({"formatting": "sharegpt", "tags": {"role_tag": "role"}}, "tags has no content_tag"),
    ],
)
def test_describe_dataset_of_another_kind_is_refused(tmp_path: Path, dataset: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"dataset_info\.json#mine.*{message}"):
        read(tmp_path, dataset, {})


def test_describe_unknown_name_lists_those_there_are(tmp_path: Path) -> None:
    info = tmp_path / "dataset_info.json"
    with pytest.raises(DataError, match=r"cannot read .*No such file"):
        list(read_documents(DataConfig(files=(f"{info}#mine",))))
    info.write_text('{"theirs": {}}')
    with pytest.raises(DataError, match=r"no such dataset\. Names: theirs"):
        list(read_documents(DataConfig(files=(f"{info}#mine",))))
