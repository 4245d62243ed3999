"""Documents out of files, folders, globs and datasets, one at a time, in an order that does not depend on the machine.

A text file is one document; files of records hold one in each record. Bytes that are no UTF-8 become U+FFFD.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatier.config.data_section import DATASET_INFO, PYTHON_STDLIB, DataConfig
from megatier.data import hub
from megatier.data.conversation import CHAT_KEYS, SHAREGPT, Alpaca, Conversation, Shape, Text, Turns
from megatier.data.dataset_info import describe
from megatier.data.records import RECORD_FORMATS, BadRecords, read_records, saved_files
from megatier.errors import DataError

CHAT_SHAPES: dict[str, Shape] = {"messages": Turns(), "sharegpt": SHAREGPT, "alpaca": Alpaca()}

STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Folders of the standard library's tree that are not its own source."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file, and the shape of its records."""

    path: Path
    """The file."""
    file_format: str
    """`text`, or one of `RECORD_FORMATS`."""
    shape: Shape
    """The keys under which a record holds its document. A text file has no records."""

    def read(self, bad: BadRecords) -> Iterator[str | Conversation]:
        """Yield its documents, and an empty text for each bad record that is left out.

        Raises:
            DataError: it cannot be read, or is damaged. The message names the place.
        """
        try:
            if self.file_format == "text":
                yield self.path.read_bytes().decode("utf-8", errors="replace")
                return
            yield from _shaped(read_records(self.path, self.file_format), self.shape, bad)
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror or error}.") from error


def documents(
    config: DataConfig, split: str | None = None, bad: BadRecords | None = None
) -> Iterator[str | Conversation]:
    """Yield the documents in order, up to `data.max_bytes` of UTF-8. Empty documents are left out.

    The last text is cut off there; a conversation that does not fit whole is left out.

    Args:
        config: files, or a dataset.
        split: the split of the dataset, if it is not `data.split`.
        bad: takes the records that cannot be read.

    Raises:
        DataError: a path is missing or unreadable, a record is malformed, or there is no document at all.
    """
    left = config.max_bytes
    found = False
    for document in _read(config, split or config.split, bad or BadRecords(skips=config.skip_bad)):
        if left is not None:
            document, left = _cut(document, left)
        if document:
            found = True
            yield document
        if left == 0:
            return

    if not found:
        sought = "text" if config.chat is None else "conversation"
        key = "data.text_field" if config.chat is None else "data.chat"
        where = f"{', '.join(config.files)}. Check data.files, data.suffixes"
        if config.dataset is not None:
            where = f"{config.dataset}. Check data.dataset, data.split"
        raise DataError(f"no {sought} in {where} and {key}: there is no record, or all of them are empty.")


def _read(config: DataConfig, split: str, bad: BadRecords) -> Iterator[str | Conversation]:
    """Yield all documents, empty ones too."""
    if config.dataset is not None:
        yield from _shaped(hub.rows(config, split, hub.load(config, split)), _shape(config), bad)
        return
    for source in find_sources(config):
        yield from source.read(bad)


def _shaped(records: Iterable[tuple[str, Any]], shape: Shape, bad: BadRecords) -> Iterator[str | Conversation]:
    """Yield a document for each record. One that is left out counts as an empty text.

    Raises:
        DataError: records are bad, and they are not to be left out.
    """
    for place, record in records:
        document: str | Conversation = ""
        try:
            if isinstance(record, DataError):
                raise record
            document = shape.read(record if isinstance(record, dict) else {}, place)
        except DataError as error:
            bad.add(error)

        if bad.refuses:
            bad.pass_over()
        else:
            yield document
    bad.end()


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
    shape = _shape(config)
    for place, row in hub.rows(config, split, dataset):
        document: str | Conversation = ""
        try:
            # Rows that are held out, or were read before the run was resumed, have not been counted.
            document = shape.read(row, f"{place} from where reading began")
        except DataError as error:
            bad.leave_out(error)
        yield document


def _shape(config: DataConfig) -> Shape:
    """Return the shape of records, as the config says."""
    return CHAT_SHAPES[config.chat] if config.chat is not None else Text(config.text_field)


def _cut(document: str | Conversation, left: int) -> tuple[str | Conversation, int]:
    """Return as much of a document as fits, and the bytes that are left after it."""
    if isinstance(document, Conversation):
        return (document, left - document.num_bytes) if document.num_bytes <= left else ("", 0)

    # A character that does not fit whole is dropped.
    encoded = document.encode("utf-8")
    return encoded[:left].decode("utf-8", errors="ignore"), left - min(len(encoded), left)


def find_sources(config: DataConfig) -> list[Source]:
    """Return the files of the dataset: entries in the order given, the files of each sorted by path, none twice.

    Raises:
        DataError: an entry matches nothing.
    """
    return list(dict.fromkeys(source for entry in config.files for source in _sources(entry, config)))


def _sources(entry: str, config: DataConfig) -> Iterator[Source]:
    """Yield the files that an entry of `data.files` stands for. One of a `dataset_info.json` has its own shape."""
    shape = _shape(config)
    file, mark, name = entry.rpartition("#")
    if is_described := bool(mark) and Path(file).name == DATASET_INFO:
        path, shape = describe(Path(file).expanduser(), name)
        entry = str(path)

    holds_records = is_described or config.chat is not None
    suffixes = tuple(s for s in config.suffixes if s in RECORD_FORMATS) if holds_records else config.suffixes
    for path in _expand(entry, suffixes):
        file_format: str = config.format
        if file_format == "auto":
            # A .json file among texts is one of them. It holds records only if conversations are asked for, or a
            # description of the dataset says so.
            found = RECORD_FORMATS.get(path.suffix.lower(), "text")
            file_format = found if holds_records or found != "json" else "text"

        if file_format == "text" and not isinstance(shape, Text):
            raise DataError(
                f"{path} holds no conversations, but data.chat is set. Give files of {' '.join(RECORD_FORMATS)}, or "
                "set data.format."
            )
        yield Source(path, file_format, shape)


def guess_shape(config: DataConfig) -> tuple[str | None, str]:
    """Return the `data.chat` and the `data.text_field` that fit the first record of the files.

    Raises:
        DataError: an entry matches nothing, or the first record cannot be read.
    """
    path = find_sources(config)[0].path
    file_format = RECORD_FORMATS.get(path.suffix.lower())
    if file_format is None:
        return None, config.text_field

    place, record = next(read_records(path, file_format), (str(path), {}))
    if isinstance(record, DataError):
        raise record
    if not isinstance(record, dict):
        raise DataError(f"{place}: a record is an object with keys, and this is none.")

    chat = next((chat for chat, key in CHAT_KEYS.items() if key in record), None)
    texts = {key: value for key, value in record.items() if isinstance(value, str)}
    longest = max(texts, key=lambda key: len(texts[key]), default=config.text_field)
    return chat, config.text_field if config.text_field in texts or chat else longest


def _expand(entry: str, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files that a path, folder or glob stands for."""
    path = Path(entry).expanduser()
    try:
        if entry == PYTHON_STDLIB:
            found = list(_stdlib_files())
        elif path.is_dir():
            if (saved := saved_files(path)) is not None:
                return saved
            found = [file for file in path.rglob("*") if file.suffix.lower() in suffixes and file.is_file()]
        elif path.exists():
            found = [path]
        else:
            # pathlib takes no absolute pattern, so it is taken relative to its root.
            found = [file for file in Path(path.anchor).glob(str(path.relative_to(path.anchor))) if file.is_file()]
    except OSError as error:
        raise DataError(f"data.files: cannot read {entry}: {error.strerror}.") from error

    if not found:
        what = f"holds no file in {' '.join(suffixes)}" if path.is_dir() else "matches no file or folder"
        raise DataError(f"data.files: {entry} {what}.")

    # By path, because the order of a directory depends on the file system.
    return sorted(found, key=lambda file: file.as_posix())


def _stdlib_files() -> Iterator[Path]:
    """Yield the standard library's own source files; skipped folders, some of them huge, are not walked."""
    for folder, subfolders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        subfolders[:] = [name for name in subfolders if name not in STDLIB_SKIPPED]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))
