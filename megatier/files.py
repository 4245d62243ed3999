"""How a run opens the files that it keeps for itself: regular files alone, and replaced whole.

Anything may lie in the place of one. A pipe would hold up whoever opens it for ever, and a device does as it likes, so
what is no regular file is refused before it is opened.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import IO

from megatier.durable import sync


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Descriptor of a regular file, or of a new one where the flags create it. Never waits for another process.

    Raises:
        OSError: the system refused, or it is no regular file.
    """
    with contextlib.suppress(FileNotFoundError):
        _check_regular(path, path.stat(follow_symlinks=not flags & os.O_NOFOLLOW))
    # Another thing may take its place before it is opened: hence no waiting, and a second look.
    file = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        _check_regular(path, os.fstat(file))
    except OSError:
        os.close(file)
        raise

    return file


def read_regular(path: Path, limit: int = -1, flags: int = os.O_RDONLY) -> bytes:
    """The first bytes of a regular file, at most `limit` of them; -1: all.

    Raises:
        OSError: as `open_regular`.
    """
    with os.fdopen(open_regular(path, flags), "rb") as file:
        return file.read(limit)


def create_file(path: Path) -> IO[bytes]:
    """A new file, in the place of what a killed process may have left there.

    Raises:
        OSError: the system refused.
    """
    path.unlink(missing_ok=True)
    return path.open("xb")


def replace_file(path: Path, content: bytes) -> None:
    """Put a file with this content in the place of what is there, all of it on the drive.

    Raises:
        OSError: it cannot be written; what was there is as it was.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with create_file(partial) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        sync(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def _check_regular(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
