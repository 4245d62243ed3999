"""Packs documents into sequences of equal length, in an order that follows from the step alone.

Documents are tokenised once, and laid in two files of plain integers (`packer`), one to train on and one held out. A
sequence is a cut of `sequence_length` tokens, addressed by its number. The shuffle is a keyed permutation that is
computed for each number, so any step's batch can be read at once: a run that is resumed needs no position but its step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from megatier.config.data_section import DataConfig
from megatier.data import hub
from megatier.data.conversation import Conversation
from megatier.data.packer import FIRST, LEARNT, MARK_BITS, Packer, columns_of
from megatier.data.records import BadRecords
from megatier.data.text import documents, numbered_documents, read_rows
from megatier.data.token_files import NOTE_FILE, Content, read_contents, write_note
from megatier.data.tokenizer import vocabulary_size
from megatier.errors import REMEDIES, DataError
from megatier.files import create_file, open_regular

FILES = "train.tokens", "holdout.tokens"
"""Names of the files of tokens: to train on, and held out."""

SHUFFLE_ROUNDS = 6
"""Feistel rounds; four already look random."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRange:
    """Consecutive tokens of a file, in which sequences are counted."""

    path: Path
    dtype: np.dtype[np.unsignedinteger]
    """The integers of the file: a token's id with the marks of `packer` below it."""
    start: int
    """Number of its first token in the file."""
    num_tokens: int
    """The number of tokens."""
    is_apart: bool
    """Whether documents are apart, so that positions and attention start anew in each of them."""
    crc32: int
    """CRC32 of the whole file."""
    num_documents: int | None = None
    """Documents in it; None: unknown."""
    num_learnt: int | None = None
    """Tokens in it that are learnt; None: unknown."""

    def read(self, numbers: Sequence[int], length: int) -> dict[str, torch.Tensor]:
        """Return the sequences of these numbers, as `columns_of` gives them.

        The file is read and not mapped, because mapped pages would count as this process's.

        Raises:
            DataError: the file was cut short or removed from outside.
        """
        rows = np.empty((len(numbers), length), self.dtype)
        try:
            with os.fdopen(open_regular(self.path), "rb") as file:
                for row, number in zip(rows, numbers, strict=True):
                    first = self.start + number * length
                    file.seek(first * self.dtype.itemsize)
                    # Without the count numpy would spread the last token of a file that was cut over the whole row.
                    row[:] = np.frombuffer(file.read(row.nbytes), self.dtype, count=length)
        except (OSError, ValueError) as error:
            raise DataError(
                f"cannot read tokens from {self.path}: {error}. Something outside the run changed the file; `megatier "
                "resume` makes it again."
            ) from error

        return columns_of(rows, is_apart=self.is_apart)

    def batches(self, batch: int, length: int) -> Iterator[dict[str, torch.Tensor]]:
        """Yield all whole sequences in order, so many at a time."""
        numbers = range(self.num_tokens // length)
        for start in range(0, len(numbers), batch):
            some = numbers[start : start + batch]
            yield self.read(some, length)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedText:
    """A tokenised dataset: shuffled training sequences and held-out ones."""

    train: TokenRange
    """The tokens to train on."""
    held_out: TokenRange
    """The tokens to evaluate on."""
    sequence_length: int
    """The tokens of a sequence."""
    seed: int
    """Decides the order of sequences (`data.seed`)."""
    damaged: str | None = None
    """The file that made it necessary to tokenise again."""
    bad: BadRecords | None = None
    """The records that were left out when the text was tokenised."""

    @staticmethod
    def build(
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        directory: Path,
        progress: Callable[[int], None] = lambda _: None,
    ) -> PackedText:
        """Tokenise the dataset into `train.tokens` and `holdout.tokens` in a directory.

        Args:
            config: the dataset, and how it becomes sequences.
            tokenizer: makes tokens.
            directory: where the files lie.
            progress: is called with the number of tokens that came since the last call.

        Raises:
            DataError: a path is missing, a line is malformed, there is no text or less than one sequence, or no room
                for the files.
        """
        bad = BadRecords(skips=config.skip_bad)
        train, held_out, damaged = tokenise(config, tokenizer, directory, bad, progress)
        train, held_out = _split_few(train, held_out, config)
        if train.num_tokens < config.sequence_length:
            raise DataError(
                f"the dataset has {train.num_tokens} tokens to train on, less than one sequence of "
                f"{config.sequence_length}. Give it more text or lower data.sequence_length."
            )
        return PackedText(
            train=train,
            held_out=held_out,
            sequence_length=config.sequence_length,
            seed=config.seed,
            damaged=damaged,
            bad=bad,
        )

    @property
    def state(self) -> dict[str, Any]:
        """The note of a checkpoint that tells this text from another: numbers of tokens and their CRC32."""
        # Held-out text too: another one would give other losses of evaluations, with the same weights.
        held_out = {"num_tokens": self.held_out.num_tokens, "crc32": self.held_out.crc32}
        return {"num_tokens": self.num_tokens, "crc32": self.train.crc32, "held_out": held_out}

    @property
    def num_tokens(self) -> int:
        """Tokens to train on, with end tokens and fill, without held-out text."""
        return self.train.num_tokens

    @property
    def num_sequences(self) -> int:
        """Whole sequences to train on: one epoch."""
        return self.train.num_tokens // self.sequence_length

    def batch(self, step: int, batch: int) -> dict[str, torch.Tensor]:
        """Return the training batch of a step, counted from 0, as `TokenRange.read` gives it."""
        count = self.num_sequences
        numbers = []
        for position in range(step * batch, (step + 1) * batch):
            # Each epoch has a permutation of its own, and a batch may reach into the next one.
            epoch, place = divmod(position, count)
            numbers.append(shuffled(place, count, (self.seed, epoch)))
        return self.train.read(numbers, self.sequence_length)

    def holdout(self, batch: int) -> Iterator[dict[str, torch.Tensor]]:
        """Yield held-out batches in order, the last one perhaps smaller; none if the dataset is too small."""
        return self.held_out.batches(batch, self.sequence_length)


def tokenise(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    bad: BadRecords,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[TokenRange, TokenRange, str | None]:
    """Tokenise the dataset into two files, to train on and held out; of a stream, what is held out alone.

    Files that are there already are taken, if `tokens.json` says that they were made by the same settings and they are
    as they were made.

    Returns:
        The tokens to train on, those held out, and the file that was damaged, if that is why they were made again.

    Raises:
        DataError: a path is missing, a line is malformed, there is no text or no room for the files, or something else
            is in their place.
    """
    # A token's marks lie below its id, so 16 bits are enough for an id of 14.
    is_small = vocabulary_size(tokenizer) <= 1 << (16 - MARK_BITS)
    dtype: np.dtype[np.unsignedinteger] = np.dtype(np.uint16 if is_small else np.uint32)
    settings = settings_of(config, tokenizer)
    try:
        contents, damaged = read_contents(directory, settings, FILES)
        if contents is None:
            # While the files are being made no note may say that they are there.
            (directory / NOTE_FILE).unlink(missing_ok=True)
            contents = _write_tokens(config, tokenizer, dtype, directory, bad, progress)
            write_note(directory, settings, FILES, contents)
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, "Check the drive, or name another output.directory.")
        raise DataError(f"cannot write tokens to {directory}: {error.strerror or error}. {remedy}") from error

    train, held_out = (
        TokenRange(
            path=directory / name,
            dtype=dtype,
            start=0,
            num_tokens=content.num_bytes // dtype.itemsize,
            is_apart=config.is_apart,
            crc32=content.crc32,
            num_documents=content.num_documents,
            num_learnt=content.num_learnt,
        )
        for name, content in zip(FILES, contents, strict=True)
    )
    return train, held_out, damaged


def num_real_tokens(batch: Mapping[str, torch.Tensor]) -> int:
    """Return the number of a batch's tokens without the fill.

    If documents are apart, a token that is alone in one teaches nothing.
    """
    if "attention_mask" in batch:
        return int(batch["attention_mask"].sum())
    count = batch["input_ids"].numel()
    if "position_ids" not in batch:
        return count

    # Of images that are counted in several directions, the first positions are those of tokens.
    positions = batch["position_ids"]
    if positions.dim() == 3:
        positions = positions[0]

    # A token is fill if a document begins with it and another one with the next token, or the row ends.
    begins = torch.nn.functional.pad(positions, (0, 1)) == 0
    is_fill = begins[:, :-1] & begins[:, 1:]
    num_fill = int(is_fill.sum())
    return count - num_fill


def settings_of(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return everything that the tokens follow from, but for the contents of files, as JSON."""
    settings = dataclasses.asdict(config)
    size = vocabulary_size(tokenizer)
    settings["made_by"] = [type(tokenizer).__name__, tokenizer.name_or_path, size, tokenizer.eos_token_id]
    settings["template"] = tokenizer.chat_template

    # Versions that had no such settings left nothing out either, had no such bound, and read no images.
    for name in ("skip_bad", "max_samples", "images", "max_patches"):
        if not settings[name]:
            del settings[name]

    # Documents that are laid end to end give the same tokens for any length of a row.
    if not config.is_apart:
        settings["sequence_length"] = None
    return json.dumps(settings, sort_keys=True)


def _write_tokens(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    dtype: np.dtype[Any],
    directory: Path,
    bad: BadRecords,
    progress: Callable[[int], None],
) -> list[Content]:
    """Tokenise into two files, which get their names when both are whole and on the drive; return what is in each."""
    directory.mkdir(parents=True, exist_ok=True)
    partial = [directory / f"{name}.partial" for name in FILES]
    with create_file(partial[0]) as to_train, create_file(partial[1]) as to_held_out:
        # A packer each, since a row is of one of the two files.
        writers = []
        for file in (to_train, to_held_out):
            packer = Packer(config, tokenizer, bad)
            writers.append(_TokenWriter(file, dtype, packer, config.is_apart))

        for is_for_evaluation, document in sorted_out(config, bad):
            # False is 0 and True is 1, in the order of `FILES`.
            writer = writers[is_for_evaluation]
            num_tokens = writer.write(writer.packer.lay(document))
            progress(num_tokens)
        for writer in writers:
            writer.write(writer.packer.end())
            writer.file.flush()
            os.fsync(writer.file.fileno())

    # The folder is not synced. If a power failure undoes a name, the note is missing or its checksums do not fit, and
    # the text is tokenised again.
    for path, name in zip(partial, FILES, strict=True):
        path.rename(directory / name)
    return [Content(w.num_bytes, w.crc32, w.packer.num_documents, w.num_learnt) for w in writers]


@dataclass(slots=True)
class _TokenWriter:
    """One of the files, and what was written to it."""

    file: IO[bytes]
    dtype: np.dtype[Any]
    packer: Packer
    is_apart: bool
    num_bytes: int = 0
    crc32: int = 0
    num_learnt: int = 0

    def write(self, pieces: Iterable[NDArray[np.int64]]) -> int:
        """Append marked tokens; return their number."""
        count = 0
        for piece in pieces:
            count += len(piece)

            # The first token of a document that is apart has nothing before it from which it could be told.
            marks = LEARNT | FIRST if self.is_apart else LEARNT
            is_learnt = piece & marks == LEARNT
            self.num_learnt += int(np.count_nonzero(is_learnt))
            raw = piece.astype(self.dtype).tobytes()
            self.file.write(raw)
            self.num_bytes += len(raw)
            self.crc32 = zlib.crc32(raw, self.crc32)
        return count


def sorted_out(config: DataConfig, bad: BadRecords) -> Iterator[tuple[bool, str | Conversation]]:
    """Yield whether a document is held out, and the document; of a stream, those that are held out.

    Raises:
        DataError: as `numbered_documents` and `read_rows`.
    """
    split = config.holdout_split
    if config.streaming:
        split = split or config.split
        dataset, _ = hub.stream(config, split)
        rows = read_rows(config, split, dataset.take(config.holdout_rows), bad)
        yield from ((True, document) for document in rows if document)
        return

    count = 0
    for number, document in numbered_documents(config, bad=bad):
        held_out = split is None and is_held_out(number, config.holdout_fraction, config.seed)

        # A file that is named several times is trained on as often, and what is held out of it is evaluated once.
        if not held_out or number >= count:
            yield held_out, document
        count = max(count, number + 1)
    if split is not None:
        yield from ((True, document) for document in documents(config, split, bad))


def is_held_out(number: int, fraction: float, seed: int) -> bool:
    """Return whether a document is for evaluation: each 1 / fraction-th one, beginning at one that the seed chooses.

    Out of n documents n * fraction are chosen, rounded up or down. This needs no count of documents beforehand.
    """
    # The product of number and fraction grows by 1 at most with each document. A document is held out if a whole
    # number is passed with it, which happens evenly; the phase moves these points by a part of their distance.
    phase = _hash((seed,)) / 2**64
    return int((number + 1) * fraction + phase) > int(number * fraction + phase)


def shuffled(position: int, count: int, key: tuple[int, ...]) -> int:
    """Return the place of a position in the key's permutation of range(count).

    It is a Feistel network over the next power of four, and numbers past count are walked on. Unlike a library's
    shuffle it takes no memory and cannot change with the library's version.
    """
    # The network permutes a range of 4^half_bits numbers, at most four times `count`. So a walk from a number past
    # `count` takes few turns, and as it follows a permutation it comes back inside.
    num_bits = (count - 1).bit_length()
    half_bits = max(1, -(-num_bits // 2))
    mask = (1 << half_bits) - 1
    while True:
        left = position >> half_bits
        right = position & mask
        for turn in range(SHUFFLE_ROUNDS):
            left, right = right, left ^ (_hash((*key, turn, right)) & mask)
        position = (left << half_bits) | right
        if position < count:
            return position


def _hash(numbers: tuple[int, ...]) -> int:
    """Return 64 bits that depend on each number."""
    # Python's own hash may change with its version, and the order of a run must not.
    packed = b"".join(number.to_bytes(8, "little") for number in numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def _split_few(train: TokenRange, held_out: TokenRange, config: DataConfig) -> tuple[TokenRange, TokenRange]:
    """Hold out the last tokens, where documents are too few to hold one out."""
    if config.holdout_fraction == 0 or (train.num_tokens and held_out.num_tokens):
        return train, held_out
    whole = train if train.num_tokens else held_out
    length = config.sequence_length

    # Whole sequences, at least one if one is left to train on.
    wanted = int(whole.num_tokens * config.holdout_fraction) // length * length
    if whole.num_tokens >= 2 * length:
        wanted = max(wanted, length)
    cut = whole.num_tokens - wanted

    # Nobody counted the documents and learnt tokens of each part.
    part = replace(whole, num_documents=None, num_learnt=None)
    return replace(part, num_tokens=cut), replace(part, start=cut, num_tokens=wanted)
