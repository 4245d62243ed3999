from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    Gemma3TextConfig,
    GPT2Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from megatier.config.data_section import DataConfig
from megatier.config.schema import ModelConfig, RunConfig
from megatier.data.packed_text import PackedText
from megatier.data.tokenizer import END_OF_TEXT, byte_tokenizer, load_tokenizer
from megatier.errors import DataError

TEXTS = ["", "plain", "  two  spaces ,  \n\t\r\n", "é 🙂 \u2028 \x00 \x7f", f"spelt {END_OF_TEXT} out", "don't ##x"]


def config(tokenizer: str | None, path: str | None = None) -> RunConfig:
    model = ModelConfig(path=path) if path else ModelConfig(config={"model_type": "llama"})
    return RunConfig(model=model, data=DataConfig(files=("x",), tokenizer=tokenizer))


@pytest.mark.parametrize("text", TEXTS)
def test_byte_tokenizer_token_is_byte_and_text_returns(text: str) -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer(text)["input_ids"]
    assert tokens == list(text.encode())
    assert tokenizer.decode(tokens) == tokenizer.decode(tokens, skip_special_tokens=True) == text


def test_byte_tokenizer_saved_reloads_the_same(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (len(tokenizer), tokenizer.eos_token_id) == (257, 256)
    for text in TEXTS:
        tokens = tokenizer(text)["input_ids"]
        assert tokens == list(text.encode())
        assert tokenizer.decode(tokens) == text


def test_load_tokenizer_bytes_has_257_tokens() -> None:
    assert len(load_tokenizer(config("bytes"))) == 257


def test_load_tokenizer_none_takes_the_models(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(config(None, str(tmp_path))).eos_token == END_OF_TEXT


def test_load_tokenizer_empty_folder_raises(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no tokenizer at .* Give data\.tokenizer"):
        load_tokenizer(config(str(tmp_path)))


@pytest.mark.parametrize("name", ["/no/such/folder", "./tokenizer", "~/no such", "a/b/c"])
def test_load_tokenizer_absent_path_is_no_hub_id(name: str) -> None:
    with pytest.raises(DataError, match=r"no tokenizer at \S.*: there is no such folder\. Give data\.tokenizer"):
        load_tokenizer(config(name))


def test_load_tokenizer_without_end_raises(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(DataError, match="no eos_token"):
        load_tokenizer(config(str(tmp_path)))


@pytest.mark.parametrize("kind", [Qwen3Config, Gemma3TextConfig, GPT2Config], ids=lambda kind: kind.model_type)
def test_load_tokenizer_of_a_folder_without_one_raises_though_transformers_makes_an_empty_one(
    tmp_path: Path, kind: type[PreTrainedConfig]
) -> None:
    kind().save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"no tokenizer at .*(it knows \d tokens, and makes none of a text|: )"):
        load_tokenizer(config(str(tmp_path)))


def words(*known: str) -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(["<unk>", END_OF_TEXT, *known])}
    found = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=found, eos_token=END_OF_TEXT, unk_token="<unk>")


def test_load_tokenizer_of_few_words_of_its_own_is_taken(tmp_path: Path) -> None:
    words("蛋白", "基因").save_pretrained(tmp_path)
    assert len(load_tokenizer(config(str(tmp_path)))) == 4


def test_build_of_texts_that_the_tokenizer_knows_nothing_of_raises(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("latin letters alone")
    data = DataConfig(files=(str(tmp_path / "a.txt"),), sequence_length=2)
    with pytest.raises(DataError, match="makes nothing but special and unknown tokens of the 1 texts"):
        PackedText.build(data, words("蛋白"), tmp_path / "run")
    (tmp_path / "b.txt").write_text("蛋白")
    data = DataConfig(files=(str(tmp_path),), sequence_length=2, holdout_fraction=0)
    assert PackedText.build(data, words("蛋白"), tmp_path / "run").num_tokens == 6
