"""Reads documents out of files and datasets, one at a time, in an order that depends on no machine.

A text file is one document; files of records hold one in each record.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatier.config.data_section import Chat, DataConfig
from megatier.data import hub
from megatier.data.conversation import CHAT_KEYS, Conversation, in_folder
from megatier.data.records import BadRecords
from megatier.data.sources import Source, find_shape, find_sources, with_shape
from megatier.errors import DataError

LOOKED_AT = 100
"""Conversations in which `has_images` looks for images."""


def read_documents(
    config: DataConfig, split: str | None = None, bad: BadRecords | None = None
) -> Iterator[str | Conversation]:
    """Yield the documents as `read_numbered_documents` does, without their numbers."""
    return (document for _, document in read_numbered_documents(config, split, bad))


def read_numbered_documents(
    config: DataConfig, split: str | None = None, bad: BadRecords | None = None
) -> Iterator[tuple[int, str | Conversation]]:
    """Yield the documents in order, up to `data.max_samples` and `data.max_bytes` of UTF-8. Empty ones are left out.

    Each has a number. Those of a file that is named several times have the same ones again, so that what is held out
    of it once is held out each time.

    The last text is cut off there; a conversation that does not fit whole is left out.

    Args:
        config: files, or a dataset.
        split: the split of the dataset, if it is not `data.split`.
        bad: takes the records that cannot be read.

    Raises:
        DataError: a path is missing or unreadable, a record is malformed, or there is no document at all.
    """
    left = config.max_bytes
    num_left = config.max_samples
    has_any = False
    first = dict[Source | None, int]()
    number = count = 0
    for source, each in _read(config, split or config.split, bad or BadRecords(skips=config.skip_bad)):
        number = first.setdefault(source, count)
        for document in each:
            if left is not None:
                document, left = _cut(document, left)
            if document:
                has_any = True
                yield number, document
                number += 1
                count = max(count, number)
                if num_left is not None:
                    num_left -= 1
            # Nothing more fits, so the other files are not even opened.
            if left == 0 or num_left == 0:
                return

    if not has_any:
        sought = "text"
        key = "data.text_field"
        if config.chat is not None:
            sought = "conversation"
            key = "data.chat"
        where = f"{', '.join(config.files)}. Check data.files, data.suffixes"
        if config.dataset is not None:
            where = f"{config.dataset}. Check data.dataset, data.split"
        raise DataError(f"no {sought} in {where} and {key}: there is no record, or all of them are empty.")


def _read(
    config: DataConfig, split: str, bad: BadRecords
) -> Iterator[tuple[Source | None, Iterator[str | Conversation]]]:
    """Yield the documents of each file, or those of the dataset, empty ones too."""
    if config.dataset is not None:
        dataset = hub.load(config, split)
        rows = hub.rows(config, split, dataset)
        folder = Path(config.dataset).expanduser()
        yield None, (in_folder(document, folder) for document in with_shape(rows, find_shape(config), bad))
        return
    for source in find_sources(config):
        yield source, source.read(bad)


def read_rows(
    config: DataConfig,
    split: str,
    dataset: Any,  # noqa: ANN401
    bad: BadRecords,
) -> Iterator[str | Conversation]:
    """Yield a document for each row of a dataset of `hub`, empty ones too. A row that is left out counts as empty.

    Raises:
        DataError: a row is malformed and not to be left out, or the dataset cannot be read any further.
    """
    shape = find_shape(config)
    for place, row in hub.rows(config, split, dataset):
        document: str | Conversation = ""
        try:
            # Rows that are held out, or were read before the run was resumed, have not been counted.
            document = shape.read(row, f"{place} from where reading began")
        except DataError as error:
            bad.leave_out(error)
        yield document


def _cut(document: str | Conversation, left: int) -> tuple[str | Conversation, int]:
    """Return as much of a document as fits, and the bytes that are left after it."""
    if not isinstance(document, Conversation):
        # A character that does not fit whole is dropped.
        encoded = document.encode("utf-8")[:left]
        return encoded.decode("utf-8", errors="ignore"), left - len(encoded)

    # Half a conversation could be one without an answer, so the first one that does not fit ends the text.
    if document.num_bytes > left:
        return "", 0
    return document, left - document.num_bytes


def has_images(config: DataConfig) -> bool:
    """Return whether one of the first conversations has images.

    Args:
        config: files of conversations, with `images`.
    """
    first = itertools.islice(read_documents(config, bad=BadRecords(skips=True)), LOOKED_AT)

    # What cannot be read is for the run to say.
    with contextlib.suppress(DataError):
        return any(isinstance(document, Conversation) and document.images for document in first)
    return False


def guess_shape(config: DataConfig) -> tuple[Chat | None, str]:
    """Return the `data.chat` and the `data.text_field` that fit the first record of the files.

    Raises:
        DataError: an entry matches nothing, or the first record cannot be read.
    """
    # All files are read in one shape, so the first one stands for them.
    source = find_sources(config)[0]
    first_record = source.first()
    if first_record is None:
        return None, config.text_field
    place, record = first_record
    if isinstance(record, DataError):
        raise record
    if not isinstance(record, dict):
        raise DataError(f"{place}: a record is an object with keys, and this is none.")

    chat = next((chat for chat, key in CHAT_KEYS.items() if key in record), None)
    lengths = {key: len(value) for key, value in record.items() if isinstance(value, str)}
    if chat or config.text_field in lengths:
        return chat, config.text_field

    # Beside a text lie its id, its source, its language, all of which are shorter.
    return chat, max(lengths, key=lengths.__getitem__, default=config.text_field)
