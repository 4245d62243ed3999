"""Reads data files as text: decompressed in a stream, and decoded strictly.

A byte order mark says which encoding a file has; without one it is UTF-8. Bytes that do not decode are refused with
their place, never replaced: what replaces them would be learnt.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import importlib
import itertools
import lzma
import os
import zlib
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from megatier.byte_counts import format_bytes
from megatier.data.formats import Format, describe_format
from megatier.errors import DataError, FileChangedError
from megatier.files import FileVersion, open_regular

DECOMPRESSED_BYTES = 1 << 20
"""Bytes of a file that are decompressed at once."""
DOCUMENT_BYTES_MAX = 4 << 30
"""The most bytes of one text, one line or one JSON array, each of which is whole in RAM. A few compressed bytes may
stand for any number of them."""
HEAD_BYTES = 1 << 16
"""Bytes of a file that are looked at before a run begins."""

UTF8 = "utf-8"
BOM = "\ufeff"
BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
"""Byte order marks of encodings that are no UTF-8. UTF-32's begins with UTF-16's, so it comes first."""


def read_text(path: Path, file_format: Format) -> str:
    """Return the text of a whole file.

    Raises:
        DataError: it is damaged, too large or no text, with the place.
        OSError: it cannot be read, or is no regular file.
    """
    raw = bytearray()
    for piece in _pieces(path, file_format):
        # Checked as it grows: a few compressed bytes may stand for more than RAM holds.
        raw += piece
        _check_size(path, len(raw))
    text = decode(bytes(raw), str(path))
    return text.removeprefix(BOM)


def read_lines(path: Path, file_format: Format) -> Iterator[tuple[bytes, int]]:
    """Yield each line in UTF-8, with its end, and the number of its first byte. `decode` makes text of it.

    Raises:
        DataError: the file is damaged, or a line is too large.
        OSError: it cannot be read, or is no regular file.
    """
    offset = 0
    rest = bytearray()
    for piece in _pieces(path, file_format):
        start = 0
        while (stop := piece.find(b"\n", start) + 1) > 0:
            line = bytes(rest) + piece[start:stop]
            yield line, offset
            offset += len(line)
            start = stop
            rest.clear()

        # What is behind the last end of a line may go on in the next piece.
        rest += piece[start:]
        _check_size(path, len(rest))
    if rest:
        yield bytes(rest), offset


def decode(raw: bytes, place: str, offset: int = 0) -> str:
    """Return bytes of UTF-8 as text.

    Args:
        raw: the bytes.
        place: the place that they come from, for messages.
        offset: the number of the first byte in its file.

    Raises:
        DataError: they are no text. Says what they are, if that can be seen, and the byte.
    """
    # Only the beginning of a file says what it is.
    if offset == 0 and (said := describe_format(raw)) is not None:
        raise DataError(f"{place}: the file {said}.")
    try:
        text = raw.decode(UTF8)
    except UnicodeDecodeError as error:
        byte = raw[error.start]
        raise DataError(
            f"{place}: no text in UTF-8: byte {byte:#04x} at byte {offset + error.start} of the file. If it is text in "
            "another encoding, convert it first: iconv -f CP1252 -t UTF-8."
        ) from error
    if "\0" in text:
        raise DataError(
            f"{place}: no text: there is a NUL at byte {offset + raw.index(0)} of the file. If it is UTF-16 or UTF-32 "
            "without a byte order mark, convert it to UTF-8; else leave the file out."
        )
    return text


def check_head(path: Path, file_format: Format) -> None:
    """Look at the first bytes of a file that is to be read as text, so that a run is refused before it begins.

    Raises:
        DataError: it is damaged or no text, with the place.
        OSError: it cannot be read, or is no regular file.
    """
    with closing(_pieces(path, file_format)) as pieces:
        head = next(pieces, b"")[:HEAD_BYTES]

    # The last character may be cut, and what is left of it says nothing.
    if len(head) == HEAD_BYTES:
        decoder: Any = codecs.getincrementaldecoder(UTF8)("ignore")
        decoder.decode(head)
        waiting, _ = decoder.getstate()
        head = head[: len(head) - len(waiting)]
    decode(head, str(path))


def _pieces(path: Path, file_format: Format) -> Generator[bytes]:
    """Yield the bytes of a file in UTF-8, if the mark at its beginning says that they are in another encoding.

    A mark stays where it is, so that bytes keep their numbers.
    """
    pieces = _unpack(path, file_format.compression)
    first = next(pieces, b"")

    # A decompressor may give fewer bytes than a mark has.
    while len(first) < 4 and (more := next(pieces, b"")):
        first += more
    pieces = itertools.chain([first], pieces)

    # UTF-32 comes first among the marks, since its mark begins with that of UTF-16.
    for mark, encoding in BYTE_ORDER_MARKS:
        if first.startswith(mark):
            yield from _recode(path, pieces, encoding)
            return
    yield from pieces


def _recode(path: Path, pieces: Iterator[bytes], encoding: str) -> Iterator[bytes]:
    """Yield the text of an encoding in UTF-8."""
    decoder: Any = codecs.getincrementaldecoder(encoding)("strict")
    offset = 0
    # The empty piece at the end says that nothing follows, so that half a character there is an error.
    for piece in itertools.chain(pieces, [b""]):
        waiting = len(decoder.getstate()[0])
        try:
            yield decoder.decode(piece, not piece).encode(UTF8)
        except UnicodeError as error:
            start = offset - waiting + getattr(error, "start", 0)
            raise DataError(f"{path}: no text in {encoding.upper()}, as its mark says: byte {start}.") from error
        offset += len(piece)


def _unpack(path: Path, compression: str | None) -> Iterator[bytes]:
    """Yield the bytes of a file, decompressed.

    Raises:
        FileChangedError: somebody wrote to the file meanwhile.
        DataError: it is not whole.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        version = FileVersion.of(file.fileno())
        try:
            with _stream(path, file, compression) as stream:
                while piece := stream.read(DECOMPRESSED_BYTES):
                    yield piece

                # Whoever replaces the file leaves this one as it is. Who writes to it would give text of two versions.
                if FileVersion.of(file.fileno()) != version:
                    raise FileChangedError(str(path))
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            # Decompressors say by an error without a number that the bytes are not theirs.
            if compression is None or getattr(error, "errno", None):
                raise
            raise DataError(f"{path} is no whole {compression} file: {error}. Copy it again.") from error


def _stream(path: Path, file: Any, compression: str | None) -> Any:  # noqa: ANN401 - no common type
    """Open what decompresses a file."""
    if compression == "gzip":
        return gzip.GzipFile(fileobj=file)
    if compression == "bzip2":
        return bz2.BZ2File(file)
    if compression == "xz":
        return lzma.LZMAFile(file)
    if compression == "zstd":
        try:
            arrow = importlib.import_module("pyarrow")
        except ImportError as error:
            raise DataError(f"{path} needs pyarrow to unpack zstd: pip install 'megatier[data]'.") from error
        return arrow.CompressedInputStream(arrow.PythonFile(file), "zstd")
    return file


def _check_size(path: Path, num_bytes: int) -> None:
    """Refuse a document that would fill RAM.

    Raises:
        DataError: it is too large.
    """
    if num_bytes > DOCUMENT_BYTES_MAX:
        raise DataError(
            f"{path} holds more than {format_bytes(DOCUMENT_BYTES_MAX)} in one document, which is whole in RAM. Split "
            "it into several files, or make a line of JSON for each document."
        )
