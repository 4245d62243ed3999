"""Conversations with images as training sequences, in an order that depends on the step alone.

All conversations are read once before the first step. The chat template and the processor take each of them, so bad
ones are found then, and their text is stored as rows (`image_rows`). The pixels are made again for each step, by a
thread that is two steps ahead. Order and hold-out are those of texts (`holdout`, `shuffle`), so a resumed run needs its
step alone.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from megatier.config.data_section import DataConfig
from megatier.data.conversation import Conversation
from megatier.data.holdout import split_documents
from megatier.data.image_file import ImageBytes, decode_all, digest_of
from megatier.data.image_packs import Pack, Positions, check_room, join_rows, pack_images, without_first
from megatier.data.image_rows import ByteWriter, ImageRow, RowRange, RowWriter, ranges_of, raw_images
from megatier.data.processor import Processor, checksum_of, make_labels
from megatier.data.records import BadRecords
from megatier.data.shuffle import permute
from megatier.data.token_files import describe_settings
from megatier.data.token_note import Content, read_or_make
from megatier.errors import DataError
from megatier.files import create_file
from megatier.workers import Task, Workers

ROW_FILES = "train.rows", "holdout.rows", "images.bytes"
"""Names of the files: rows to train on, rows held out, and images that came as bytes."""
ROW_FORMAT = 2
"""The format of rows. Files in another format are made again."""
STEPS_AHEAD = 2
"""Steps whose pixels are made in advance."""

Group = dict[str, torch.Tensor]
"""The arguments of the model for the rows of a group, by name."""


class ImageChats:
    """Conversations with images: training sequences and held-out ones. Use it as a context, which ends its thread.

    Attributes:
        train: the rows to train on.
        held_out: the rows to evaluate on.
        sequence_length: the tokens of a row, with its padding.
        damaged: the damaged file because of which the conversations were read again; None: there was none.
        bad: the records that were left out.
    """

    def __init__(
        self,
        config: DataConfig,
        processor: Processor,
        directory: Path,
        progress: Callable[[int], None] = lambda _: None,
        positions: Positions | None = None,
    ) -> None:
        """Read the conversations into rows in a directory, or use the rows that are there.

        Args:
            config: the data, with `images`.
            processor: makes pixels and tokens.
            directory: the directory for the files.
            progress: called with the number of tokens since the last call.
            positions: returns the positions of a conversation's tokens, if several share a sequence.

        Raises:
            DataError: a record or an image is bad and may not be left out, there is nothing to train on, or the drive
                has no room for the files.
        """
        self._processor = processor
        self._directory = directory
        self._positions = positions
        self.sequence_length = config.sequence_length
        self.seed = config.seed
        self.bad = BadRecords(skips=config.skip_bad)
        contents, self.damaged = _contents(config, processor, directory, self.bad, progress)
        self.train, self.held_out = (
            RowRange(directory / name, content) for name, content in zip(ROW_FILES[:2], contents[:2], strict=True)
        )
        if not len(self.train):
            raise DataError(
                "there is no conversation to train on. Give data.files more of them, or lower data.holdout_fraction."
            )
        self._ahead: deque[tuple[tuple[int, int, int], Task[list[Group]]]] = deque()

        # One thread makes batches in the order of the steps, and it alone calls the processor from here on. A fast
        # tokenizer keeps the length to pad to, so of two threads that called it at once, one could get the other's.
        self._worker = Workers(1, "megatier-images")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.close()

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint saves to tell these conversations from others: numbers of tokens and checksums."""
        held_out = {"num_tokens": len(self.held_out) * self.sequence_length, "crc32": self.held_out.crc32}
        return {"num_tokens": self.num_tokens, "crc32": self.train.crc32, "held_out": held_out}

    @property
    def num_tokens(self) -> int:
        """Tokens to train on, with padding, without held-out conversations."""
        return self.num_sequences * self.sequence_length

    @property
    def num_sequences(self) -> int:
        """Conversations to train on: one epoch."""
        return len(self.train)

    def groups(self, step: int, batch: int, count: int) -> list[Group]:
        """Return the groups of a step's training batch. Steps are counted from 0.

        Args:
            step: the step.
            batch: number of conversations.
            count: number of groups, or fewer if there are fewer conversations.

        Returns:
            For each group the output of the processor: `input_ids`, `attention_mask` and, for most models, the types of
            tokens, all int64 [rows, length]; the pixels of its images and their sizes, if it has images; and `labels`,
            which are ids, or -100 for a token that is not learnt.

        Raises:
            DataError: an image is missing, has changed, or cannot be decoded.
        """
        # After a jump, such as that of a resume, batches that were made for other steps are dropped.
        wanted = [(step + ahead, batch, count) for ahead in range(STEPS_AHEAD + 1)]
        while self._ahead and self._ahead[0][0] != wanted[0]:
            self._ahead.popleft()

        # The batches that are left are the first of the wanted ones.
        missing = wanted[len(self._ahead) :]
        for key in missing:
            task = self._worker.submit(partial(self._make, *key))
            self._ahead.append((key, task))

        # The batch is removed only after the wait, so that an interrupt during the wait loses nothing.
        groups = self._ahead[0][1].result()
        self._ahead.popleft()
        return groups

    def holdout(self, batch: int, count: int) -> Iterator[list[Group]]:
        """Yield the held-out batches in order, each as `count` groups. The last one may be smaller."""
        num_rows = len(self.held_out)
        for start in range(0, num_rows, batch):
            stop = min(start + batch, num_rows)
            task = self._worker.submit(partial(self._make_held_out, range(start, stop), count))
            yield task.result()

    def rehearsal(self, step: int, batch: int, count: int) -> list[Group]:
        """Return as many groups as a step has, each with an image; none if its own have images, or no conversation has.

        Args:
            step: the step that a run begins with, counted from 0.
            batch: number of conversations.
            count: number of groups.
        """
        task = self._worker.submit(partial(self._make_rehearsal, step, batch, count))
        return task.result()

    def _make(self, step: int, batch: int, count: int) -> list[Group]:
        """Return the groups of a step; this runs on the thread `megatier-images`, as the next two do."""
        return self._groups(self._rows(step, batch), count)

    def _make_held_out(self, numbers: Sequence[int], count: int) -> list[Group]:
        """Return the groups of held-out rows."""
        return self._groups(self.held_out.read(numbers), count)

    def _make_rehearsal(self, step: int, batch: int, count: int) -> list[Group]:
        """Return the groups that a step is rehearsed with, if it needs that."""
        packs = self._rows(step, batch)
        groups = self._cut(packs, count)
        if all(any(map(_has_images, group)) for group in groups):
            return []

        num_groups = len(groups)
        with_images = list(itertools.islice(self._packs_with_images(), num_groups))

        # If too few conversations have images, some are repeated.
        repeated = itertools.islice(itertools.cycle(with_images), num_groups)
        return [self._columns([pack]) for pack in repeated]

    def _packs_with_images(self) -> Iterator[Pack]:
        """Yield the sequences to train on that have images."""
        for number in range(len(self.train)):
            # Read one by one, because the caller stops after a few.
            (pack,) = self.train.read([number])
            if _has_images(pack):
                yield pack

    def _rows(self, step: int, batch: int) -> list[Pack]:
        """Return the conversations of a step, by sequence."""
        numbers = []
        for position in range(step * batch, (step + 1) * batch):
            # Each epoch has a permutation of its own, and a batch may reach into the next one.
            epoch, place = divmod(position, self.num_sequences)
            numbers.append(permute(place, self.num_sequences, (self.seed, epoch)))
        return self.train.read(numbers)

    def _groups(self, rows: Sequence[Pack], count: int) -> list[Group]:
        """Return the arguments of the model for rows, as `count` groups."""
        return [self._columns(some) for some in self._cut(rows, count)]

    def _cut(self, rows: Sequence[Pack], count: int) -> list[Sequence[Pack]]:
        """Return rows in groups, as `columns.split_groups` cuts them."""
        size = -(-len(rows) // count)
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def _columns(self, packs: Sequence[Pack]) -> Group:
        """Return the arguments of the model for the sequences of a group."""
        if self._positions is None:
            return self._pad_rows([row for pack in packs for row in pack], self.sequence_length)

        # Each conversation is processed alone, so that its pixels and positions do not depend on the others.
        apart = []
        for pack in packs:
            alone = [self._pad_rows([row], row.num_tokens) for row in pack]
            for columns in alone:
                columns["labels"] = without_first(columns["labels"])
            apart.append(alone)

        pad_token = self._processor.tokenizer.pad_token_id
        assert isinstance(pad_token, int), "a processor without one is refused"
        return join_rows(apart, self.sequence_length, pad_token, self._positions)

    def _pad_rows(self, rows: Sequence[ImageRow], length: int) -> Group:
        """Return the arguments of the model for conversations, each in a row of `length` tokens."""
        images = []
        for row in rows:
            # Images are decoded again in each step, because pixels are many times as large as their files.
            raws = [image.read(self._directory, row.place) for image in row.images]
            images.append(decode_all(raws, row.place))
        place = " and ".join(row.place for row in rows)
        columns = self._processor.columns([row.text for row in rows], images, length, place)

        ids = columns["input_ids"]
        for row, row_ids in zip(rows, ids, strict=True):
            # A longer row would move the conversations after it in its sequence.
            if len(row_ids) != length or checksum_of(row_ids[: row.num_tokens].numpy()) != row.crc32:
                raise DataError(
                    f"{row.place}: the processor makes other tokens of it now than when the run began. Bring the old "
                    "processor back, or begin a new run."
                )
        return {**columns, "labels": make_labels(ids, [row.learnt for row in rows])}


def _contents(
    config: DataConfig,
    processor: Processor,
    directory: Path,
    bad: BadRecords,
    progress: Callable[[int], None],
) -> tuple[list[Content], str | None]:
    """Return the contents of the files, after making them if needed, and the damaged file if there was one."""
    # A processor with other settings makes other tokens of an image, so its rows are made again.
    settings = json.dumps(
        [describe_settings(config, processor.tokenizer), processor.made_by, repr(processor.own), ROW_FORMAT]
    )
    return read_or_make(directory, settings, ROW_FILES, partial(_write, config, processor, directory, bad, progress))


def _write(
    config: DataConfig,
    processor: Processor,
    directory: Path,
    bad: BadRecords,
    progress: Callable[[int], None],
) -> list[Content]:
    """Write all conversations to files, which get their names once all of them are on the drive."""
    directory.mkdir(parents=True, exist_ok=True)
    partial_paths = [directory / f"{name}.partial" for name in ROW_FILES]
    with (
        create_file(partial_paths[0]) as train,
        create_file(partial_paths[1]) as held_out,
        create_file(partial_paths[2]) as images,
    ):
        # A sequence belongs to one of the two files, so each packs its own conversations.
        writers = RowWriter(train), RowWriter(held_out)
        waiting: tuple[list[ImageRow], list[ImageRow]] = [], []
        kept = ByteWriter(images, ROW_FILES[2])
        for is_for_evaluation, document in split_documents(config, bad):
            if not isinstance(document, Conversation):
                raise DataError(
                    "data.files names texts, and data.images reads conversations alone. Leave the texts out, or set "
                    "data.images to false."
                )
            try:
                row = _row_of(document, config, processor, kept)
            except DataError as error:
                bad.leave_out(error)
                continue
            progress(row.num_tokens)
            waiting[is_for_evaluation].append(row)
            if config.max_patches is None or len(waiting[is_for_evaluation]) == config.window_rows:
                _lay(waiting[is_for_evaluation], config, writers[is_for_evaluation])
        for rows, writer in zip(waiting, writers, strict=True):
            _lay(rows, config, writer)

        for file in (train, held_out, images):
            file.flush()
            os.fsync(file.fileno())

    # No file has its name before all of them are on the drive.
    for path, name in zip(partial_paths, ROW_FILES, strict=True):
        path.rename(directory / name)
    return [*(writer.content for writer in writers), kept.content]


def _lay(rows: list[ImageRow], config: DataConfig, writer: RowWriter) -> None:
    """Write the collected conversations, alone or packed, and clear the list."""
    packs: list[Pack] = [(row,) for row in rows]
    if config.max_patches is not None:
        packs = pack_images(rows, config.sequence_length, config.max_patches)
    for pack in packs:
        writer.write(pack)
    rows.clear()


def _has_images(pack: Pack) -> bool:
    """Return whether any conversation of a sequence has images."""
    return any(row.images for row in pack)


def _row_of(conversation: Conversation, config: DataConfig, processor: Processor, kept: ByteWriter) -> ImageRow:
    """Return a conversation as a row, and store those of its images that came as bytes.

    Raises:
        DataError: an image cannot be read, or the conversation is longer than a row.
    """
    place = conversation.place
    raws = list(raw_images(conversation))
    text, ids, learnt, num_patches = processor.tokenise(conversation, decode_all([raw for _, raw in raws], place))
    check_room(len(ids), num_patches, len(raws), config, place)

    # Images are stored once nothing can refuse the conversation any more.
    images = []
    for path, raw in raws:
        images.append(kept.keep(raw) if path is None else ImageBytes(str(path), 0, len(raw), digest_of(raw)))
    return ImageRow(
        place=place,
        text=text,
        images=tuple(images),
        num_tokens=len(ids),
        learnt=ranges_of(learnt),
        crc32=checksum_of(ids),
        num_patches=num_patches,
    )
