"""Conversations in every shape that people use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatier.config.data_section import DataConfig
from megatier.data.conversation import Conversation, Turns
from megatier.data.text import read_documents
from megatier.errors import DataError

USER, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
SYSTEM = {"role": "system", "content": "Be brief."}
FROM_HUMAN, FROM_GPT = {"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}


def read(tmp_path: Path, record: Any, **settings: Any) -> list[str | Conversation]:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record))
    return list(read_documents(DataConfig(files=(str(path),), **settings)))


def read_one(tmp_path: Path, record: Any, chat: str) -> Conversation:
    [document] = read(tmp_path, record, chat=chat)
    assert isinstance(document, Conversation)
    return document


@pytest.mark.parametrize(
    ("chat", "record", "messages"),
    [
        ("messages", {"messages": [SYSTEM, USER, ANSWER]}, [SYSTEM, USER, ANSWER]),
        ("messages", {"messages": [{**USER, "name": None, "id": 3}, ANSWER]}, [{**USER, "id": 3}, ANSWER]),
        ("sharegpt", {"conversations": [FROM_HUMAN, FROM_GPT]}, [USER, ANSWER]),
        ("sharegpt", {"conversations": [FROM_HUMAN, FROM_GPT], "system": "Be brief."}, [SYSTEM, USER, ANSWER]),
        ("sharegpt", {"conversations": [FROM_HUMAN, FROM_GPT], "system": ""}, [USER, ANSWER]),
        ("alpaca", {"instruction": "Why?", "output": "So."}, [USER, ANSWER]),
        ("prompt_completion", {"prompt": "Why?", "completion": "So.", "id": 3}, [USER, ANSWER]),
        ("prompt_completion", {"prompt": [USER], "completion": [ANSWER]}, [USER, ANSWER]),
        (
            "alpaca",
            {"instruction": "Why?", "input": "", "output": "So.", "system": "Be brief."},
            [SYSTEM, USER, ANSWER],
        ),
        (
            "alpaca",
            {"instruction": "And", "input": "then?", "output": "No.", "history": [["Why?", "So."]]},
            [USER, ANSWER, {"role": "user", "content": "And\nthen?"}, {"role": "assistant", "content": "No."}],
        ),
    ],
)
def test_conversation_shape_becomes_messages(
    tmp_path: Path, chat: str, record: dict[str, Any], messages: list[dict[str, Any]]
) -> None:
    found = read_one(tmp_path, record, chat)
    assert found.messages == messages
    assert found.tools is None
    assert found.place.endswith("a.jsonl, line 1")


def test_conversation_keeps_tools_and_their_calls(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    tools = [{"type": "function", "function": {"name": "f"}}]
    found = read_one(tmp_path, {"messages": [USER, call], "tools": tools}, "messages")
    assert found.messages[1] == {"role": "assistant", "tool_calls": call["tool_calls"]}
    assert found.tools == tools
    spelt = read_one(tmp_path, {"conversations": [FROM_HUMAN, FROM_GPT], "tools": json.dumps(tools)}, "sharegpt")
    assert spelt.tools == tools


def test_conversation_half_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    found = read_one(tmp_path, {"instruction": "\ud83d", "output": "So."}, "alpaca")
    assert found.messages[0]["content"] == "\ufffd"


@pytest.mark.parametrize(
    ("chat", "record", "message"),
    [
        ("messages", [1], "no list of turns under 'messages'"),
        ("messages", {"conversations": []}, "no list of turns under 'messages'. Choose another data.chat"),
        ("messages", {"messages": ["Why?"]}, "a turn is 'Why\\?', not an object"),
        ("messages", {"messages": [{"content": "Why?"}]}, "a turn's role is None; it must be text"),
        (
            "messages",
            {"messages": [{"role": "user"}, ANSWER]},
            "the turn of user has no 'content', which only a turn with",
        ),
        ("messages", {"messages": [USER]}, "no turn of the assistant, .* Leave the record out"),
        (
            "messages",
            {"messages": [USER, {"role": "bot", "content": "So."}]},
            "no turn of the assistant, .* its roles are user, bot. .* assistant_tag",
        ),
        ("messages", {"messages": [USER, ANSWER], "tools": {"a": 1}}, "the tools are .*, not a list"),
        ("messages", {"messages": [USER, ANSWER], "tools": "[{"}, "the tools are no valid JSON"),
        ("messages", {"messages": [USER, ANSWER], "tools": "[" * 100_000}, "the tools are no valid JSON"),
        (
            "messages",
            {"messages": [USER, ANSWER], "tools": '[{"a": 1, "a": 2}]'},
            "the tools are .*: a key comes twice: a",
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "bing", "value": ""}]},
            "a turn's from is 'bing'; it must be one of human, gpt",
        ),
        ("sharegpt", {"conversations": [FROM_HUMAN, FROM_GPT], "system": 3}, "no text under 'system', but 3"),
        ("prompt_completion", {"prompt": "Why?"}, "no text under 'completion', but None"),
        ("prompt_completion", {"prompt": [USER], "completion": [3]}, "a turn is 3, not an object"),
        ("prompt_completion", {"prompt": [USER], "completion": [USER]}, "no turn of the assistant"),
        (
            "prompt_completion",
            {"prompt": [USER, ANSWER], "completion": "So."},
            "the prompt has a turn of the assistant",
        ),
        ("alpaca", {"instruction": "Why?"}, "no text under 'output'"),
        ("alpaca", {"instruction": "Why?", "output": "So.", "history": [["Why?"]]}, "'history' is no list of pairs"),
        ("alpaca", {"instruction": "Why?", "output": "So.", "history": 3}, "'history' is no list of pairs"),
    ],
)
def test_conversation_damaged_record_says_path_and_line(tmp_path: Path, chat: str, record: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"a\.jsonl, line 1: {message}"):
        read(tmp_path, record, chat=chat)


@pytest.mark.parametrize(
    ("chat", "record"),
    [("messages", {"messages": [USER, ANSWER]}), ("prompt_completion", {"prompt": "Why?", "completion": "So."})],
)
def test_conversation_with_variables_of_the_template_is_refused(
    tmp_path: Path, chat: str, record: dict[str, Any]
) -> None:
    with pytest.raises(DataError, match="chat_template_kwargs of a single record"):
        read(tmp_path, {**record, "chat_template_kwargs": {"enable_thinking": False}}, chat=chat)
    # Tables have an empty value in each row without it.
    assert read(tmp_path, {**record, "chat_template_kwargs": None}, chat=chat)


def test_conversation_that_does_not_fit_whole_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"instruction": "Why?", "output": "So."}] * 3))
    for max_bytes, count in ((20, 2), (21, 3)):
        config = DataConfig(files=(str(path),), chat="alpaca", max_bytes=max_bytes)
        assert len(list(read_documents(config))) == count


def test_conversations_of_a_text_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Why?")
    with pytest.raises(
        DataError, match=r"a\.txt holds no conversations, but data\.chat is set\. Give files of \.jsonl"
    ):
        list(read_documents(DataConfig(files=(f"{tmp_path}/a.txt",), chat="messages")))
    with pytest.raises(DataError, match=r"holds no file in \.json \.jsonl"):
        list(read_documents(DataConfig(files=(str(tmp_path),), chat="messages")))


def test_turns_of_parts_of_text_are_their_text_and_others_are_refused() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two", "image": None}]
    turns: list[dict[str, Any]] = [{"role": "user", "content": parts}, {"role": "assistant", "content": "three"}]
    record = {"messages": turns}
    found = Turns().read(record, "here")
    assert [message["content"] for message in found.messages] == ["one two", "three"]
    for odd in ({"type": "image", "image": "a.png"}, "text", {"type": "text", "text": None}):
        turns[0]["content"] = [*parts, odd]
        with pytest.raises(DataError, match=r"here: a part of a turn is .*; parts of the type text alone are read"):
            Turns().read(record, "here")


@pytest.mark.parametrize("rest", [{}, {"tool_calls": None}, {"tool_calls": []}], ids=str)
def test_turns_without_content_and_without_tool_calls_are_refused_by_role(rest: dict[str, Any]) -> None:
    record = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, **rest}]}
    with pytest.raises(DataError, match="here: the turn of assistant has no 'content', which only a turn with tool"):
        Turns().read(record, "here")
