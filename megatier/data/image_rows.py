"""Files of rows: one conversation with its images each, as text, and where the bytes of its images lie.

A line is the JSON of the rows that share a sequence, which are several only with `data.max_patches`. Images that lie in
files of the user's stay there. Those that came as bytes, in a table or in the text of a record, lie as they came in one
file beside the rows. No pixel is stored.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from megatier.data.conversation import Conversation
from megatier.data.image_file import ImageBytes, check_size, digest_of, read_bytes
from megatier.data.token_note import Content
from megatier.errors import DataError
from megatier.files import open_regular


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRow:
    """A conversation as a row of a batch."""

    place: str
    """The place that it comes from, for errors."""
    text: str
    """The conversation as the chat template writes it, with one place for each image."""
    images: tuple[ImageBytes, ...]
    """Its images."""
    num_tokens: int
    """Tokens that the processor makes of it."""
    learnt: tuple[tuple[int, int], ...]
    """Ranges of the tokens that are learnt: the first one, and the one after the last."""
    crc32: int
    """CRC32 of its token ids."""
    num_patches: int = 0
    """Patches of its images; of images that the processor makes equally large, their number."""

    @property
    def num_learnt(self) -> int:
        """Tokens whose labels count. The first one has nothing before it from which it could be told."""
        return sum(stop - max(start, 1) for start, stop in self.learnt)

    def noted(self) -> dict[str, Any]:
        """Return what a line has of the row."""
        return {
            "place": self.place,
            "text": self.text,
            "images": [astuple(image) for image in self.images],
            "num_tokens": self.num_tokens,
            "learnt": self.learnt,
            "crc32": self.crc32,
            "num_patches": self.num_patches,
        }

    @classmethod
    def of(cls, noted: dict[str, Any]) -> ImageRow:
        """Return the row that `noted` gave. Its file's checksum was compared before."""
        # JSON has made lists of all tuples.
        fields = dict(noted)
        images = fields.pop("images")
        learnt = fields.pop("learnt")
        return cls(
            images=tuple(ImageBytes(*image) for image in images),
            learnt=tuple((start, stop) for start, stop in learnt),
            **fields,
        )


def ranges_of(learnt: NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    """Return the ranges in which a mask is set."""
    # With a token that is not learnt on either side, borders come in pairs: where a range begins, and where it ends.
    padded = np.pad(learnt, 1)
    changes = padded[1:] != padded[:-1]
    borders = np.flatnonzero(changes).tolist()
    starts = borders[::2]
    stops = borders[1::2]
    return tuple(zip(starts, stops, strict=True))


@dataclass(slots=True)
class RowWriter:
    """One file of rows, and what was written to it."""

    file: IO[bytes]
    num_bytes: int = 0
    crc32: int = 0
    num_rows: int = 0
    """Conversations."""
    num_learnt: int = 0

    def write(self, pack: Sequence[ImageRow]) -> None:
        """Append conversations that share a sequence."""
        line = json.dumps([row.noted() for row in pack]).encode() + b"\n"
        self.file.write(line)

        # Counted on the way, so that nobody reads the file again for its checksum.
        self.num_bytes += len(line)
        self.crc32 = zlib.crc32(line, self.crc32)
        self.num_rows += len(pack)
        self.num_learnt += sum(row.num_learnt for row in pack)

    @property
    def content(self) -> Content:
        """What was written, for the note."""
        return Content(self.num_bytes, self.crc32, self.num_rows, self.num_learnt)


@dataclass(slots=True)
class ByteWriter:
    """The file of images that came as bytes. Equal ones lie there once."""

    file: IO[bytes]
    name: str
    """Its name once it is whole."""
    num_bytes: int = 0
    crc32: int = 0
    found: dict[str, ImageBytes] = field(default_factory=dict)
    """Images by digest."""

    def keep(self, raw: bytes) -> ImageBytes:
        """Append an image, unless it is there, and return where it lies."""
        digest = digest_of(raw)
        if digest not in self.found:
            self.file.write(raw)
            self.found[digest] = ImageBytes(self.name, self.num_bytes, len(raw), digest)
            self.num_bytes += len(raw)
            self.crc32 = zlib.crc32(raw, self.crc32)
        return self.found[digest]

    @property
    def content(self) -> Content:
        """What was written, for the note."""
        return Content(self.num_bytes, self.crc32)


def raw_images(conversation: Conversation) -> Iterator[tuple[Path | None, bytes]]:
    """Yield the bytes of a conversation's images, each with its file; None: the record has the bytes.

    Raises:
        DataError: a file cannot be read, or they are too large.
    """
    num_bytes = 0
    for source in conversation.images:
        if isinstance(source, bytes):
            num_bytes += len(source)
            check_size(num_bytes, conversation.place)
            yield None, source
            continue

        # Absolute, since a run may be resumed from another folder.
        path = (conversation.folder / Path(source).expanduser()).absolute()
        raw = read_bytes(path, conversation.place)
        num_bytes += len(raw)
        check_size(num_bytes, conversation.place)
        yield path, raw


class RowRange:
    """The rows of a file, by their numbers."""

    def __init__(self, path: Path, content: Content) -> None:
        """Find where each line begins.

        Args:
            path: the file.
            content: what is in it.

        Raises:
            DataError: it was removed from outside.
        """
        self.path = path
        self.crc32 = content.crc32
        self.num_documents = content.num_documents
        self.num_learnt = content.num_learnt
        with self._reading() as file:
            # Only where lines begin stays in memory: the rows of a large dataset would fill RAM.
            sizes = [len(line) for line in file]
        self._starts = np.cumsum([0, *sizes], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def read(self, numbers: Sequence[int]) -> list[tuple[ImageRow, ...]]:
        """Return the conversations of the sequences of these numbers.

        Raises:
            DataError: the file was cut short or removed from outside.
        """
        packs = []
        with self._reading() as file:
            for number in numbers:
                # Opened for this call alone, so that two threads that read rows share no position in the file.
                start, stop = self._starts[number : number + 2].tolist()
                file.seek(start)
                packs.append(tuple(map(ImageRow.of, json.loads(file.read(stop - start)))))
        return packs

    @contextmanager
    def _reading(self) -> Iterator[IO[bytes]]:
        """Open the file inside, and turn whatever is wrong with it into one error."""
        try:
            with os.fdopen(open_regular(self.path), "rb") as file:
                yield file

        # A line of a changed file may be no JSON, or no row.
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise DataError(
                f"cannot read rows from {self.path}: {error}. Something outside the run changed the file; `megatier "
                "resume` makes it again."
            ) from error
