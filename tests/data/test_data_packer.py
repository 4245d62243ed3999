"""Which pieces share a row, and what a packer lays where."""

from __future__ import annotations

import random

import numpy as np
import pytest

from megatier.config.data_section import DataConfig
from megatier.data import packer
from megatier.data.conversation import Conversation
from megatier.data.packer import FIRST_MARK, MARK_BITS, Packer, best_fit
from megatier.data.records import BadRecords
from megatier.data.tokenizer import byte_tokenizer


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        ([], []),
        ([10], [[0]]),
        ([4, 7, 6, 3], [[0, 2], [1, 3]]),
        ([5, 5, 5], [[0, 1], [2]]),
        ([1, 9, 8, 1], [[0, 1], [2, 3]]),
        ([2, 10, 3], [[0, 2], [1]]),
    ],
)
def test_best_fit_takes_the_fullest_row_with_room_and_keeps_the_order(sizes: list[int], rows: list[list[int]]) -> None:
    assert best_fit(sizes, 10) == rows


def test_best_fit_places_each_piece_once_and_leaves_little() -> None:
    draw = random.Random(0)
    for _ in range(20):
        sizes = [min(1024, int(draw.lognormvariate(5.3, 0.9)) + 8) for _ in range(1000)]
        rows = best_fit(sizes, 1024)
        assert sorted(piece for row in rows for piece in row) == list(range(1000))
        assert max(sum(sizes[piece] for piece in row) for row in rows) <= 1024
        assert len(rows) * 1024 < 1.02 * sum(sizes) + 1024


def conversation(answer: str) -> Conversation:
    turns = [{"role": "user", "content": ""}, {"role": "assistant", "content": answer}]
    return Conversation(turns, None, "here")


def test_add_windows_are_whole_rows_and_texts_in_between_keep_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packer, "WINDOW_ROWS", 0)
    config = DataConfig(files=("a",), tokenizer="bytes", sequence_length=64, window_rows=2, cross_documents=False)
    made = Packer(config, byte_tokenizer(), BadRecords(skips=False))
    documents: list[str | Conversation] = ["text", conversation("a"), conversation("b" * 100), conversation("c"), "end"]
    laid = [np.concatenate([*made.add(document), np.empty(0, np.int64)]) for document in documents]
    assert [len(tokens) for tokens in laid] == [5, 0, 64 - 5 + 2 * 64, 0, 64 + 4]
    rest = np.concatenate(list(made.finish()))
    tokens = np.concatenate([*laid, rest])
    assert len(tokens) % 64 == 0
    rows = (tokens >> MARK_BITS).reshape(-1, 64)
    assert bytes(rows[0, :4].tolist()) == b"text"
    assert (rows[0, 5:] == 256).all()
    assert (tokens.reshape(-1, 64)[1:, 0] & FIRST_MARK != 0).all(), (
        "each row begins a document, also that which goes on"
    )
    assert bytes(rows[-1, :3].tolist()) == b"end"


def test_add_windows_carry_over_what_their_emptiest_row_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of two rows would leave a quarter of them empty. Each conversation comes once, and whole."""
    monkeypatch.setattr(packer, "WINDOW_ROWS", 2)
    config = DataConfig(files=("a",), tokenizer="bytes", sequence_length=256, window_rows=1, chat="messages")
    made = Packer(config, byte_tokenizer(), BadRecords(skips=False))
    draw = random.Random(4)
    answers = [f"<{number:03}{'x' * draw.randrange(60)}>" for number in range(400)]
    pieces = [piece for answer in answers for piece in made.add(conversation(answer))] + list(made.finish())

    tokens = np.concatenate(pieces)
    assert len(tokens) % 256 == 0
    text = bytes((tokens >> MARK_BITS)[(tokens >> MARK_BITS) < 256].astype(np.uint8).tolist()).decode()
    assert sorted(found for found in answers if text.count(found) == 1) == sorted(answers)
    fill = np.count_nonzero(tokens == byte_tokenizer().eos_token_id << MARK_BITS | FIRST_MARK)
    assert fill < 0.05 * len(tokens)


def test_add_same_conversations_same_tokens_whatever_is_tokenised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = DataConfig(files=("a",), tokenizer="bytes", sequence_length=64, chat="messages")
    found = []
    for characters in (1, 100, 1 << 17):
        monkeypatch.setattr("megatier.data.template.BATCH_CHARACTERS", characters)
        made = Packer(config, byte_tokenizer(), BadRecords(skips=False))
        assert [piece for number in range(30) for piece in made.add(conversation("x" * (number * 7 % 40)))] == []
        found.append(np.concatenate(list(made.finish())).tolist())
    assert found[0] == found[1] == found[2]
