"""Images in the parts of a turn, by marks and in lists: each finds its place, and what does not fit is named."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatier.config.data_section import DataConfig
from megatier.data.conversation import SHAREGPT, Alpaca, Conversation, PromptCompletion, Turns
from megatier.data.dataset_info import describe
from megatier.data.image_parts import IMAGE_KEYS, text_of
from megatier.data.text import read_documents
from megatier.errors import ConfigError, DataError

RAW = b"\x89PNG and more"
DATA = f"data:image/png;base64,{base64.b64encode(RAW).decode()}"
MESSAGES = Turns(images=IMAGE_KEYS)
YES = {"role": "assistant", "content": "yes"}


def user(*content: Any) -> list[dict[str, Any]]:
    """A question with this content, and an answer."""
    is_text = len(content) == 1 and isinstance(content[0], str)
    return [{"role": "user", "content": content[0] if is_text else list(content)}, YES]


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def kinds(conversation: Conversation) -> list[str]:
    """Texts of a question's parts, and the mark for each image."""
    return [part.get("text", "*") for part in conversation.messages[0]["content"]]


@pytest.mark.parametrize(
    ("part", "image"),
    [
        ({"type": "image", "image": "a.png"}, "a.png"),
        ({"type": "image", "path": "a.png"}, "a.png"),
        ({"type": "image", "url": "file:///x/a.png"}, "/x/a.png"),
        ({"type": "image", "base64": base64.b64encode(RAW).decode()}, RAW),
        ({"type": "image", "image": RAW}, RAW),
        ({"type": "image", "image": {"bytes": RAW, "path": "a.png"}}, RAW),
        ({"type": "image", "image": {"bytes": None, "path": "a.png"}, "text": None}, "a.png"),
        ({"type": "image_url", "image_url": {"url": DATA, "detail": "high"}}, RAW),
        ({"type": "image_url", "image_url": "a.png"}, "a.png"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,%89PNG%20and%20more"}}, RAW),
    ],
)
def test_part_with_an_image_keeps_its_place(part: dict[str, Any], image: object) -> None:
    found = MESSAGES.read({"messages": user(text("look: "), part, text("well?"))}, "a")
    assert kinds(found) == ["look: ", "*", "well?"]
    assert found.images == (image,)
    assert found.num_bytes == len("look: well?yes")


@pytest.mark.parametrize("key", ["images", "image"])
def test_marks_and_empty_parts_take_the_listed_images_in_order(key: str) -> None:
    record = {"messages": user("<image>one<image> and two"), key: ["a", {"path": "b"}]}
    found = MESSAGES.read(record, "a")
    assert kinds(found) == ["*", "one", "*", " and two"]
    assert found.images == ("a", "b")
    record = {"messages": user({"type": "image"}, text("one")), key: "a"}
    assert MESSAGES.read(record, "a").images == ("a",)


def test_marks_without_listed_images_are_text() -> None:
    found = MESSAGES.read({"messages": user("the tag <image>"), "images": []}, "a")
    assert (kinds(found), found.images) == (["the tag <image>"], ())


@pytest.mark.parametrize(
    ("shape", "record"),
    [
        (
            replace(SHAREGPT, images=IMAGE_KEYS),
            {"conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "yes"}], "image": "a"},
        ),
        (Alpaca(images=IMAGE_KEYS), {"instruction": "<image>?", "output": "yes", "images": ["a"]}),
        (PromptCompletion(images=IMAGE_KEYS), {"prompt": "<image>?", "completion": "yes", "images": ["a"]}),
        (
            PromptCompletion(images=IMAGE_KEYS),
            {"prompt": user({"type": "image"}, text("?"))[:1], "completion": [YES], "image": "a"},
        ),
    ],
)
def test_other_shapes_have_images_too(shape: Any, record: dict[str, Any]) -> None:
    found = shape.read(record, "a")
    assert (kinds(found), found.images) == (["*", "?"], ("a",))
    assert all(isinstance(message["content"], list) for message in found.messages)


@pytest.mark.parametrize(
    ("messages", "images", "said"),
    [
        (user("<image>"), ["a", "b"], "lists 2 images, and its turns have 1 places"),
        (user({"type": "image"}), None, "lists 0 images, and its turns have 1 places"),
        (user("none"), ["a"], "lists 1 images, and its turns have 0 places"),
        (user("<image>"), [3], "an image is 3, neither a path nor the bytes"),
        (user("<image>"), [b""], "neither a path nor the bytes"),
        (user("<image>"), [{"bytes": None, "path": None}], "neither a path nor the bytes"),
        (user("<image>"), [{"url": {"url": {}}}], "neither a path nor the bytes"),
        (user("<image>"), ["https://a/b.png"], "lies on the network, and megatier downloads none"),
        (user("<image>"), ["data:image/png;base64,a"], "an image is no valid base64"),
        (user("<image>"), ["data:image/png;base64,"], "a data address without bytes"),
        (user({"type": "video", "video": "a.mp4"}), None, "parts of the types text, image and image_url are read"),
        (user({"type": "video_url", "video_url": {"url": DATA}}), None, "video_url.*; parts of the types text, image"),
        (user({"type": "input_audio", "input_audio": {}}), None, "input_audio.*; parts of the types text, image"),
        (user(["a"]), None, "parts of the types text, image and image_url are read"),
    ],
)
def test_images_that_do_not_fit_are_refused_with_the_record(messages: Any, images: Any, said: str) -> None:
    with pytest.raises(DataError, match=f"^a.jsonl, line 3: .*{said}"):
        MESSAGES.read({"messages": messages, "images": images}, "a.jsonl, line 3")


def test_image_without_the_setting_is_refused_with_it() -> None:
    part = {"type": "image_url", "image_url": {"url": DATA}}
    with pytest.raises(DataError, match=r"^a: a part of a turn is .* Set data\.images to true to read images\.$"):
        Turns().read({"messages": user(part)}, "a")


@pytest.mark.parametrize("key", ["videos", "video", "audios", "audio", "images", "image"])
@pytest.mark.parametrize(
    ("chat", "record"),
    [
        ("messages", {"messages": user("<video>?")}),
        ("sharegpt", {"conversations": [{"from": "human", "value": "<video>?"}, {"from": "gpt", "value": "yes"}]}),
        ("alpaca", {"instruction": "<video>?", "output": "yes"}),
        ("prompt_completion", {"prompt": "<video>?", "completion": "yes"}),
    ],
)
def test_record_with_media_that_are_not_read_is_refused_by_its_key(
    chat: Any, record: dict[str, Any], key: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({**record, key: []}))
    config = DataConfig(files=(str(path),), chat=chat)
    assert len(list(read_documents(config))) == 1, "an empty column of a table"

    path.write_text(json.dumps({**record, key: ["a.mp4"]}))
    reads_it = key in IMAGE_KEYS
    for images in (False, True)[: 1 if reads_it else 2]:
        with pytest.raises(DataError, match=f"line 1: the record has something under '{key}' that would not be read"):
            list(read_documents(replace(config, images=images)))


def test_description_with_a_column_of_videos_is_refused_by_its_name(tmp_path: Path) -> None:
    info = tmp_path / "dataset_info.json"
    info.write_text(json.dumps({"a": {"file_name": "a.json", "columns": {"prompt": "q", "videos": "v"}}}))
    with pytest.raises(DataError, match="#a: videos cannot be used here"):
        describe(info, "a", images=True)


def test_described_dataset_names_its_column_of_images(tmp_path: Path) -> None:
    info = tmp_path / "dataset_info.json"
    columns = {"messages": "conversations", "images": "pictures"}
    info.write_text(json.dumps({"a": {"file_name": "a.json", "formatting": "sharegpt", "columns": columns}}))
    turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "yes"}]
    (tmp_path / "a.json").write_text(json.dumps([{"conversations": turns, "pictures": ["b.png"]}]))
    [found] = read_documents(DataConfig(files=(f"{info}#a",), images=True))
    assert isinstance(found, Conversation)
    assert (found.images, found.folder) == (("b.png",), tmp_path)
    with pytest.raises(DataError, match=r"#a: its records have images\. Set data\.images to true"):
        describe(info, "a")


def test_text_of_a_content_is_that_of_its_parts() -> None:
    assert text_of("a") == text_of([text("a"), {"type": "image"}]) == "a"
    assert text_of(None) == ""


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, r"data\.images is True; it must be false without data\.chat"),
        ({"chat": "messages", "cross_documents": True}, r"data\.cross_documents.*with data\.images"),
        ({"chat": "messages", "tokenizer": "bytes"}, r"data\.tokenizer.*processor"),
        ({"chat": "messages", "files": (), "dataset": "a/b", "streaming": True}, r"data\.streaming.*with data\.images"),
    ],
)
def test_settings_that_images_do_not_go_with_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DataConfig(images=True, **{"files": ("a",), **settings})
