"""The note `tokens.json`: what the files of tokens or rows beside it were made from, and their checksums.

Both are compared whenever a run begins, because nobody would notice a flipped bit of a token. Files that are damaged,
or of other settings, are made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from megatier.errors import REMEDIES, DataError
from megatier.files import open_regular, read_regular, replace_file

TOKENS_NOTE_FILE = "tokens.json"
TOKENS_NOTE_BYTES_MAX = 64 << 20
"""A larger file is no note of ours: the longest thing in it is a list of files."""
READ_BYTES = 16 << 20
"""Bytes of a file that are read at once."""


@dataclass(frozen=True, slots=True)
class Content:
    """The size and checksum of a token file."""

    num_bytes: int
    """Its size."""
    crc32: int
    """The CRC32 of all its bytes."""
    num_documents: int | None = None
    """Documents in it; None: the version that made it did not count them."""
    num_learnt: int | None = None
    """Tokens that are learnt; None likewise."""


def read_or_make(
    directory: Path, settings: str, names: Sequence[str], make: Callable[[], list[Content]]
) -> tuple[list[Content], str | None]:
    """Return the contents of files, which are made first unless they are there, whole and of the same settings.

    Args:
        directory: the directory of the files and the note.
        settings: what the files follow from (`token_files.describe_settings`).
        names: names of the files.
        make: makes the files.

    Returns:
        Their contents; and the damaged file, if that is why they were made again.

    Raises:
        DataError: a file cannot be read or written, or something else lies in its place.
    """
    try:
        contents, damaged = _read_contents(directory, settings, names)
        if contents is None:
            # While the files are being made, no note may say that they are whole.
            (directory / TOKENS_NOTE_FILE).unlink(missing_ok=True)
            contents = make()
            _write_note(directory, settings, names, contents)
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, "Check the drive, or name another output.directory.")
        contents_name = "tokens" if names[0].endswith(".tokens") else "rows"
        raise DataError(f"cannot write {contents_name} to {directory}: {error.strerror or error}. {remedy}") from error
    return contents, damaged


def _write_note(directory: Path, settings: str, names: Sequence[str], contents: Sequence[Content]) -> None:
    """Write the note: the settings of the files, and what each of them holds."""
    files = {}
    for name, content in zip(names, contents, strict=True):
        files[name] = astuple(content)

    # The digest is of all the rest.
    note: dict[str, Any] = {"settings": settings, "files": files}
    note["digest"] = _digest(note)

    # Replaced at once, because a note that a kill cut short would cause whole files to be made again.
    text = json.dumps(note).encode()
    replace_file(directory / TOKENS_NOTE_FILE, text)


def _read_contents(directory: Path, settings: str, names: Sequence[str]) -> tuple[list[Content] | None, str | None]:
    """Return the contents of files, or None if they have to be made; and the damaged file, if that is why."""
    paths = [directory / name for name in names]

    # Nothing was made yet, or a kill came before the note was written, which is last.
    if not all(path.exists() for path in (directory / TOKENS_NOTE_FILE, *paths)):
        return None, None

    # An older version noted the settings alone. Nothing else is known of its files, so they are accepted, and their
    # checksums are noted from now on.
    text = _read(directory / TOKENS_NOTE_FILE)
    if text == settings.encode():
        contents = [content_of(path) for path in paths]
        _write_note(directory, settings, names, contents)
        return contents, None

    note = _parse_note(text)
    if note is None:
        return None, str(directory / TOKENS_NOTE_FILE)
    # Files of other settings are not damaged, so they are made again without a message.
    if note["settings"] != settings:
        return None, None

    noted = [Content(*note["files"].get(path.name, (0, 0))) for path in paths]
    for path, content in zip(paths, noted, strict=True):
        found_now = content_of(path)

        # The counts are not compared, since an older version may have noted none.
        if (found_now.num_bytes, found_now.crc32) != (content.num_bytes, content.crc32):
            return None, str(path)
    return noted, None


def content_of(path: Path) -> Content:
    """Return bytes and checksum of a file.

    Raises:
        DataError: it is no regular file, or cannot be read.
    """
    size = 0
    crc32 = 0
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            # In pieces, since a file may be larger than RAM.
            while piece := file.read(READ_BYTES):
                size += len(piece)
                crc32 = zlib.crc32(piece, crc32)
    except OSError as error:
        raise _unreadable(path, error) from error

    return Content(size, crc32)


def _read(path: Path) -> bytes:
    """Return the bytes of the note."""
    try:
        return read_regular(path, TOKENS_NOTE_BYTES_MAX)
    except OSError as error:
        raise _unreadable(path, error) from error


def _parse_note(text: bytes) -> dict[str, Any] | None:
    """Return the note; None if it is damaged."""
    try:
        # Taken out, since it is of all the rest.
        note = json.loads(text)
        digest = note.pop("digest")
        is_whole = type(note["settings"]) is str and type(note["files"]) is dict and digest == _digest(note)
    except (LookupError, AttributeError, TypeError, ValueError, RecursionError):
        return None
    return note if is_whole else None


def _digest(note: dict[str, Any]) -> str:
    """Return a digest of the note, which tells whether it is whole."""
    text = json.dumps(note, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _unreadable(path: Path, error: OSError) -> DataError:
    """Return the error about a file."""
    return DataError(f"cannot read {path}: {error.strerror}. Move it away, and the text is tokenised again.")
