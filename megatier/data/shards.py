"""Finds the files of a streamed folder, and checks that a run began with them.

A stream is read as the run goes on, so a file that no step has come to yet may change between two processes of a run
without a trace in what was read. So a run notes what all of them are when it opens the stream.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatier.errors import DataError
from megatier.files import open_regular

SAMPLE_BYTES = 1 << 16
"""Bytes of a sample of a file."""
NUM_SAMPLES = 4
"""Samples whose digest stands for a file, besides its size and the time of its last change. A file that is no larger
than these is read whole, and then the time says nothing more."""

Shards = dict[str, list[Any]]
"""Size, digest, and nanoseconds of the last change (None: all of it is in the digest) by the name of a file."""


def list_shards(folder: str, files: Sequence[str]) -> Shards:
    """Return the shards that files below a folder are.

    Raises:
        DataError: one cannot be read.
    """
    # By names in the folder, so that a dataset which was moved is the same one.
    return {os.path.relpath(file, folder): _identity(Path(file)) for file in files}


def find_shard_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return which files are others now, and how, each in a few words."""
    return list(_changes(before, now))


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield the shards that have changed."""
    for name in sorted({*before, *now}):
        was = before.get(name)
        present = now.get(name)
        if was == present:
            continue
        # From the plainest difference to the least: a file that was written since may hold what it held.
        if was is None:
            yield f"{name} is new"
        elif present is None:
            yield f"{name} is gone"
        elif was[0] != present[0]:
            yield f"{name} had {was[0]:,} bytes and has {present[0]:,}"
        elif was[1] != present[1]:
            yield f"{name} holds something else"
        else:
            yield f"{name} was written since"


def _identity(path: Path) -> list[Any]:
    """Return size, digest, and the time of the last change if the digest has samples alone."""
    digest = hashlib.blake2b(digest_size=8)
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            status = os.fstat(file.fileno())

            # The first sample begins with the file, and the last one ends with it.
            is_whole = status.st_size <= NUM_SAMPLES * SAMPLE_BYTES
            apart = SAMPLE_BYTES if is_whole else (status.st_size - SAMPLE_BYTES) // (NUM_SAMPLES - 1)
            for number in range(NUM_SAMPLES):
                file.seek(number * apart)
                digest.update(file.read(SAMPLE_BYTES))
    except OSError as error:
        raise DataError(f"data.dataset: cannot read {path}: {error.strerror}.") from error
    return [status.st_size, digest.hexdigest(), None if is_whole else status.st_mtime_ns]
