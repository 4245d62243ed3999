from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatier.config.data_section import DataConfig
from megatier.data import packer
from megatier.data.columns import count_real_tokens
from megatier.data.holdout import is_held_out
from megatier.data.packed_text import PackedText
from megatier.data.shuffle import permute
from megatier.data.token_note import content_of
from megatier.data.tokenizer import byte_tokenizer
from megatier.errors import DataError


def pack(tmp_path: Path, texts: list[str], **settings: Any) -> PackedText:
    source = tmp_path / "text"
    source.mkdir()
    for number, text in enumerate(texts):
        (source / f"{number:04}.txt").write_text(text)
    defaults: dict[str, Any] = {"tokenizer": "bytes", "sequence_length": 4, "holdout_fraction": 0.0}
    config = DataConfig(files=(str(source),), **(defaults | settings))
    return PackedText.build(config, byte_tokenizer(), tmp_path / "run")


def rows(data: PackedText, steps: range, batch: int) -> list[tuple[int, ...]]:
    return [tuple(row) for step in steps for row in data.batch(step, batch)["input_ids"].tolist()]


def test_build_documents_are_joined_by_the_end_token(tmp_path: Path) -> None:
    data = pack(tmp_path, ["abc", "de", "f"])
    tokens = [*b"abc", 256, *b"de", 256, *b"f", 256]
    assert (data.num_tokens, data.held_out.num_tokens, data.num_sequences) == (9, 0, 2)
    assert sorted(rows(data, range(2), 1)) == sorted([tuple(tokens[:4]), tuple(tokens[4:8])])


def test_batch_gives_int64_ids_and_own_labels(tmp_path: Path) -> None:
    batch = pack(tmp_path, ["abcdefgh" * 10]).batch(3, 2)
    assert batch.keys() == {"input_ids", "labels"}
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert batch["input_ids"].shape == (2, 4)
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert batch["input_ids"].data_ptr() != batch["labels"].data_ptr()


def test_batch_each_epoch_holds_each_sequence_once_in_another_order(tmp_path: Path) -> None:
    data = pack(tmp_path, ["".join(chr(33 + n) for n in range(60))])
    first, second = rows(data, range(5), 3), rows(data, range(5, 10), 3)
    assert data.num_sequences == 15
    assert Counter(first) == Counter(second)
    assert len(set(first)) == 15
    assert first != second


def test_batch_across_epochs_wraps(tmp_path: Path) -> None:
    data = pack(tmp_path, ["".join(chr(33 + n) for n in range(60))])
    assert rows(data, range(1), 30) == rows(data, range(10), 3)


def test_batch_any_step_alone_equals_the_same_in_a_row(tmp_path: Path) -> None:
    data = pack(tmp_path, ["some words to learn from " * 20])
    assert rows(data, range(7, 8), 5) == rows(data, range(8), 5)[35:]


def test_batch_seed_changes_the_order(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    text = ["some words to learn from " * 20]
    assert rows(pack(tmp_path / "a", text), range(3), 5) != rows(pack(tmp_path / "b", text, seed=1), range(3), 5)


def test_build_holds_out_its_share_of_documents(tmp_path: Path) -> None:
    texts = [f"<{number:03}>" * 2 for number in range(100)]
    data = pack(tmp_path, texts, holdout_fraction=0.05, sequence_length=11)
    assert (data.held_out.num_tokens, data.num_tokens) == (5 * 11, 95 * 11)
    held = {bytes(row[:-1]).decode() for batch in data.holdout(2) for row in batch["input_ids"].tolist()}
    trained = {bytes(row[:-1]).decode() for row in rows(data, range(95), 1)}
    assert (len(held), len(trained)) == (5, 95)
    assert held | trained == set(texts)


def test_holdout_last_batch_is_smaller(tmp_path: Path) -> None:
    data = pack(tmp_path, ["x" * 199], holdout_fraction=0.1)
    assert [len(batch["labels"]) for batch in data.holdout(2)] == [2, 2, 1]


def test_build_one_document_holds_out_its_end(tmp_path: Path) -> None:
    data = pack(tmp_path, ["a" * 80 + "b" * 19], holdout_fraction=0.2)
    assert (data.num_tokens, data.held_out.num_tokens) == (80, 20)
    assert set(next(data.holdout(5))["input_ids"].flatten().tolist()) == {ord("b"), 256}


def test_build_little_text_keeps_it_all_for_training(tmp_path: Path) -> None:
    data = pack(tmp_path, ["abcdef"], holdout_fraction=0.02)
    assert (data.num_tokens, list(data.holdout(1))) == (7, [])


def test_build_less_than_one_sequence_raises(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="3 tokens to train on, less than one sequence of 4"):
        pack(tmp_path, ["ab"])


def test_build_unwritable_directory_raises(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(DataError, match="cannot write tokens to"):
        pack(tmp_path, ["abcdef"])


@pytest.mark.parametrize("num_tokens", [0, 1, 2])
def test_batch_cut_token_file_raises(tmp_path: Path, num_tokens: int) -> None:
    data = pack(tmp_path, ["abcdef" * 4])
    data.train.path.write_bytes(data.train.path.read_bytes()[: num_tokens * data.train.dtype.itemsize])
    with pytest.raises(DataError, match=r"cannot read tokens from .*train\.tokens"):
        data.batch(0, 1)


@pytest.mark.parametrize("tokenizer", ["bytes", "as any other"])
def test_build_long_document_in_pieces_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str
) -> None:
    monkeypatch.setattr(packer, "PIECE_CHARACTERS", 7)
    text = "é one line\nand one very long line without any end\n\n" * 3
    data = pack(tmp_path, [text], tokenizer=tokenizer, sequence_length=2)
    tokens = data.train.read(range(data.num_sequences), 2)["input_ids"].flatten().tolist()
    assert bytes(tokens[: len(text.encode())]).decode() == text


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 1000])
def test_shuffled_is_a_permutation(count: int) -> None:
    assert sorted(permute(position, count, (1, 0)) for position in range(count)) == list(range(count))


def test_shuffled_spreads_neighbours() -> None:
    places = [permute(position, 1000, (0, 0)) for position in range(1000)]
    assert sum(abs(a - b) < 10 for a, b in itertools.pairwise(places)) < 60
    assert abs(sum(places[:500]) / 500 - 500) < 50


def test_shuffled_values_are_fixed() -> None:
    """A resumed run must see the same order whatever version it was started with."""
    assert [permute(position, 100, (0, 0)) for position in range(5)] == [13, 84, 15, 53, 85]


@pytest.mark.parametrize("fraction", [0.0, 0.02, 0.3, 0.9])
def test_is_held_out_takes_the_share_within_one(fraction: float) -> None:
    for seed in range(5):
        assert abs(sum(is_held_out(number, fraction, seed) for number in range(777)) - 777 * fraction) <= 1


# ---------------------------------------------------------------------- conversations, documents apart

BREAK = "\n\n"
HEAD = f"user:\n{BREAK}assistant:\n"
"""What the byte tokenizer's template writes before an answer to an empty question: 19 characters."""


def pack_chats(tmp_path: Path, answers: list[str], **settings: Any) -> PackedText:
    source = tmp_path / "chats.json"
    source.write_text(json.dumps([{"instruction": "", "output": answer} for answer in answers]))
    defaults: dict[str, Any] = {"tokenizer": "bytes", "sequence_length": 32, "holdout_fraction": 0.0, "chat": "alpaca"}
    config = DataConfig(files=(str(source),), **(defaults | settings))
    return PackedText.build(config, byte_tokenizer(), tmp_path / "run")


def in_order(data: PackedText) -> dict[str, torch.Tensor]:
    return data.train.read(range(data.num_sequences), data.sequence_length)


def learnt(batch: dict[str, torch.Tensor]) -> list[str]:
    """What each row learns."""
    return [bytes(token for token in row if token >= 0).decode() for row in batch["labels"].tolist()]


def test_build_conversations_learn_answers_alone(tmp_path: Path) -> None:
    batch = in_order(pack_chats(tmp_path, ["yes", "no, never"]))
    assert learnt(batch) == ["yes" + BREAK, "no, never" + BREAK]
    assert (batch["labels"] == batch["input_ids"])[batch["labels"] >= 0].all()
    assert bytes(batch["input_ids"][0, :24].tolist()).decode() == f"{HEAD}yes{BREAK}"
    assert set(batch["input_ids"][0, 24:].tolist()) == {256}


def test_build_conversations_stay_whole_where_they_fit(tmp_path: Path) -> None:
    data = pack_chats(tmp_path, ["a", "bcd", "e" * 40, "fg"])
    batch = in_order(data)
    # The third is longer than a sequence: it begins one, and its rest begins another.
    assert learnt(batch) == ["a" + BREAK, "bcd" + BREAK, "e" * 13, "e" * 26 + BREAK, "fg" + BREAK]
    assert count_real_tokens(batch) == 4 * len(HEAD + BREAK) + 1 + 3 + 40 + 2


def test_batch_positions_start_anew_at_each_document(tmp_path: Path) -> None:
    data = pack(tmp_path, ["abc", "de", "f" * 6], sequence_length=8, cross_documents=False)
    batch = in_order(data)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5, 0, 0]]
    assert (batch["labels"] < 0).nonzero().tolist() == [[0, 0], [0, 4], [0, 7], [1, 6], [1, 7]]
    assert count_real_tokens(batch) == 13


def test_batch_of_texts_has_no_positions_unless_asked_for(tmp_path: Path) -> None:
    batch = in_order(pack(tmp_path, ["abc", "de"], sequence_length=2))
    assert "position_ids" not in batch
    assert count_real_tokens(batch) == 6


def test_build_conversations_that_may_cross_are_laid_end_to_end(tmp_path: Path) -> None:
    data = pack_chats(tmp_path, ["a", "b"] * 3, cross_documents=True)
    assert data.num_tokens == 6 * 22
    assert "position_ids" not in in_order(data)


def test_build_few_conversations_hold_out_whole_sequences(tmp_path: Path) -> None:
    data = pack_chats(tmp_path, ["x" * 20] * 5, holdout_fraction=0.01, sequence_length=64)
    assert (data.num_tokens, data.held_out.num_tokens) == (4 * 64, 64)
    [held] = data.holdout(4)
    assert learnt(held) == ["x" * 20 + BREAK]


def test_build_other_sequence_length_packs_conversations_again(tmp_path: Path) -> None:
    for length in (32, 64):
        data = pack_chats(tmp_path, ["abc"] * 4, sequence_length=length)
        assert data.num_tokens % length == 0
        assert count_real_tokens(in_order(data)) == 4 * 24


def test_state_covers_what_is_learnt(tmp_path: Path) -> None:
    data = pack_chats(tmp_path, ["abc"])
    tokens = np.fromfile(data.train.path, np.uint16)
    tokens[-9] ^= 1  # the lowest mark: a token of the answer's end
    tokens.tofile(data.train.path)
    assert content_of(data.train.path).crc32 != data.state["crc32"]


@pytest.mark.parametrize(("largest", "itemsize"), [(2**14 - 1, 2), (2**14, 4)])
def test_build_with_few_tokens_of_large_ids_keeps_each_id(largest: int, itemsize: int, tmp_path: Path) -> None:
    vocabulary = {"<end>": 0, "near": 1, "far": largest}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    assert len(tokenizer) == 3
    (tmp_path / "text.txt").write_text("far near far")
    config = DataConfig(files=(str(tmp_path / "text.txt"),), sequence_length=4, holdout_fraction=0.0)
    data = PackedText.build(config, tokenizer, tmp_path / "run")
    assert data.batch(0, 1)["input_ids"].tolist() == [[largest, 1, largest, 0]]
    assert data.train.dtype.itemsize == itemsize


def test_held_out_documents_are_as_many_for_any_seed_and_other_ones() -> None:
    chosen = [[number for number in range(1000) if is_held_out(number, 0.03, seed)] for seed in range(4)]
    assert [len(found) for found in chosen] == [30] * 4
    assert len({tuple(found) for found in chosen}) == 4
