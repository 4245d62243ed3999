"""Long texts in pieces: the tokens are those of the whole text, wherever the cuts fall."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatier.data import long_text
from megatier.data.long_text import tokenise_long_text

WORDS = (
    *("the", "a", "of", "model", "learns", "slowly", "über", "weights,", "streamed", "from", "drives;", "it's"),
    *("don't", "12345", "naïve", "☃", "🙂", "x", "=", "y[0]", "=="),
)


def prose(seed: int, count: int) -> Iterator[str]:
    chance = random.Random(seed)
    for _ in range(count):
        yield chance.choice(WORDS)
        yield chance.choice([" ", " ", " ", "  ", "\n", "\n\n", "\t", " \r\n", "   "])


TRAINED_ON = ["".join(prose(0, 3000)), "a" * 500, " " * 300, "=" * 100]
TEXTS = {
    "prose": "".join(prose(1, 6000)),
    "one_line": "".join(prose(2, 6000)).replace("\n", " "),
    "one_word": "".join(random.Random(3).choices("abcdefgh", k=20_000)),
    "one_letter": "a" * 20_001,
    "blanks": "word" + " " * 15_000 + "\n" * 9_000 + "word",
    "rulers": ("=" * 977 + "\n") * 20,
    "no_latin": "".join(random.Random(4).choices("雪人学习模型。🙂é", k=12_000)),
    "end_spelt": ("text<|end|> more " * 1500),
}


def byte_level() -> Tokenizer:
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    return found


def split_by_rule() -> Tokenizer:
    """As Llama 3 and Qwen do it: a pattern that looks ahead, then bytes."""
    found = Tokenizer(models.BPE())
    pattern = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    found.normalizer = normalizers.NFC()
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern=Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return found


def unsplit() -> Tokenizer:
    """As Gemma and Llama 2 do it: blanks become letters, and nothing splits the text."""
    found = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return found


def unigram() -> Tokenizer:
    found = Tokenizer(models.Unigram())
    found.pre_tokenizer = pre_tokenizers.Metaspace()
    return found


def word_piece() -> Tokenizer:
    found = Tokenizer(models.WordPiece(unk_token="<unk>"))
    found.normalizer = normalizers.BertNormalizer()
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return found


KINDS = {
    byte_level: trainers.BpeTrainer,
    split_by_rule: trainers.BpeTrainer,
    unsplit: trainers.BpeTrainer,
    unigram: trainers.UnigramTrainer,
    word_piece: trainers.WordPieceTrainer,
}


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.__name__)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    kind = request.param
    found: Tokenizer = kind()
    settings = {"vocab_size": 600, "special_tokens": ["<unk>", "<|end|>"], "show_progress": False}
    if kind is unigram:
        settings["unk_token"] = "<unk>"
    if kind in (byte_level, split_by_rule):
        settings["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    found.train_from_iterator(TRAINED_ON, KINDS[kind](**settings))
    return PreTrainedTokenizerFast(tokenizer_object=found, eos_token="<|end|>", unk_token="<unk>")


@pytest.mark.parametrize("sizes", [(2_000,), pytest.param((3_001, 7_777), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TEXTS)
def test_tokens_of_a_long_text_are_those_of_the_whole(
    name: str, sizes: Sequence[int], tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = TEXTS[name]
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(long_text, "OVERLAP_CHARACTERS", 1000)
    for size in sizes:
        monkeypatch.setattr(long_text, "PIECE_CHARACTERS", size)
        pieces = list(tokenise_long_text(text, tokenizer))
        assert np.concatenate(pieces).tolist() == whole
        if name == "prose":
            assert len(pieces) > 3, "in pieces"
