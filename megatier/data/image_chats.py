"""Conversations with images as training sequences, one conversation each, in an order that follows from the step alone.

All of them are read once before the first step: template and processor take each, so that what they refuse is known
then, and their text is stored as rows (`image_rows`). The pixels of a step are made again, by a thread that is two
steps ahead. Order and hold-out are those of texts (`holdout`, `shuffle`), so a resumed run needs no position but its
step.
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
from megatier.data.token_note import TOKENS_NOTE_FILE, Content, read_contents, write_note
from megatier.errors import REMEDIES, DataError
from megatier.files import create_file
from megatier.workers import Task, Workers

ROW_FILES = "train.rows", "holdout.rows", "images.bytes"
"""Names of the files: rows to train on, rows held out, and images that came as bytes."""
ROW_FORMAT = 2
"""Files of rows in another format are made again. In the first one a line was no list."""
STEPS_AHEAD = 2
"""Steps whose pixels are made before they are asked for."""

Group = dict[str, torch.Tensor]
"""What the model takes of a group's rows."""


class ImageChats:
    """Conversations with images: training sequences and held-out ones. Use it as a context: its thread ends with it.

    Attributes:
        train: the rows to train on.
        held_out: the rows to evaluate on.
        sequence_length: the tokens of a row, with its padding.
        damaged: the file that made it necessary to read the conversations again, if one did.
        bad: the records that were left out as they were read.
    """

    def __init__(
        self,
        config: DataConfig,
        processor: Processor,
        directory: Path,
        progress: Callable[[int], None] = lambda _: None,
        positions: Positions | None = None,
    ) -> None:
        """Read the conversations into rows in a directory, or take those that are there.

        Args:
            config: the data, with `images`.
            processor: makes pixels and tokens.
            directory: where the files lie.
            progress: is called with the number of tokens that came since the last call.
            positions: gives the positions of a conversation's tokens, if several share a sequence.

        Raises:
            DataError: a record or an image is bad and not to be left out, there is nothing to train on, or no room for
                the files.
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

        # One thread, so that batches are made in the order of the steps.
        self._worker = Workers(1, "megatier-images")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.close()

    @property
    def state(self) -> dict[str, Any]:
        """The note of a checkpoint that tells these conversations from others."""
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
        """Return the training batch of a step, counted from 0, in so many groups.

        Args:
            step: the step.
            batch: number of conversations.
            count: number of groups, or fewer if there are fewer conversations.

        Returns:
            Of each group what the processor makes of it: `input_ids`, `attention_mask` and, for most models, the kinds
            of tokens, all int64 [rows, length]; the pixels of all its images, and what describes them, if it has any;
            and `labels`, which are ids, or -100 for a token that is not learnt.

        Raises:
            DataError: an image is gone or another one now, or cannot be decoded.
        """
        # What was made ahead for other steps is of no use after a jump, which a run makes when it begins.
        wanted = [(step + ahead, batch, count) for ahead in range(STEPS_AHEAD + 1)]
        while self._ahead and self._ahead[0][0] != wanted[0]:
            self._ahead.popleft()

        # Those that are left are the first of what is wanted.
        missing = wanted[len(self._ahead) :]
        for key in missing:
            task = self._worker.submit(partial(self._make, *key))
            self._ahead.append((key, task))

        # Taken out of the queue only after the wait, so that an interrupt in the wait loses nothing.
        made = self._ahead[0][1].result()
        self._ahead.popleft()
        return made

    def holdout(self, batch: int, count: int) -> Iterator[list[Group]]:
        """Yield held-out batches in order, each in so many groups; the last one perhaps smaller."""
        num_rows = len(self.held_out)
        for start in range(0, num_rows, batch):
            stop = min(start + batch, num_rows)
            rows = self.held_out.read(range(start, stop))
            yield self._groups(rows, count)

    def rehearsal(self, step: int, batch: int, count: int) -> list[Group]:
        """Return groups that have an image each, as many as a step has; none if it has them, or nothing has images.

        Args:
            step: the step that a run begins with, counted from 0.
            batch: number of conversations.
            count: number of groups.
        """
        packs = self._rows(step, batch)
        groups = self._cut(packs, count)
        if all(any(map(_has_images, group)) for group in groups):
            return []

        num_groups = len(groups)
        found = list(itertools.islice(self._packs_with_images(), num_groups))

        # If fewer conversations have images, some come again.
        repeated = itertools.islice(itertools.cycle(found), num_groups)
        return [self._columns([pack]) for pack in repeated]

    def _packs_with_images(self) -> Iterator[Pack]:
        """Yield the sequences to train on that have images."""
        for number in range(len(self.train)):
            # One by one, since the caller stops at the first few.
            (pack,) = self.train.read([number])
            if _has_images(pack):
                yield pack

    def _make(self, step: int, batch: int, count: int) -> list[Group]:
        """Return the groups of a step; this runs in the thread."""
        return self._groups(self._rows(step, batch), count)

    def _rows(self, step: int, batch: int) -> list[Pack]:
        """Return the conversations of a step, sequence by sequence."""
        numbers = []
        for position in range(step * batch, (step + 1) * batch):
            # Each epoch has a permutation of its own, and a batch may reach into the next one.
            epoch, place = divmod(position, self.num_sequences)
            numbers.append(permute(place, self.num_sequences, (self.seed, epoch)))
        return self.train.read(numbers)

    def _groups(self, rows: Sequence[Pack], count: int) -> list[Group]:
        """Return what the model takes of rows, in so many groups."""
        return [self._columns(some) for some in self._cut(rows, count)]

    def _cut(self, rows: Sequence[Pack], count: int) -> list[Sequence[Pack]]:
        """Return rows in so many groups, as `packer.groups_of` cuts them."""
        size = -(-len(rows) // count)
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def _columns(self, packs: Sequence[Pack]) -> Group:
        """Return what the model takes of the sequences of a group."""
        if self._positions is None:
            return self._padded([row for pack in packs for row in pack], self.sequence_length)

        # One by one, so that each has the pixels and positions that it has alone.
        apart = []
        for pack in packs:
            alone = [self._padded([row], row.num_tokens) for row in pack]
            for columns in alone:
                columns["labels"] = without_first(columns["labels"])
            apart.append(alone)

        pad_token = self._processor.tokenizer.pad_token_id
        assert isinstance(pad_token, int), "a processor without one is refused"
        return join_rows(apart, self.sequence_length, pad_token, self._positions)

    def _padded(self, rows: Sequence[ImageRow], length: int) -> Group:
        """Return what the model takes of conversations, each in a row of so many tokens."""
        images = []
        for row in rows:
            # Read and decoded anew at each step: the pixels of a dataset are many times the size of its files.
            raws = [image.read(self._directory, row.place) for image in row.images]
            images.append(decode_all(raws, row.place))
        place = " and ".join(row.place for row in rows)
        columns = self._processor.columns([row.text for row in rows], images, length, place)

        ids = columns["input_ids"]
        for row, own in zip(rows, ids, strict=True):
            if checksum_of(own[: row.num_tokens].numpy()) != row.crc32:
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
    """Return what the files hold, which are made unless they are there; and the file that was damaged, if one was."""
    # A processor with other settings makes other tokens of an image, so rows of another one are made again.
    settings = json.dumps(
        [describe_settings(config, processor.tokenizer), processor.made_by, repr(processor.own), ROW_FORMAT]
    )
    try:
        contents, damaged = read_contents(directory, settings, ROW_FILES)
        if contents is None:
            # While the files are being made no note may say that they are there.
            (directory / TOKENS_NOTE_FILE).unlink(missing_ok=True)
            contents = _write(config, processor, directory, bad, progress)
            write_note(directory, settings, ROW_FILES, contents)
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, "Check the drive, or name another output.directory.")
        raise DataError(f"cannot write rows to {directory}: {error.strerror or error}. {remedy}") from error
    return contents, damaged


def _write(
    config: DataConfig,
    processor: Processor,
    directory: Path,
    bad: BadRecords,
    progress: Callable[[int], None],
) -> list[Content]:
    """Read all conversations into files, which get their names when they are whole and on the drive."""
    directory.mkdir(parents=True, exist_ok=True)
    partial_paths = [directory / f"{name}.partial" for name in ROW_FILES]
    with (
        create_file(partial_paths[0]) as train,
        create_file(partial_paths[1]) as held_out,
        create_file(partial_paths[2]) as images,
    ):
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
    """Write the conversations that wait, alone or packed, and let go of them."""
    packs: list[Pack] = [(row,) for row in rows]
    if config.max_patches is not None:
        packs = pack_images(rows, config.sequence_length, config.max_patches)
    for pack in packs:
        writer.write(pack)
    rows.clear()


def _has_images(pack: Pack) -> bool:
    """Return whether a conversation of a sequence has images."""
    return any(row.images for row in pack)


def _row_of(conversation: Conversation, config: DataConfig, processor: Processor, kept: ByteWriter) -> ImageRow:
    """Return a conversation as a row, and keep those of its images that came as bytes.

    Raises:
        DataError: it cannot be read, or is longer than a row.
    """
    place = conversation.place
    raws = list(raw_images(conversation))
    text, ids, learnt, num_patches = processor.tokenise(conversation, decode_all([raw for _, raw in raws], place))
    check_room(len(ids), num_patches, len(raws), config, place)

    # Only now, when nothing refuses it any more.
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
