"""Finds the files that a config names: paths, folders, globs, entries of a `dataset_info.json`.

Whatever an entry stands for and is not read is told in a remark, or refused: nothing is dropped without a word.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatier.config.data_section import DATASET_INFO, PYTHON_STDLIB, DataConfig
from megatier.data.conversation import (
    CHAT_KEYS,
    SHAREGPT,
    Alpaca,
    Conversation,
    PromptCompletion,
    Shape,
    Text,
    Turns,
    in_folder,
)
from megatier.data.dataset_info import describe
from megatier.data.encoded import check_head, read_text
from megatier.data.formats import RECORD_FORMATS, TABLE_FORMATS, Format, find_format
from megatier.data.image_file import IMAGE_SUFFIXES
from megatier.data.image_parts import IMAGE_KEYS
from megatier.data.records import BadRecords, read_json, read_records, saved_files
from megatier.errors import DataError
from megatier.files import open_regular

CHAT_SHAPES: dict[str, Turns | Alpaca | PromptCompletion] = {
    "messages": Turns(),
    "sharegpt": SHAREGPT,
    "alpaca": Alpaca(),
    "prompt_completion": PromptCompletion(),
}
STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Folders of the standard library's tree that are not its own source."""
HEADS_MAX = 1000
"""The most files whose beginnings are looked at before a run begins."""

Say = Callable[[str], None]
"""Takes a remark, which is a sentence without its full stop."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file, and the shape of its records."""

    path: Path
    """The file."""
    format: Format
    """How it is read."""
    shape: Shape
    """The keys under which a record holds its document. A text file has no records."""
    may_be_text: bool = False
    """Whether a JSON file is one text unless it begins with a record of this shape."""

    def read(self, bad: BadRecords) -> Iterator[str | Conversation]:
        """Yield its documents, and an empty text for each bad record that is left out.

        Raises:
            DataError: it cannot be read, or is damaged. The message names the place.
        """
        # Around the loop as well, because a file is read while its records are taken.
        try:
            records = self._records()
            if isinstance(records, str):
                yield records
            else:
                for document in with_shape(records, self.shape, bad):
                    yield in_folder(document, self.path.parent)
        except OSError as error:
            raise self._unreadable(error) from error

    def first(self) -> tuple[str, Any] | None:
        """Return its first record, with the place; None if it is one text.

        Raises:
            DataError: as `read`.
        """
        try:
            records = self._records()
            return None if isinstance(records, str) else next(records, (str(self.path), {}))
        except OSError as error:
            raise self._unreadable(error) from error

    def check(self) -> None:
        """Look at its first bytes.

        Raises:
            DataError: it is no file that can be read so.
        """
        try:
            if self.format.name in TABLE_FORMATS:
                # Tables have their own library, which finds damage once it reads them.
                os.close(open_regular(self.path))
            else:
                check_head(self.path, self.format)
        except OSError as error:
            raise self._unreadable(error) from error

    def _records(self) -> str | Iterator[tuple[str, Any]]:
        """Return its records with their places, or its text if it has none."""
        if self.format.name != "text" and not self.may_be_text:
            return read_records(self.path, self.format)
        text = read_text(self.path, self.format)
        if self.may_be_text and _begins_with_record(text, self.shape):
            return read_json(self.path, text)
        return text

    def _unreadable(self, error: OSError) -> DataError:
        """Return the error about a file that the system does not give."""
        path = self.path
        # The system says the same of a missing file, which this is not.
        is_dangling = path.is_symlink() and not path.exists()
        if is_dangling:
            return DataError(f"{path} is a link to {path.readlink()}, which is not there.")
        return DataError(f"cannot read {path}: {error.strerror or error}.")


def with_shape(records: Iterable[tuple[str, Any]], shape: Shape, bad: BadRecords) -> Iterator[str | Conversation]:
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


def find_shape(config: DataConfig) -> Shape:
    """Return the shape of records, as the config says."""
    if config.chat is None:
        return Text(config.text_field)
    shape = CHAT_SHAPES[config.chat]
    return replace(shape, images=IMAGE_KEYS) if config.images else shape


def _keep_quiet(_: str) -> None:
    """Take a remark that nobody is to hear."""


def find_sources(config: DataConfig, say: Say = _keep_quiet) -> list[Source]:
    """Return the files of the dataset: entries in the order given, the files of each sorted by path.

    An entry that is named several times is read as often. A file that several entries share is read for the first one.

    Args:
        config: the data.
        say: takes a remark about what is not read, or read several times.

    Raises:
        DataError: an entry matches nothing, or a file cannot be read so.
    """
    sources = list[Source]()
    owners = dict[tuple[str, Shape], str]()
    shared = dict[Path, None]()
    for entry in config.files:
        # An entry that comes again would make all of its remarks again.
        tell = _keep_quiet if entry in owners.values() else say
        for source in _sources(entry, config, tell):
            # By the real path, as two entries may come to a file over different links.
            real = os.path.realpath(source.path)
            if owners.setdefault((real, source.shape), entry) == entry:
                sources.append(source)
            else:
                shared[source.path] = None

    for entry, count in Counter(config.files).items():
        if count > 1:
            say(f"data.files names {entry} {count} times, so it is read and counts {count} times")
    if shared:
        say(f"{len(shared)} files belong to several entries of data.files and are read once: {_some(shared)}")
    return sources


def check_sources(config: DataConfig, say: Say = _keep_quiet) -> None:
    """Find the files of the dataset, and look at the beginnings of the first ones.

    Raises:
        DataError: an entry matches nothing, or a file cannot be read as it would be.
    """
    for source in find_sources(config, say)[:HEADS_MAX]:
        source.check()


def _sources(entry: str, config: DataConfig, say: Say) -> Iterator[Source]:
    """Yield the files that an entry of `data.files` stands for. One of a `dataset_info.json` has its own shape."""
    shape = find_shape(config)
    suffixes = config.suffixes
    file, mark, name = entry.rpartition("#")
    is_described = bool(mark) and Path(file).name == DATASET_INFO
    if is_described:
        path, shape = describe(Path(file).expanduser(), name, images=config.images)
        entry = str(path)

    # A folder may hold texts beside conversations, such as a README.
    holds_records = is_described or config.chat is not None
    if holds_records:
        suffixes = tuple(suffix for suffix in suffixes if suffix in RECORD_FORMATS)
    # Conversations name the images that lie beside them.
    expected = IMAGE_SUFFIXES if config.images else frozenset[str]()
    names = set[str]()
    for path in _expand(entry, suffixes, expected, say):
        # Two links to one file in a folder are one file.
        real = os.path.realpath(path)
        if real in names:
            say(f"{path} is the same file as another one of {entry} and is read once")
            continue
        names.add(real)

        file_format = find_format(path, config.format)
        if file_format.name == "text" and not isinstance(shape, Text):
            raise DataError(
                f"{path} holds no conversations, but data.chat is set. Give files of {' '.join(RECORD_FORMATS)}, or "
                "set data.format."
            )

        # A .json file among texts may be one of them.
        may_be_text = file_format.name == "json" and config.format == "auto" and not holds_records
        yield Source(path, file_format, shape, may_be_text)


def _begins_with_record(text: str, shape: Shape) -> bool:
    """Return whether JSON begins with an object that holds a text or a conversation as records do."""
    start = text.lstrip().removeprefix("[").lstrip()
    if not start.startswith("{"):
        return False

    # Of a large file the first record alone is parsed.
    try:
        record, _ = json.JSONDecoder().raw_decode(start)
    except (ValueError, RecursionError):
        return False
    if isinstance(shape, Text) and isinstance(record.get(shape.key), str):
        return True
    if record.keys() >= {CHAT_KEYS["alpaca"], "output"} or record.keys() >= {"prompt", "completion"}:
        return True
    turns = [record.get(CHAT_KEYS["messages"]), record.get(CHAT_KEYS["sharegpt"])]
    return any(isinstance(value, list) for value in turns)


def _expand(entry: str, suffixes: tuple[str, ...], expected: frozenset[str], say: Say) -> list[Path]:
    """Return the files that a path, folder or glob stands for, sorted by path: a folder's own order is any."""
    path = Path(entry).expanduser()
    try:
        if entry == PYTHON_STDLIB:
            paths = list(_stdlib_files())
        elif path.is_dir():
            if (saved := saved_files(path)) is not None:
                return saved
            paths = _in_folder(path, suffixes, expected, say)
        elif path.exists() or path.is_symlink():
            paths = [path]
        else:
            paths = _matches(path, say)
    except OSError as error:
        raise DataError(f"data.files: cannot read {error.filename or entry}: {error.strerror}.") from error
    except (ValueError, NotImplementedError) as error:
        raise DataError(f"data.files: {entry!r} is neither a path nor a pattern: {error}.") from error

    if not paths:
        reason = f"holds no file in {' '.join(suffixes)}. Name its files, or their suffixes in data.suffixes."
        if not path.is_dir():
            reason = "matches no file or folder. Check the path: a relative one begins at the working directory."
        raise DataError(f"data.files: {entry} {reason}")
    return sorted(paths, key=lambda file: file.as_posix())


def _in_folder(folder: Path, suffixes: tuple[str, ...], expected: frozenset[str], say: Say) -> list[Path]:
    """Return the files of a folder and those below it whose suffixes are asked for, but for hidden ones.

    Others are said, but for those with the suffixes `expected`.
    """
    paths = list[Path]()
    hidden = list[Path]()
    others = list[Path]()

    # Without this the walk passes over a folder that cannot be read, and a run would have less data in silence.
    def refuse(error: OSError) -> None:
        raise error

    for at, subfolders, names in os.walk(folder, onerror=refuse):
        below = Path(at)
        hidden += [below / name for name in (*subfolders, *names) if name.startswith(".")]

        # Changed in place, which tells the walk where not to go.
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        linked = [below / name for name in subfolders if (below / name).is_symlink()]
        if linked:
            say(f"{folder}: links to folders are not followed: {_some(linked)}")

        for name in names:
            if name.startswith("."):
                continue
            path = below / name
            is_asked_for = _suffix_of(path) in suffixes
            if is_asked_for:
                paths.append(path)
            elif path.suffix.lower() not in expected:
                others.append(path)

    if hidden:
        say(f"{folder}: hidden files and folders are passed over, {len(hidden)} in all: {_some(hidden)}")
    if others and paths:
        kinds = sorted({path.suffix or path.name for path in others})
        say(
            f"{folder}: {len(others)} files whose suffixes are not in data.suffixes are passed over: "
            f"{', '.join(kinds[:8])}"
        )
    return paths


def _suffix_of(path: Path) -> str:
    """Return the suffix of a file in a folder, in small letters and without that of a compression."""
    try:
        return find_format(path).suffix
    except DataError:  # an archive, or a table in a compressed file: not one of the texts
        return path.suffix.lower()


def _matches(pattern: Path, say: Say) -> list[Path]:
    """Return the files that a glob matches; hidden ones only if the pattern names a hidden file or folder."""
    # pathlib takes no absolute pattern, so it is taken relative to its root.
    root = Path(pattern.anchor)
    relative = pattern.relative_to(root)
    matches = list(root.glob(str(relative)))
    folders = [path for path in matches if path.is_dir()]
    files = [path for path in matches if not path.is_dir()]
    hidden = list[Path]()
    names_hidden = any(map(_is_hidden, pattern.parts))
    if not names_hidden:
        hidden = [path for path in files if any(map(_is_hidden, path.parts))]

    if hidden:
        say(f"{pattern}: hidden files are passed over, {len(hidden)} in all: {_some(hidden)}")
    if folders and "**" not in pattern.parts:
        say(f"{pattern} matches folders, which are passed over (name them without a pattern): {_some(folders)}")
    return [path for path in files if path not in hidden]


def _is_hidden(name: str) -> bool:
    """Return whether a file or folder of this name is hidden."""
    return name.startswith(".") and name not in (".", "..")


def _some(paths: Iterable[Path]) -> str:
    """Return the first of some paths for a remark."""
    names = sorted(map(str, paths))
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _stdlib_files() -> Iterator[Path]:
    """Yield the standard library's own source files; skipped folders, some of them huge, are not walked."""
    top = sysconfig.get_paths()["stdlib"]
    for folder, subfolders, names in os.walk(top):
        # Changed in place, as above.
        subfolders[:] = [name for name in subfolders if name not in STDLIB_SKIPPED]
        for name in names:
            if name.endswith(".py"):
                yield Path(folder, name)
