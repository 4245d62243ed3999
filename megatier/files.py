"""Opens the files that a run keeps for itself. They are regular files, and each is replaced as a whole.

Anything else may lie in the place of such a file. Opening a pipe may block for ever, and opening a device may do
anything. So everything that is no regular file is refused before it is opened.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from megatier.durable import sync


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return the descriptor of a regular file, or of a new one if the flags say so. It never waits for another process.

    Raises:
        OSError: the system refused, or it is no regular file.
    """
    # Asked before it is opened as well, because opening a device may already do something.
    with contextlib.suppress(FileNotFoundError):
        _check_regular(path, path.stat(follow_symlinks=not flags & os.O_NOFOLLOW))

    # Something else may take its place before it is opened. So it is opened without waiting, and looked at again.
    file = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        _check_regular(path, os.fstat(file))
    except OSError:
        os.close(file)
        raise

    return file


def read_regular(path: Path, limit: int = -1, flags: int = os.O_RDONLY) -> bytes:
    """Return the first bytes of a regular file, at most `limit` of them; -1: all of them.

    Raises:
        OSError: as `open_regular`.
    """
    with os.fdopen(open_regular(path, flags), "rb") as file:
        return file.read(limit)


def create_file(path: Path) -> IO[bytes]:
    """Open a new file. If a killed process left one there, it is removed first.

    Raises:
        OSError: the system refused.
    """
    path.unlink(missing_ok=True)

    # With x, a file or link that comes here in between is refused.
    return path.open("xb")


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file by one with this content, and wait until all of it is on the drive.

    Raises:
        OSError: it cannot be written. The file that was there is as it was.
    """
    # In the same directory: a file cannot be renamed into another file system.
    partial = path.with_name(f".{path.name}.partial")
    try:
        # The bytes are on the drive before the file gets its name; else a loss of power could leave the name with an
        # empty file. The name itself is on the drive once its directory is.
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


def _check_regular(path: Path, status: os.stat_result) -> None:
    """Refuse everything but a regular file."""
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


@dataclass(frozen=True, slots=True)
class FileVersion:
    """The identity of a file: another one in its place has another, and so has a file that was written."""

    device: int
    inode: int
    num_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, file: int) -> Self:
        """Return that of an open file."""
        return cls._from(os.fstat(file))

    @classmethod
    def at(cls, path: Path) -> Self | None:
        """Return that of the file at a path; None: there is none that could be opened."""
        try:
            return cls._from(path.stat())
        except OSError:
            return None

    @classmethod
    def _from(cls, status: os.stat_result) -> Self:
        """Return that of a file about which the system was asked."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
