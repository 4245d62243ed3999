"""Opens image files of others within limits: their bytes, and then their pixels.

A picture comes from a stranger. So the file is a plain one of a bounded size, its format is one of a few that hold
pixels alone (a PostScript file is a program), and the pixels that its header announces are counted before any is
decoded. Whatever else the decoder meets is one error with the record's name.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatier.byte_counts import format_bytes
from megatier.errors import DataError
from megatier.files import open_regular
from megatier.foreign import printable, reading, reason_of

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
"""The formats that are decoded, by Pillow's names."""
IMAGE_SUFFIXES = frozenset(f".{name.lower()}" for name in (*FORMATS, "JPG"))
"""The suffixes of files in these formats."""
SECOND_PICTURE = "MPO"
"""What Pillow calls a JPEG of a camera that has a preview behind its picture. The picture is the first one."""
BYTES_MAX = 256 << 20
"""The most bytes of the files of a record's images."""
PIXELS_MAX = 64 << 20
"""The most pixels of a record's images, width times height: 192 MiB once they are decoded. Processors scale most images
down to a megapixel or two."""
IMAGE_REMEDY = "Replace it, or leave the record out (data.skip_bad)."


@dataclass(frozen=True, slots=True)
class ImageBytes:
    """Where the bytes of an image lie, and what they were when the run first read them."""

    path: str
    """A file of the user's; or the name of the run's own file of images that came as bytes."""
    start: int
    """Number of its first byte there."""
    num_bytes: int
    """The number of its bytes."""
    digest: str
    """BLAKE2b of them, 8 bytes in hexadecimal figures."""

    def read(self, directory: Path, place: str) -> bytes:
        """Return the bytes.

        Args:
            directory: where the run's own file lies.
            place: the record of the image, for errors.

        Raises:
            DataError: they are gone, or are others now.
        """
        raw = read_bytes(directory / self.path, place, self.start, self.num_bytes)
        if digest_of(raw) != self.digest:
            raise DataError(
                f"{place}: the image {self.path} is not the one that the run began with. Bring the old one back, or "
                "begin a new run."
            )
        return raw


def read_bytes(path: Path, place: str, start: int = 0, num_bytes: int | None = None) -> bytes:
    """Return bytes of an image's file.

    Args:
        path: the file.
        place: the record of the image, for errors.
        start: number of the first byte.
        num_bytes: their number; None: all.

    Raises:
        DataError: it is no regular file, too large, or cannot be read.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            file.seek(start)
            # One byte more shows that a whole file is too large.
            raw = file.read(BYTES_MAX + 1 if num_bytes is None else num_bytes)
    # A path with a null byte is a ValueError.
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise DataError(f"{place}: cannot read the image {printable(str(path))}: {reason}. {IMAGE_REMEDY}") from error
    check_size(len(raw), place)
    return raw


def check_size(num_bytes: int, place: str) -> None:
    """Refuse a record whose images have so many bytes.

    Raises:
        DataError: they are too many.
    """
    if num_bytes > BYTES_MAX:
        raise DataError(
            f"{place}: the files of its images have more than {format_bytes(BYTES_MAX)}. Scale them down, or leave the "
            "record out."
        )


def digest_of(raw: bytes) -> str:
    """Return what tells the bytes of an image from others."""
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


def decode_all(raws: Sequence[bytes], place: str) -> list[Any]:
    """Return a record's images as RGB, turned as their cameras were held, as transformers loads them.

    Args:
        raws: the bytes of their files.
        place: the record, for errors.

    Raises:
        DataError: one is no image of a known format, damaged, cut short or animated, they have too many pixels, or
            Pillow is missing.
    """
    if not raws:
        return []
    try:
        # Pillow is an extra, and runs without images never load it.
        pillow = importlib.import_module("PIL.Image")
        ops = importlib.import_module("PIL.ImageOps")
    except ImportError as error:
        raise DataError("data.images needs Pillow: pip install 'megatier[images]'.") from error

    images = []
    num_pixels = 0
    for raw in raws:
        with reading(f"{place}: an image cannot be decoded", DataError, _reason, IMAGE_REMEDY):
            image = pillow.open(io.BytesIO(raw), formats=FORMATS)

            # So far only the header was read: a few kilobytes may announce gigapixels.
            width, height = image.size
            num_pixels += width * height
            if num_pixels > PIXELS_MAX:
                raise DataError(
                    f"{place}: its images have {num_pixels:,} pixels or more (one is {width:,} x {height:,}), and "
                    f"{PIXELS_MAX:,} are the most. Scale them down, or leave the record out."
                )
            if image.format != SECOND_PICTURE and getattr(image, "is_animated", False):
                raise DataError(f"{place}: an image is animated. Give one frame of it, or leave the record out.")

            # The same two steps as `transformers.image_utils.load_image`.
            images.append(ops.exif_transpose(image).convert("RGB"))
    return images


def _reason(error: BaseException) -> str:
    """Return why Pillow does not decode an image, in one line."""
    # Of unknown bytes it names the object in memory that holds them.
    if type(error).__name__ == "UnidentifiedImageError":
        return f"it is damaged, or none of {', '.join(FORMATS)}"
    return reason_of(error)
