"""The identity of a base: what its files of weights are, found without reading all of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from megatier.errors import UnsupportedModelError
from megatier.foreign import opened
from megatier.models.folder import read_headers

PLACES = 256
"""Places of a file that are looked at, the first and the last bytes among them."""
PLACE_BYTES = 64 << 10
"""Bytes of each. So all of a file of 16 MiB is looked at, and 16 MiB of a larger one."""


def identity_of(folder: Path) -> dict[str, str]:
    """Return the size and a checksum of each file of weights in a model's folder, by its name.

    The checksum is over bytes at even distances, so it finds another model, or one that was trained further, in a file
    of any size. Other values of a few weights alone may be missed.

    Raises:
        UnsupportedModelError: a file is missing or damaged.
    """
    paths = {tensor.path for tensor in read_headers(folder).values()}
    return {path.name: _described(path) for path in sorted(paths)}


def _described(path: Path) -> str:
    """Return size and checksum of a file, in words."""
    size = path.stat().st_size
    digest = hashlib.blake2b(digest_size=8)
    with opened(path, UnsupportedModelError) as file:
        for place in range(PLACES):
            file.seek(max(0, size - PLACE_BYTES) * place // (PLACES - 1))
            digest.update(file.read(PLACE_BYTES))
    return f"{size:,} bytes, checksum {digest.hexdigest()}"
