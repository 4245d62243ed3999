"""Tokenizers that know more tokens than the model: a likeness of Gemma 3 1B's, and whole runs with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_commands import MODEL, command
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatier.cli import main
from megatier.data.unknown_tokens import NONE_UNKNOWN, UnknownTokens
from megatier.errors import ConfigError

SIZE = MODEL["vocab_size"]
IMAGE = "<image_soft_token>"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<end>' }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def gemma(*, special: bool = True, end: int = 256) -> PreTrainedTokenizerFast:
    """A tokenizer of as many tokens as the model, and one for images behind them, as Gemma 3 1B is shipped."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    vocabulary |= {f"<unused{number}>": number for number in range(len(letters), SIZE) if number != end}
    vocabulary["<end>"] = end
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", chat_template=TEMPLATE)
    tokenizer.add_tokens([IMAGE], special_tokens=special)
    return tokenizer


def test_unknown_tokens_of_a_tokenizer_are_special_ones_behind_the_vocabulary() -> None:
    tokenizer = gemma()
    assert len(tokenizer) == SIZE + 1
    assert UnknownTokens.of(tokenizer, SIZE).names == {SIZE: IMAGE}
    assert UnknownTokens.of(tokenizer, SIZE + 1).names == {}


@pytest.mark.parametrize(
    ("tokenizer", "size"),
    [(gemma(special=False), SIZE), (gemma(), SIZE - 1), (gemma(end=SIZE + 1), SIZE), (gemma(), 100)],
    ids=["word", "word and special", "end", "letters"],
)
def test_unknown_tokens_that_may_come_with_any_text_are_refused(tokenizer: PreTrainedTokenizerFast, size: int) -> None:
    with pytest.raises(ConfigError, match=rf"has tokens up to \d+, the model's vocab_size is {size}"):
        UnknownTokens.of(tokenizer, size)


def test_error_of_a_record_names_what_it_spells() -> None:
    unknown = UnknownTokens(SIZE, {SIZE: IMAGE})
    known, spelt = np.asarray([1, SIZE - 1]), np.asarray([1, SIZE])
    assert unknown.error_of(known, "here") is None
    assert NONE_UNKNOWN.error_of(spelt, "here") is None
    said = str(unknown.error_of(spelt, "here"))
    assert said.startswith(f"here: the text spells {IMAGE} (token {SIZE}), and the model has")


def settings(folder: Path, texts: list[str], **more: Any) -> dict[str, Any]:
    """Settings of a run on these texts with Gemma's tokenizer; with `data.chat` each text is an answer."""
    gemma().save_pretrained(folder / "tokenizer")
    records: list[dict[str, Any]] = [{"text": text} for text in texts]
    if "data.chat" in more:
        records = [{"messages": [{"role": "user", "content": "?"}, answer(text)]} for text in texts]
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return {"data.tokenizer": str(folder / "tokenizer"), "data.files": str(path), **more}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


TEXTS = [f"a text of no great length, with the number {number}, that is read" for number in range(40)]
SPELT = [*TEXTS[:20], f"an {IMAGE} in a text", *TEXTS[20:]]


@pytest.mark.parametrize("chat", [{}, {"data.chat": "messages"}], ids=["text", "chat"])
def test_train_with_a_token_behind_the_vocabulary_takes_texts_that_do_not_spell_it_and_names_the_one_that_does(
    chat: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path, settings(tmp_path, SPELT, **chat))) == 2
    errors = capsys.readouterr().err
    place = f"{tmp_path}/texts.jsonl, line 21" if chat else f"the text that begins with 'an {IMAGE} in a text'"
    assert f"megatier: error: {place}: the text spells {IMAGE} (token {SIZE})" in errors
    assert not (tmp_path / "run/model").exists()

    left_out = {**settings(tmp_path, SPELT, **chat), "data.skip_bad": True, "output.directory": str(tmp_path / "some")}
    assert main(command(tmp_path, left_out)) == 0
    assert "1 bad record is left out" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "some/model/model.safetensors").is_file()
