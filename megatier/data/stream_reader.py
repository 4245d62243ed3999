"""Reads a stream in windows, and cuts its tokens into sequences, from any position on.

A window has `data.window_rows` rows, which are shuffled by a keyed permutation, as the sequences of files are. Its
tokens depend on its rows alone. So a reader that starts inside a window reads all of it and skips the tokens that were
used before; their checksum shows whether they are still the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from megatier.config.data_section import DataConfig
from megatier.data.conversation import Conversation
from megatier.data.packer import Packer, is_window
from megatier.data.records import BadRecords
from megatier.data.shuffle import permute
from megatier.data.stream_position import Position
from megatier.data.text import read_rows
from megatier.data.unknown_tokens import UnknownTokens
from megatier.errors import DataError


class StreamReader:
    """Makes sequences from the rows of a stream."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        dataset: Any,  # noqa: ANN401 - datasets' own, which is optional
        bad: BadRecords,
        unknown: UnknownTokens,
        *,
        checks: bool,
    ) -> None:
        """Take a stream.

        Args:
            config: the data.
            tokenizer: the run's tokenizer.
            dataset: an `IterableDataset` without the held-out rows.
            bad: counts records that are left out.
            unknown: the tokens for which the model has no embeddings.
            checks: whether the skipped tokens have to be the same as before.
        """
        self._config = config
        self._tokenizer = tokenizer
        self._dataset = dataset
        self._bad = bad
        self._unknown = unknown
        self._checks = checks

    def sequences(self, start: Position) -> Generator[tuple[NDArray[np.int64], Position]]:
        """Yield the sequences after a position without end, each with the position after it.

        Raises:
            DataError: the stream has no text, or has changed before the position.
        """
        # One packer serves all windows, because the tokenizer may know nothing of one small window. The text before the
        # position was checked when it was read.
        packer = Packer(self._config, self._tokenizer, self._bad, self._unknown)
        packer.understands_nothing = start.epoch == start.window == 0
        length = self._config.sequence_length
        parts: list[NDArray[np.int64]] = []
        left = length

        # The packer's pieces, windows and epochs may end anywhere in a sequence.
        for position, pieces in self._new_pieces(start, packer):
            for tokens in pieces:
                while len(tokens):
                    part, tokens = np.split(tokens, [left])
                    position = position.after(part)
                    parts.append(part)
                    left -= len(part)
                    if not left:
                        yield np.concatenate(parts), position
                        parts = []
                        left = length

    def _new_pieces(self, start: Position, packer: Packer) -> Iterator[tuple[Position, Iterator[NDArray[np.int64]]]]:
        """Yield the position before each window and the window's unused tokens, in pieces."""
        is_begun = start.used > 0
        for position, documents in self._windows(start):
            pieces = self._pack(position, documents, packer)

            # Only the first window may have been used in part.
            if is_begun:
                position, pieces = self._pass_over(position, pieces, start)
                is_begun = False
            yield position, pieces

    def _pass_over(
        self, position: Position, pieces: Iterator[NDArray[np.int64]], start: Position
    ) -> tuple[Position, Iterator[NDArray[np.int64]]]:
        """Skip the used tokens of a window and compare their checksum; return the position after them and the rest.

        Raises:
            DataError: the tokens have changed.
        """
        for tokens in pieces:
            old, new = np.split(tokens, [start.used - position.used])
            position = position.after(old)
            if position.used == start.used:
                self._check(position, start)
                return position, itertools.chain([new], pieces)

        # The window has become shorter, so its rows have changed.
        self._check(position, start)
        return position, pieces

    def _check(self, checksum: Position, start: Position) -> None:
        """Refuse a window whose used tokens have another checksum than before."""
        if checksum != start and self._checks:
            raise DataError(
                f"the stream of {self._config.dataset} is not what it was before the checkpoint: its rows are others. "
                "Bring the old ones back, or add --accept-changes to go on from the same row."
            )

    def _windows(self, start: Position) -> Iterator[tuple[Position, list[str | Conversation]]]:
        """Yield the position before each window and the window's documents, epoch by epoch."""
        config = self._config
        position = start
        while True:
            self._dataset.set_epoch(position.epoch)
            if position.dataset is not None:
                self._dataset.load_state_dict(position.dataset)

            # Earlier windows are not read again, and may have had text.
            has_text = position.window > 0
            rows = read_rows(config, config.split, self._dataset, self._bad)
            while window := self._read_window(rows):
                documents = [document for document in window if document]
                has_text |= bool(documents)
                yield replace(position, used=0, crc32=0), documents

                # By now the dataset is at the beginning of the next window.
                position = replace(position, window=position.window + 1, dataset=self._dataset.state_dict())

            # A dataset without text would otherwise be read over and over.
            if not has_text:
                raise DataError(
                    f"no text in {config.dataset} ({config.split}) after the rows that are held out. Check "
                    "data.dataset, data.split and data.text_field, or lower data.holdout_rows."
                )
            position = Position(epoch=position.epoch + 1)

    def _read_window(self, rows: Iterator[str | Conversation]) -> list[str | Conversation]:
        """Return the documents of the next window; empty at the end of the epoch."""
        window = list[str | Conversation]()
        num_bytes = 0
        for document in rows:
            window.append(document)
            stays_whole = False
            if isinstance(document, Conversation):
                num_bytes += document.num_bytes
                stays_whole = self._config.is_apart
            if is_window(self._config, len(window), num_bytes if stays_whole else None):
                break

        return window

    def _pack(
        self, position: Position, documents: list[str | Conversation], packer: Packer
    ) -> Iterator[NDArray[np.int64]]:
        """Yield the tokens of a window in shuffled order; whole sequences if documents stay whole."""
        config = self._config
        count = len(documents)
        key = (config.seed, position.epoch, position.window)
        for number in range(count):
            document = documents[permute(number, count, key)]
            yield from packer.add(document)

        # A text may continue in the next window. Conversations that wait to be packed belong to this one.
        if config.chat is not None:
            yield from packer.finish()
        packer.check()
