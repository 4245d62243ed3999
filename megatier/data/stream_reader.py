"""Reads a stream window by window, and lays its tokens end to end as sequences, from any position on.

Rows are read in windows of `data.window_rows`, and those of a window are permute by a keyed permutation, as sequences
of files are. A window's tokens follow from its rows alone. So a reader that begins within a window reads all of it, and
leaves out the tokens that were used up before; their checksum tells whether they are what they were.
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
from megatier.errors import DataError


class StreamReader:
    """Makes sequences out of the rows of a stream."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        dataset: Any,  # noqa: ANN401 - datasets' own, which is optional
        bad: BadRecords,
        *,
        checks: bool,
    ) -> None:
        """Take a stream.

        Args:
            config: the data.
            tokenizer: the run's tokenizer.
            dataset: an `IterableDataset` without the rows that are held out.
            bad: counts records that are left out.
            checks: whether tokens that were used up before have to be what they were.
        """
        self._config = config
        self._tokenizer = tokenizer
        self._dataset = dataset
        self._bad = bad
        self._checks = checks

    def sequences(self, start: Position) -> Generator[tuple[NDArray[np.int64], Position]]:
        """Yield the sequences after a position, each with the position where it ends, for ever.

        Raises:
            DataError: the stream has no text, or is not what it was before the position.
        """
        # One for all windows: of a small one alone the tokenizer may know nothing. What comes before the position was
        # judged when it was read.
        packer = Packer(self._config, self._tokenizer, self._bad)
        packer.is_blind = start.epoch == start.window == 0
        length = self._config.sequence_length
        parts: list[NDArray[np.int64]] = []
        left = length

        # Pieces of the packer, windows and epochs end anywhere in a sequence.
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
        """Yield the tokens of each window in pieces, without those that are used up, and the position before them."""
        is_begun = start.used > 0
        for position, documents in self._windows(start):
            pieces = self._pack(position, documents, packer)

            # Only the first window may have been begun before.
            if is_begun:
                position, pieces = self._pass_over(position, pieces, start)
                is_begun = False
            yield position, pieces

    def _pass_over(
        self, position: Position, pieces: Iterator[NDArray[np.int64]], start: Position
    ) -> tuple[Position, Iterator[NDArray[np.int64]]]:
        """Read the tokens of a window that are used up, for their checksum alone; return where it goes on, and how.

        Raises:
            DataError: they are not what they were.
        """
        for tokens in pieces:
            old, new = np.split(tokens, [start.used - position.used])
            position = position.after(old)
            if position.used == start.used:
                self._check(position, start)
                return position, itertools.chain([new], pieces)

        # The window is shorter than it was, so its rows are others.
        self._check(position, start)
        return position, pieces

    def _check(self, found: Position, start: Position) -> None:
        """Refuse a window that is not the one that was read before, by the checksum of the tokens used up."""
        if found != start and self._checks:
            raise DataError(
                f"the stream of {self._config.dataset} is not what it was before the checkpoint: its rows are others. "
                "Bring the old ones back, or add --accept-changes to go on from the same row."
            )

    def _windows(self, start: Position) -> Iterator[tuple[Position, list[str | Conversation]]]:
        """Yield the documents of each window with the position before it, epoch by epoch."""
        config = self._config
        position = start
        while True:
            self._dataset.set_epoch(position.epoch)
            if position.dataset is not None:
                self._dataset.load_state_dict(position.dataset)

            # Windows before the one to go on from are not read again, and may have had text.
            has_text = position.window > 0
            rows = read_rows(config, config.split, self._dataset, self._bad)
            while window := self._read_window(rows):
                documents = [document for document in window if document]
                has_text |= bool(documents)
                yield replace(position, used=0, crc32=0), documents

                # The dataset stands before the next window now.
                position = replace(position, window=position.window + 1, dataset=self._dataset.state_dict())

            # Without this a dataset without text would be read again and again for ever.
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
        """Yield the tokens of a window, its documents permute; whole sequences if documents stay whole."""
        config = self._config
        count = len(documents)
        key = (config.seed, position.epoch, position.window)
        for number in range(count):
            document = documents[permute(number, count, key)]
            yield from packer.lay(document)

        # Texts go on in the next window. Conversations may wait to be packed, and belong to this one.
        if config.chat is not None:
            yield from packer.end()
        packer.check()
