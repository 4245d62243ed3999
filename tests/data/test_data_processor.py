"""Processors: which of them are taken, what they are called with, and folders that have none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_processors import families, has_torchvision, picture, processor, tokenizer

from megatier.config.data_section import DataConfig
from megatier.config.schema import ModelConfig, RunConfig
from megatier.data.conversation import Conversation
from megatier.data.image_file import decode_all
from megatier.data.processor import Processor, load_processor, make_labels
from megatier.errors import DataError

pytest.importorskip("PIL")


def load(folder: Path, **data: Any) -> Processor:
    settings = {"files": ("a",), "chat": "messages", "images": True, **data}
    return load_processor(RunConfig(model=ModelConfig(path=str(folder)), data=DataConfig(**settings)))


def conversation(*parts: dict[str, str], answer: str = "yes") -> Conversation:
    said = [{"type": "text", "text": answer}]
    turns = [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": said}]
    return Conversation(turns, None, "a.jsonl, line 2")


@pytest.fixture(params=families("qwen3_vl_moe", "qwen3_5"))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    processor(request.param).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_learnt_tokens_stand_where_the_processor_moved_them(folder: Path, tmp_path: Path) -> None:
    own = load(folder)
    asked = conversation({"type": "text", "text": "a "}, {"type": "image"}, {"type": "text", "text": " b"})
    images = decode_all([picture(tmp_path / "a.png").read_bytes()], "a")
    text, ids, learnt, _ = own.tokenise(asked, images)
    assert own.tokenizer.decode(ids[learnt]) == "yes<|end|>"
    columns = own.columns([text], [images], 64, "a")
    assert columns["input_ids"][0, : len(ids)].tolist() == ids.tolist()
    assert int(columns["attention_mask"].sum()) == len(ids)


def test_tokenizer_is_saved_as_it_was_whatever_was_padded(tmp_path: Path) -> None:
    processor("llava").save_pretrained(tmp_path / "model")
    own = load(tmp_path / "model")
    own.columns(["a"], [[]], 64, "a")
    own.save_pretrained(tmp_path / "saved")
    found, expected = ((tmp_path / name / "tokenizer.json").read_text() for name in ("saved", "model"))
    assert found == expected


def test_template_of_the_settings_replaces_that_of_the_processor(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jinja"
    path.write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content[0].text }}!{% endgeneration %}{% else %}?{% endif %}{% endfor %}"
    )
    own = load(folder, chat_template=str(path))
    _, ids, learnt, num_patches = own.tokenise(conversation({"type": "text", "text": "a"}), [])
    assert num_patches == 0
    assert (own.tokenizer.decode(ids), own.tokenizer.decode(ids[learnt])) == ("?yes!", "yes!")
    own.save_pretrained(tmp_path / "saved")
    assert load(tmp_path / "saved").own.chat_template == path.read_text()


def test_answer_that_teaches_nothing_is_refused_with_the_record(folder: Path) -> None:
    own = load(folder)
    own.tokenizer.chat_template = str(own.tokenizer.chat_template).replace("<|end|>", "")
    with pytest.raises(DataError, match=r"^a\.jsonl, line 2: no token of the assistant"):
        own.tokenise(conversation({"type": "text", "text": "a"}, answer=""), [])


@pytest.mark.parametrize("spelt", ["<img>", "<boi>", "<vid>"])
def test_text_that_spells_the_token_of_an_image_is_refused_with_the_record(spelt: str, folder: Path) -> None:
    own = load(folder)
    if spelt not in own.tokenizer.get_added_vocab():
        pytest.skip("this tokenizer has no such token")

    # transformers refuses some of these itself, and which of them depends on its version.
    words = "spells a token that stands for an image or a video|refuses the conversation"
    with pytest.raises(DataError, match=rf"^a\.jsonl, line 2: .*({words})"):
        own.tokenise(conversation({"type": "text", "text": spelt}), [])


def test_labels_are_ids_in_the_ranges_that_are_learnt() -> None:
    ids = torch.arange(8).reshape(2, 4)
    assert make_labels(ids, [((1, 2), (3, 4)), ()]).tolist() == [[-100, 1, -100, 3], [-100] * 4]


def test_folder_without_a_processor_of_images_is_refused(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"no processor at .*data\.images needs the folder or hub id of a model"):
        load(tmp_path)
    with pytest.raises(DataError, match="no tokenizer at"):
        load(tmp_path / "none")


def test_processor_without_a_token_for_padding_is_refused(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["pad_token"]
    path.write_text(json.dumps(settings))
    with pytest.raises(DataError, match=r"has no pad_token, which fills a sequence"):
        load(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"processor_class": 3}', '{"image_processor": {"size": "x"}}'])
def test_damaged_settings_of_a_processor_are_one_error(text: str, folder: Path) -> None:
    (folder / "processor_config.json").write_text(text)
    with pytest.raises(DataError):
        load(folder)


@pytest.mark.skipif(has_torchvision(), reason="torchvision is installed")
def test_processor_that_needs_a_missing_library_says_so(folder: Path) -> None:
    path = folder / "processor_config.json"
    settings = {**json.loads(path.read_text()), "processor_class": "Qwen3VLProcessor"}
    path.write_text(json.dumps(settings))
    videos = {"video_processor_type": "Qwen3VLVideoProcessor"}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
    with pytest.raises(DataError, match=r"no processor at .*[Tt]orchvision"):
        load(folder)
