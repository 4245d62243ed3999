"""The note `tokens.json`: what the token files in its folder were made from, and their checksums.

They are compared whenever a run begins. A flipped bit of a token is another token, and nobody would notice. A damaged
file is tokenised again.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from megatier.errors import DataError
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


def write_note(directory: Path, settings: str, names: Sequence[str], contents: Sequence[Content]) -> None:
    """Note what files hold, and the settings that they were made by.

    Args:
        directory: where files and note lie.
        settings: as `token_files.describe_settings` gives them.
        names: names of the files.
        contents: what each holds.

    Raises:
        OSError: it cannot be written.
    """
    files = {}
    for name, content in zip(names, contents, strict=True):
        files[name] = astuple(content)

    # The digest is of all the rest.
    note: dict[str, Any] = {"settings": settings, "files": files}
    note["digest"] = _digest(note)

    # Replaced at once: a note that a kill cut short would let whole files be made again.
    text = json.dumps(note).encode()
    replace_file(directory / TOKENS_NOTE_FILE, text)


def read_contents(directory: Path, settings: str, names: Sequence[str]) -> tuple[list[Content] | None, str | None]:
    """Return the contents of files, if they are as noted and were made by these settings.

    Returns:
        Their contents, or None if they have to be made; and the file that is damaged, if that is why.

    Raises:
        DataError: one is no regular file, or cannot be read.
        OSError: the note cannot be written.
    """
    paths = [directory / name for name in names]

    # Nothing was made yet, or a kill came before the note, which is written last.
    if not all(path.exists() for path in (directory / TOKENS_NOTE_FILE, *paths)):
        return None, None

    # A version without checksums noted the settings alone. Nothing more is known of its files, so they are taken as
    # they are, and noted from now on.
    text = _read(directory / TOKENS_NOTE_FILE)
    if text == settings.encode():
        found = [content_of(path) for path in paths]
        write_note(directory, settings, names, found)
        return found, None

    note = _parsed(text)
    if note is None:
        return None, str(directory / TOKENS_NOTE_FILE)
    # Not damaged, only of other settings: they are made again without a word.
    if note["settings"] != settings:
        return None, None

    noted = [Content(*note["files"].get(path.name, (0, 0))) for path in paths]
    for path, content in zip(paths, noted, strict=True):
        found_now = content_of(path)

        # Without the counts, which an older version may not have noted.
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


def _parsed(text: bytes) -> dict[str, Any] | None:
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
