"""Documents out of files, folders, globs and datasets, one at a time, in an order that does not depend on the machine.

A text file is one document; files of records hold one in each record. Bytes that are no UTF-8 become U+FFFD.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatier.config.data_section import DATASET_INFO, PYTHON_STDLIB, DataConfig
from megatier.data import hub
from megatier.data.conversation import SHAREGPT, Alpaca, Conversation, Shape, Text, Turns
from megatier.data.dataset_info import describe
from megatier.data.records import RECORD_FORMATS, read_records, saved_files
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

    def read(self) -> Iterator[str | Conversation]:
        """Yield its documents.

        Raises:
            DataError: it cannot be read, or is damaged. The message names the place.
        """
        try:
            if self.file_format == "text":
                yield self.path.read_bytes().decode("utf-8", errors="replace")
                return
            for place, record in read_records(self.path, self.file_format):
                yield self.shape.read(record if isinstance(record, dict) else {}, place)
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror or error}.") from error


def documents(config: DataConfig, split: str | None = None) -> Iterator[str | Conversation]:
    """Yield the documents in order, up to `data.max_bytes` of UTF-8. Empty documents are left out.

    The last text is cut off there; a conversation that does not fit whole is left out.

    Args:
        config: files, or a dataset.
        split: the split of the dataset, if it is not `data.split`.

    Raises:
        DataError: a path is missing or unreadable, a record is malformed, or there is no document at all.
    """
    left = config.max_bytes
    found = False
    for document in _read(config, split or config.split):
        if left is not None:
            document, left = _cut(document, left)
        if document:
            found = True
            yield document
        if left == 0:
            return

    if not found:
        what = "data.files, data.suffixes"
        names = ", ".join(config.files)
        if config.dataset is not None:
            what = "data.dataset, data.split"
            names = config.dataset
        raise DataError(f"no text in {names}. Check {what} and data.text_field.")


def _read(config: DataConfig, split: str) -> Iterator[str | Conversation]:
    """Yield all documents, empty ones too."""
    if config.dataset is not None:
        yield from read_rows(config, split, hub.load(config, split))
        return
    for source in find_sources(config):
        yield from source.read()


def read_rows(config: DataConfig, split: str, dataset: Any) -> Iterator[str | Conversation]:  # noqa: ANN401
    """Yield a document for each row of a dataset of `hub`, empty ones too.

    Raises:
        DataError: a row is malformed, or the dataset cannot be read any further.
    """
    shape = _shape(config)
    for place, row in hub.rows(config, split, dataset):
        yield shape.read(row, place)


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
