"""Documents packed into sequences of equal length, in an order that follows from the step alone.

Documents are tokenised once, each text closed by the end token, and laid end to end in two files of plain integers, one
to train on and one held out. An integer is a token's id, and below it two bits that say whether the token is learnt and
whether a document begins there. A sequence is a cut of `sequence_length` tokens, addressed by its number. The shuffle
is a keyed permutation computed per number, so any step's batch can be read at once: a resumed run needs no position but
its step.

Where documents are apart (`DataConfig.is_apart`), a conversation that does not fit in the rest of a sequence begins the
next one. The rest is filled with end tokens, each alone in a document of its own: nothing sees them or learns them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from megatier.config import BYTE_TOKENIZER, DataConfig
from megatier.data import hub
from megatier.data.conversation import Conversation
from megatier.data.template import tokenise_chat
from megatier.data.text import documents, read_rows
from megatier.errors import DataError

PIECE_CHARACTERS = 1 << 17
"""Tokenisers take about 200 bytes a token, so a longer document is tokenised in pieces that end at a line's end."""

IGNORED = -100
"""Label of a token that is not learnt, as Hugging Face has it."""

FINGERPRINT_BYTES = 16 << 20
SETTINGS_FILE = "tokens.json"

MARK_BITS = 2
LEARNT, FIRST = 1, 2
"""Marks below a token's id: its label counts; a document begins with it."""

SHUFFLE_ROUNDS = 6
"""Feistel rounds; four already look random."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens of a file, in which sequences are counted."""

    path: Path
    dtype: np.dtype[np.unsignedinteger]
    start: int
    """First token."""
    num_tokens: int
    is_apart: bool
    """Positions start anew at each document, and so attention does."""

    def read(self, numbers: Sequence[int], length: int) -> dict[str, torch.Tensor]:
        """The sequences of these numbers, as `columns_of` gives them.

        Read, not mapped: mapped pages would count as this process's.

        Raises:
            DataError: the file was cut short or removed from outside.
        """
        rows = np.empty((len(numbers), length), self.dtype)
        try:
            with self.path.open("rb") as file:
                for row, number in zip(rows, numbers, strict=True):
                    file.seek((self.start + number * length) * self.dtype.itemsize)
                    row[:] = np.frombuffer(file.read(length * self.dtype.itemsize), self.dtype)
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read tokens from {self.path}: {error}. Something outside changed it.") from error
        return columns_of(rows, is_apart=self.is_apart)

    def batches(self, batch: int, length: int) -> Iterator[dict[str, torch.Tensor]]:
        """All whole sequences in order, so many at a time."""
        count = self.num_tokens // length
        for start in range(0, count, batch):
            yield self.read(range(start, min(start + batch, count)), length)


@dataclass(frozen=True)
class PackedText:
    """A tokenised dataset: shuffled training sequences and held-out ones."""

    train: TokenSpan
    held_out: TokenSpan
    sequence_length: int
    seed: int
    vocabulary_size: int
    """Tokens of the tokenizer; every id is below."""

    @staticmethod
    def build(config: DataConfig, tokenizer: PreTrainedTokenizerBase, directory: Path) -> PackedText:
        """Tokenise the dataset into `train.tokens` and `holdout.tokens` in a directory.

        Raises:
            DataError: missing path, malformed line, no text, less than one sequence, or no room for the files.
        """
        train_span, held_out_span = _split_few(*tokenise(config, tokenizer, directory), config)
        if train_span.num_tokens < config.sequence_length:
            raise DataError(
                f"the dataset has {train_span.num_tokens} tokens to train on, less than one sequence of "
                f"{config.sequence_length}. Give data.files more text or lower data.sequence_length."
            )
        return PackedText(train_span, held_out_span, config.sequence_length, config.seed, len(tokenizer))

    @cached_property
    def state(self) -> dict[str, Any]:
        """What a checkpoint notes, which tells this text from another: tokens to train on and their CRC32.

        Raises:
            DataError: the file was removed from outside.
        """
        crc = 0
        try:
            with self.train.path.open("rb") as file:
                while piece := file.read(FINGERPRINT_BYTES):
                    crc = zlib.crc32(piece, crc)
        except OSError as error:
            raise DataError(f"cannot read tokens from {self.train.path}: {error.strerror}.") from error
        return {"num_tokens": self.num_tokens, "crc32": crc}

    @property
    def num_tokens(self) -> int:
        """Tokens to train on, end tokens and fill included, held-out text not."""
        return self.train.num_tokens

    @property
    def num_holdout_tokens(self) -> int:
        """Tokens held out."""
        return self.held_out.num_tokens

    @property
    def num_sequences(self) -> int:
        """Whole sequences to train on: one epoch."""
        return self.train.num_tokens // self.sequence_length

    def batch(self, step: int, batch: int) -> dict[str, torch.Tensor]:
        """Training batch of a step (counted from 0), as `TokenSpan.read` gives it."""
        positions = range(step * batch, (step + 1) * batch)
        count = self.num_sequences
        numbers = [shuffled(position % count, count, (self.seed, position // count)) for position in positions]
        return self.train.read(numbers, self.sequence_length)

    def holdout(self, batch: int) -> Iterator[dict[str, torch.Tensor]]:
        """Held-out batches in order, the last one perhaps smaller; none where the dataset is too small."""
        return self.held_out.batches(batch, self.sequence_length)


def tokenise(config: DataConfig, tokenizer: PreTrainedTokenizerBase, directory: Path) -> tuple[TokenSpan, TokenSpan]:
    """The dataset in two files of tokens, to train on and held out; of a stream what is held out alone.

    What is there already is taken, where `tokens.json` beside it says that it was made by the same settings.

    Raises:
        DataError: missing path, malformed line, no text, or no room for the files.
    """
    is_small = len(tokenizer) <= 1 << (16 - MARK_BITS)
    dtype: np.dtype[np.unsignedinteger] = np.dtype(np.uint16 if is_small else np.uint32)
    paths = directory / "train.tokens", directory / "holdout.tokens"
    try:
        made, settings = directory / SETTINGS_FILE, settings_of(config, tokenizer)
        if not all(path.exists() for path in (*paths, made)) or made.read_text("utf-8") != settings:
            made.unlink(missing_ok=True)
            _write_tokens(config, tokenizer, dtype, *paths)
            made.write_text(settings, "utf-8")
    except OSError as error:
        raise DataError(f"cannot write tokens to {directory}: {error.strerror}.") from error
    sizes = [path.stat().st_size // dtype.itemsize for path in paths]
    train, held_out = (
        TokenSpan(path, dtype, 0, size, config.is_apart) for path, size in zip(paths, sizes, strict=True)
    )
    return train, held_out


def columns_of(rows: NDArray[np.integer], *, is_apart: bool) -> dict[str, torch.Tensor]:
    """What the model takes of rows of marked tokens, all int64 [rows, length].

    `input_ids`; `labels`, equal or -100 where a token is not learnt (the model shifts them); where documents are apart
    `position_ids`, which count from 0 at each.
    """
    ids = (rows >> MARK_BITS).astype(np.int64)
    columns = {"input_ids": ids, "labels": np.where(rows & LEARNT, ids, IGNORED)}
    if is_apart:
        begins = rows & FIRST != 0
        columns["labels"][begins] = IGNORED  # nothing before it to tell it from
        order = np.arange(rows.shape[1])
        columns["position_ids"] = order - np.maximum.accumulate(np.where(begins, order, 0), axis=1)
    return {name: torch.from_numpy(column) for name, column in columns.items()}


def num_real_tokens(batch: Mapping[str, torch.Tensor]) -> int:
    """Tokens of a batch but for the fill: where documents are apart, a token alone in one teaches nothing."""
    count = batch["input_ids"].numel()
    if "position_ids" not in batch:
        return count
    begins = torch.nn.functional.pad(batch["position_ids"], (0, 1)) == 0
    return count - int((begins[:, :-1] & begins[:, 1:]).sum())


def settings_of(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """What the tokens follow from, but for the files' contents."""
    made_by = [type(tokenizer).__name__, tokenizer.name_or_path, len(tokenizer), tokenizer.eos_token_id]
    settings = {**dataclasses.asdict(config), "made_by": made_by, "template": tokenizer.chat_template}
    if not config.is_apart:
        settings["sequence_length"] = None
    return json.dumps(settings, sort_keys=True)


def _write_tokens(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, dtype: np.dtype[Any], train: Path, held_out: Path
) -> None:
    """Tokenise into two files, which get their names when both are whole and on the drive."""
    train.parent.mkdir(parents=True, exist_ok=True)
    partial = [path.with_name(f"{path.name}.partial") for path in (train, held_out)]
    with partial[0].open("wb") as to_train, partial[1].open("wb") as to_held_out:
        packers = [(Packer(config, tokenizer), file) for file in (to_train, to_held_out)]
        for is_for_evaluation, document in _sorted_out(config):
            packer, file = packers[is_for_evaluation]
            for piece in packer.lay(document):
                piece.astype(dtype).tofile(file)
        for packer, file in packers:
            for piece in packer.end_row():
                piece.astype(dtype).tofile(file)
            file.flush()
            os.fsync(file.fileno())
    for path, name in zip(partial, (train, held_out), strict=True):
        path.rename(name)


def _sorted_out(config: DataConfig) -> Iterator[tuple[bool, str | Conversation]]:
    """Each document, behind whether it is held out; of a stream those that are."""
    split = config.holdout_split
    if config.streaming:
        split = split or config.split
        dataset, _ = hub.stream(config, split)
        rows = read_rows(config, split, dataset.take(config.holdout_rows))
        yield from ((True, document) for document in rows if document)
        return
    for number, document in enumerate(documents(config)):
        yield split is None and is_held_out(number, config.holdout_fraction, config.seed), document
    if split is not None:
        yield from ((True, document) for document in documents(config, split))


class Packer:
    """Documents laid end to end in rows, as marked tokens."""

    def __init__(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """At the beginning of a row."""
        self._config, self._tokenizer = config, tokenizer
        self._row = config.sequence_length
        self._left = self._row
        """Tokens that fit in the row that was begun."""

    def lay(self, document: str | Conversation) -> Iterator[NDArray[np.int64]]:
        """A document's tokens in pieces; behind the fill, where one that stays whole begins a row."""
        is_whole = self._config.is_apart and isinstance(document, Conversation)
        first = FIRST
        for piece in _marked(document, self._config, self._tokenizer):
            if is_whole and self._left < len(piece) <= self._row:
                yield from self.end_row()
            if len(piece):
                piece[0] |= first
                first = 0
            self._left = self._row - (self._row - self._left + len(piece)) % self._row
            yield piece

    def end_row(self) -> Iterator[NDArray[np.int64]]:
        """The fill of a row that was begun, where documents are apart."""
        if self._config.is_apart and self._left < self._row:
            yield np.full(self._left, self._tokenizer.eos_token_id << MARK_BITS | FIRST)
            self._left = self._row


def _marked(
    document: str | Conversation, config: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> Iterator[NDArray[np.int64]]:
    """Tokens of a document with their marks: a conversation's in one piece, a text's in several."""
    if isinstance(document, Conversation):
        ids, learnt = tokenise_chat(document, tokenizer)
        yield ids << MARK_BITS | np.where(learnt, LEARNT, 0)
        return
    for piece in _pieces(document):
        yield _tokenise(piece, config, tokenizer) << MARK_BITS | LEARNT
    yield np.asarray([tokenizer.eos_token_id << MARK_BITS | LEARNT])


def is_held_out(number: int, fraction: float, seed: int) -> bool:
    """Whether a document is for evaluation: each 1 / fraction-th one, from a place that the seed chooses.

    Out of n documents n * fraction are chosen, rounded up or down. Needs no count of documents beforehand.
    """
    phase = _hash((seed,)) / 2**64
    return int((number + 1) * fraction + phase) > int(number * fraction + phase)


def shuffled(position: int, count: int, key: tuple[int, ...]) -> int:
    """Where position lands in the key's permutation of range(count).

    A Feistel network over the next power of four; numbers past count are walked on. Unlike a library's shuffle it takes
    no memory and cannot change with the library's version.
    """
    half_bits = max(1, -(-(count - 1).bit_length() // 2))
    mask = (1 << half_bits) - 1
    while True:
        left, right = position >> half_bits, position & mask
        for turn in range(SHUFFLE_ROUNDS):
            left, right = right, left ^ (_hash((*key, turn, right)) & mask)
        position = (left << half_bits) | right
        if position < count:
            return position


def _hash(numbers: tuple[int, ...]) -> int:
    """64 bits that depend on each number."""
    packed = b"".join(number.to_bytes(8, "little") for number in numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces of bounded length, cut at the ends of lines where there are some."""
    start = 0
    while start < len(text):
        stop = start + PIECE_CHARACTERS
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        yield text[start:stop]
        start = stop


def _tokenise(text: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> NDArray[np.int64]:
    """Token ids of a piece."""
    if config.tokenizer == BYTE_TOKENIZER:
        # What the byte tokenizer says, about two hundred times faster.
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int64)
    return np.asarray(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int64)


def _split_few(train: TokenSpan, held_out: TokenSpan, config: DataConfig) -> tuple[TokenSpan, TokenSpan]:
    """Where documents are too few to hold one out, hold out the last tokens instead."""
    if config.holdout_fraction == 0 or (train.num_tokens and held_out.num_tokens):
        return train, held_out
    whole = train if train.num_tokens else held_out
    length = config.sequence_length
    # Whole sequences, at least one if one is left to train on.
    wanted = int(whole.num_tokens * config.holdout_fraction) // length * length
    wanted = max(wanted, length if whole.num_tokens >= 2 * length else 0)
    cut = whole.num_tokens - wanted
    return replace(whole, num_tokens=cut), replace(whole, start=cut, num_tokens=wanted)
