"""A text that is streamed: the rows of a dataset are tokenised and packed while the run goes on.

A position in the stream is small. It has the state of the dataset before a window of rows, and the number of the
window's tokens that are used (`stream_reader`). The shuffle buffer of `datasets` is not used, because it loses its rows
on a resume.

One thread prepares the sequences of the next steps. At the end of the stream it begins the next epoch.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
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
from megatier.data.columns import make_columns
from megatier.data.records import BadRecords
from megatier.data.shards import find_shard_changes, list_shards
from megatier.data.stream_position import Position
from megatier.data.stream_reader import StreamReader
from megatier.data.token_files import describe_settings, tokenise
from megatier.data.unknown_tokens import NONE_UNKNOWN, UnknownTokens
from megatier.errors import CheckpointError, DataError
from megatier.workers import Task, Workers

CHANGES_SHOWN = 5
"""Most changed files that an error names."""
STEPS_AHEAD = 2
"""Steps whose sequences are prepared in advance."""


class TextStream:
    """The training sequences of a stream in order, and held-out ones. Use it as a context, which ends its thread.

    Attributes:
        damaged: the damaged file because of which the held-out text was tokenised again; None: there was none.
        bad: the records that were left out since the stream was opened. Each counts once an epoch.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        directory: Path,
        state: Mapping[str, Any] | None = None,
        *,
        accepts_changes: bool = False,
        unknown: UnknownTokens = NONE_UNKNOWN,
    ) -> None:
        """Tokenise the held-out text, and open the stream.

        Args:
            config: the data, with `streaming`.
            tokenizer: the run's tokenizer.
            directory: the directory for the held-out tokens.
            state: the saved `state` of a run that is resumed; None: the stream begins.
            accepts_changes: accept a state of other settings, of another dataset or with other tokens.
            unknown: the tokens for which the model has no embeddings; a text that spells one is refused.

        Raises:
            DataError: the dataset cannot be read, or differs from that of the state.
            CheckpointError: the state is damaged.
        """
        self._config = config
        self.bad = BadRecords(skips=config.skip_bad)

        # A digest is enough. Every checkpoint has it, and a chat template may be long.
        settings = describe_settings(config, tokenizer).encode()
        self._settings = hashlib.blake2b(settings, digest_size=16).hexdigest()
        self._position, commit = self._start(state, accepts_changes=accepts_changes)
        self._checks = not accepts_changes

        # The first commit is kept, so that rows do not change when somebody pushes to the dataset.
        pinned = replace(config, revision=commit or config.revision)
        dataset, self._commit = hub.stream(pinned, config.split)
        files = hub.local_files(config, config.split)
        self._shards = list_shards(config.dataset or "", files)
        self._check_shards(state)
        pinned = replace(pinned, revision=self._commit)
        _, self._held_out, self.damaged = tokenise(pinned, tokenizer, directory, self.bad, unknown=unknown)
        self._check_held_out(state)

        # `skip` keeps the dataset from reordering its shards, even for 0 rows, so it is called only if needed.
        if config.holdout_split is None and config.holdout_rows:
            dataset = dataset.skip(config.holdout_rows)

        reader = StreamReader(config, tokenizer, dataset, self.bad, unknown, checks=self._checks)
        self._sequences = reader.sequences(self._position)
        self._ahead: deque[Task[list[tuple[NDArray[np.int64], Position]]]] = deque()
        self._worker = Workers(1, "megatier-stream")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The thread comes first, because a generator cannot be closed while it runs there.
        self._worker.close()
        self._sequences.close()

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint saves: the identity of the stream, and the position after the last batch."""
        return {
            "settings": self._settings,
            "commit": self._commit,
            "position": asdict(self._position),
            "held_out": self._held_out.crc32,
            "shards": self._shards,
        }

    def batch(self, step: int, batch: int) -> dict[str, torch.Tensor]:
        """Return the next sequences, as `make_columns` gives them.

        Args:
            step: not used, because a stream has one order; files take it.
            batch: number of sequences.

        Raises:
            DataError: the stream is malformed, broke off, or has no text.
        """
        # The first batch is the one that this call waits for, and the others are ahead of it.
        while len(self._ahead) <= STEPS_AHEAD:
            task = self._worker.submit(partial(self._take, batch))
            self._ahead.append(task)

        # Taken out of the queue only after the wait, so that an interrupt in the wait loses no sequence.
        taken = self._ahead[0].result()
        self._ahead.popleft()

        # A checkpoint notes where the steps are, and not the worker, which is ahead of them.
        _, self._position = taken[-1]
        rows = [row for row, _ in taken]
        return make_columns(np.stack(rows), is_apart=self._config.is_apart)

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
        if not isinstance(noted, Mapping) or not all(isinstance(shard, list) for shard in noted.values()):
            raise CheckpointError(f"the checkpoint is damaged: the stream's files are {str(noted)[:100]}.")
        if not noted or not self._checks:
            return

        changes = find_shard_changes(noted, self._shards)
        if not changes:
            return
        named = "; ".join(changes[:CHANGES_SHOWN])
        num_more = len(changes) - CHANGES_SHOWN
        if num_more > 0:
            named += f"; and {num_more} more"
        raise DataError(
            f"the files of {self._config.dataset} are not those that the run began with: {named}. Bring the old ones "
            "back, or add --accept-changes to go on with these."
        )

    def _check_held_out(self, state: Mapping[str, Any] | None) -> None:
        """Refuse held-out text that is not that of the state."""
        if state is None or not self._checks:
            return
        # An older version noted none.
        checksum = self._held_out.crc32
        if state.get("held_out", checksum) != checksum:
            raise DataError(
                f"the rows of {self._config.dataset} that are held out are not those of the checkpoint. Bring the old "
                "ones back, or add --accept-changes to evaluate on these."
            )

    def _take(self, batch: int) -> list[tuple[NDArray[np.int64], Position]]:
        """Return the next sequences; this runs in the stream's thread."""
        return list(itertools.islice(self._sequences, batch))
