"""Makes sequences out of a stream: rows of a dataset that are tokenised and packed while the run goes on.

Rows are read in windows of `data.window_rows`, and those of a window are shuffled by a keyed permutation, as sequences
of files are. A window's tokens follow from its rows alone, so a position in the stream is small: the dataset's own
state before the window, and how many of the window's tokens are used up. A run that is resumed reads that window again
and leaves those tokens out; their checksum tells whether they are what they were. (The library's own shuffle buffer
loses its rows when a stream goes on, so it is not used.)

One thread makes the sequences of the steps ahead. At the end of the stream it begins again with the next epoch.
"""

from __future__ import annotations

import hashlib
import itertools
import zlib
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from megatier.config.data_section import DataConfig
from megatier.data import hub
from megatier.data.conversation import Conversation
from megatier.data.packer import Packer, columns_of, is_window
from megatier.data.packing import settings_of, shuffled, tokenise
from megatier.data.records import BadRecords
from megatier.data.shards import changes, shards_of
from megatier.data.text import read_rows
from megatier.errors import CheckpointError, DataError
from megatier.workers import Task, Workers

CHANGES_SHOWN = 5
"""Most files that are named which are not those that the run began with."""
STEPS_AHEAD = 2
"""Steps whose sequences are made before they are asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """The place in a stream where a sequence ends."""

    epoch: int = 0
    """The number of times that the stream was read to its end before."""
    window: int = 0
    """Number of the window in the epoch."""
    dataset: dict[str, Any] | None = None
    """`IterableDataset.state_dict` before the window; None: the beginning."""
    used: int = 0
    """Tokens of the window that belong to this sequence and those before."""
    crc32: int = 0
    """CRC32 of these tokens."""

    @classmethod
    def read(cls, stored: object) -> Self:
        """Return the position that a checkpoint holds.

        Raises:
            CheckpointError: it is none.
        """
        names = ("epoch", "window", "used", "crc32")
        if not isinstance(stored, Mapping) or stored.keys() != {*names, "dataset"}:
            raise CheckpointError("the checkpoint is damaged: it has no position in the stream.")

        # By type: True is an int for Python.
        counts = [stored[name] for name in names]
        are_counts = all(type(count) is int and count >= 0 for count in counts)
        has_state = isinstance(stored["dataset"], dict | None)
        if not (are_counts and has_state):
            raise CheckpointError(f"the checkpoint is damaged: its position in the stream is {str(stored)[:200]}.")
        return cls(**stored)


class TextStream:
    """Training sequences of a stream, in order, and held-out ones. Use it as a context: its thread ends with it.

    Attributes:
        damaged: the file that made it necessary to tokenise the held-out text again, if one did.
        bad: the records that were left out since the stream was opened. One counts again in each epoch.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        directory: Path,
        state: Mapping[str, Any] | None = None,
        *,
        accepts_changes: bool = False,
    ) -> None:
        """Tokenise what is held out, and open the stream.

        Args:
            config: the data, with `streaming`.
            tokenizer: the run's tokenizer.
            directory: where the held-out tokens are written.
            state: `state` of the run that is resumed; None: the stream begins.
            accepts_changes: begin if the state is of other settings or another dataset, and take other tokens than it
                notes.

        Raises:
            DataError: the dataset cannot be read, or is not that of the state.
            CheckpointError: the state is damaged.
        """
        self._config = config
        self._tokenizer = tokenizer
        self.bad = BadRecords(skips=config.skip_bad)
        settings = settings_of(config, tokenizer).encode()
        self._settings = hashlib.blake2b(settings, digest_size=16).hexdigest()
        self._position, commit = self._start(state, accepts_changes=accepts_changes)
        self._checks = not accepts_changes

        # The commit of the beginning, so that rows do not change when somebody pushes to the dataset.
        pinned = replace(config, revision=commit or config.revision)
        self._dataset, self._commit = hub.stream(pinned, config.split)
        files = hub.local_files(config, config.split)
        self._shards = shards_of(config.dataset or "", files)
        self._check_shards(state)
        pinned = replace(pinned, revision=self._commit)
        _, self._held_out, self.damaged = tokenise(pinned, tokenizer, directory, self.bad)
        self._check_held_out(state)

        # Not called for 0 rows: even then `skip` would keep the dataset from reordering its shards.
        if config.holdout_split is None and config.holdout_rows:
            self._dataset = self._dataset.skip(config.holdout_rows)

        self._sequences = self._read_sequences(self._position)
        self._ahead: deque[Task[list[tuple[NDArray[np.int64], Position]]]] = deque()
        self._worker = Workers(1, "megatier-stream")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The thread first: a generator that runs in it cannot be closed.
        self._worker.close()
        self._sequences.close()

    @property
    def state(self) -> dict[str, Any]:
        """The note of a checkpoint: the stream, and the position in it where the last batch ended."""
        return {
            "settings": self._settings,
            "commit": self._commit,
            "position": asdict(self._position),
            "held_out": self._held_out.crc32,
            "shards": self._shards,
        }

    def batch(self, step: int, batch: int) -> dict[str, torch.Tensor]:
        """Return the next sequences, as `columns_of` gives them.

        Args:
            step: not used, because a stream has one order; files take it.
            batch: number of sequences.

        Raises:
            DataError: the stream is malformed, broke off, or has no text.
        """
        # One more than the steps ahead, since the first one is what this call waits for.
        while len(self._ahead) <= STEPS_AHEAD:
            task = self._worker.submit(partial(self._take, batch))
            self._ahead.append(task)

        # Taken out of the queue only after the wait, so that an interrupt in the wait loses no sequence.
        taken = self._ahead[0].result()
        self._ahead.popleft()

        # A checkpoint notes where the steps are, and not the worker, which is ahead of them.
        _, self._position = taken[-1]
        rows = [row for row, _ in taken]
        return columns_of(np.stack(rows), is_apart=self._config.is_apart)

    def holdout(self, batch: int) -> Iterator[dict[str, torch.Tensor]]:
        """Yield held-out batches in order, the last one perhaps smaller."""
        return self._held_out.batches(batch, self._config.sequence_length)

    def _start(self, state: Mapping[str, Any] | None, *, accepts_changes: bool) -> tuple[Position, str | None]:
        """Return the position and the commit to go on from."""
        if state is None:
            return Position(), None
        if state.get("settings") == self._settings:
            commit = state.get("commit")
            if not isinstance(commit, str | None):
                raise CheckpointError(f"the checkpoint is damaged: the stream's commit is {str(commit)[:100]}.")
            return Position.read(state.get("position")), commit

        if accepts_changes:
            return Position(), None
        raise DataError(
            "the stream is not that of the checkpoint: its dataset, settings, tokenizer or chat template are others. "
            "Bring the old ones back, or add --accept-changes to begin the new stream."
        )

    def _check_shards(self, state: Mapping[str, Any] | None) -> None:
        """Refuse files that are not those of the state, also those that no step has come to yet."""
        # An older version noted none.
        noted = {} if state is None else state.get("shards", {})
        if not isinstance(noted, Mapping) or not all(isinstance(found, list) for found in noted.values()):
            raise CheckpointError(f"the checkpoint is damaged: the stream's files are {str(noted)[:100]}.")
        if not noted or not self._checks:
            return

        found = changes(noted, self._shards)
        if found:
            shown = "; ".join(found[:CHANGES_SHOWN])
            num_more = len(found) - CHANGES_SHOWN
            if num_more > 0:
                shown += f"; and {num_more} more"
            raise DataError(
                f"the files of {self._config.dataset} are not those that the run began with: "
                f"{shown}. Bring the old ones back, or add --accept-changes to go on "
                "with these."
            )

    def _check_held_out(self, state: Mapping[str, Any] | None) -> None:
        """Refuse held-out text that is not that of the state."""
        if state is None or not self._checks:
            return
        # An older version noted none.
        found = self._held_out.crc32
        if state.get("held_out", found) != found:
            raise DataError(
                f"the rows of {self._config.dataset} that are held out are not those of the checkpoint. Bring the old "
                "ones back, or add --accept-changes to evaluate on these."
            )

    def _take(self, batch: int) -> list[tuple[NDArray[np.int64], Position]]:
        """Return the next sequences; this runs in the stream's thread."""
        return list(itertools.islice(self._sequences, batch))

    def _read_sequences(self, start: Position) -> Generator[tuple[NDArray[np.int64], Position]]:
        """Yield the sequences after a position, each with the position where it ends, for ever."""
        length = self._config.sequence_length
        sequence = list[NDArray[np.int64]]()
        for end, part in self._parts(start):
            sequence.append(part)
            num_tokens = sum(map(len, sequence))
            # Never more: a part ends where a sequence does.
            if num_tokens == length:
                yield np.concatenate(sequence), end
                sequence = []

    def _parts(self, start: Position) -> Iterator[tuple[Position, NDArray[np.int64]]]:
        """Yield the tokens after a position in parts, each with the position where it ends.

        A part ends where a sequence does, or where a piece of the packer does. Those that are used up already are read
        again, for their checksum alone.
        """
        length = self._config.sequence_length
        left = self._config.sequence_length
        left_out = start.used
        for position, documents in self._windows(start):
            for tokens in self._pack(position, documents):
                while len(tokens):
                    # Cut where the tokens end that are used up already, and from there on where a sequence ends.
                    is_new = position.used >= left_out
                    part, tokens = np.split(tokens, [left if is_new else left_out - position.used])
                    crc32 = zlib.crc32(part.tobytes(), position.crc32)
                    position = replace(position, used=position.used + len(part), crc32=crc32)
                    if is_new:
                        left = left - len(part) or length
                        yield position, part
                    elif position.used == left_out:
                        self._check(position, start)

            # The window is shorter than it was, so its rows are others.
            if position.used < left_out:
                self._check(position, start)

            # Only the first window was begun before.
            left_out = 0

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
            found = position.window > 0
            rows = read_rows(config, config.split, self._dataset, self.bad)
            while window := self._read_window(rows):
                documents = [document for document in window if document]
                found |= bool(documents)
                yield replace(position, used=0, crc32=0), documents
                position = replace(position, window=position.window + 1, dataset=self._dataset.state_dict())

            # Without this a dataset without text would be read again and again for ever.
            if not found:
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

    def _pack(self, position: Position, documents: list[str | Conversation]) -> Iterator[NDArray[np.int64]]:
        """Yield the tokens of a window, its documents shuffled; whole sequences if documents stay whole."""
        config = self._config
        count = len(documents)
        packer = Packer(config, self._tokenizer, self.bad)
        key = (config.seed, position.epoch, position.window)
        for number in range(count):
            document = documents[shuffled(number, count, key)]
            yield from packer.lay(document)

        # Texts go on in the next window. Conversations may wait to be packed, and belong to this one.
        if config.chat is not None:
            yield from packer.end()
