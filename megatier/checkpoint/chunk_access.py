"""Opens the files of chunks to write and to read, and refuses what is no chunk of its checkpoint.

A user who can write to a folder can put links, pipes or other files in the place of chunks. So files are opened first,
and what is asked of them is asked of the open file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from megatier.errors import DamagedCheckpointError


@contextlib.contextmanager
def typed_open_errors(path: Path) -> Iterator[None]:
    """Refuse a chunk that cannot be opened, or lies elsewhere.

    Raises:
        DamagedCheckpointError: its file is missing, or a link leads out of its folder.
    """
    # `open_plain` follows no link at the end of a path. Links further up show in the resolved path.
    if os.path.realpath(path) != str(path):
        raise DamagedCheckpointError(str(path), "leads out of its checkpoint by a link; it was not read")
    try:
        yield
    except OSError as error:
        raise DamagedCheckpointError(str(path), f"cannot be read: {os.strerror(error.errno or 0)}") from error


def check_size(path: Path, file: int, num_bytes: int) -> None:
    """Refuse a chunk of another size.

    Raises:
        DamagedCheckpointError: it has one, or is no plain file.
    """
    # Asked of the open file, which nobody can exchange any more. A pipe or a device is no chunk.
    status = os.fstat(file)
    is_plain = stat.S_ISREG(status.st_mode)
    if not is_plain or status.st_size != num_bytes:
        reason = f"has {status.st_size} bytes instead of {num_bytes}; it is damaged"
        raise DamagedCheckpointError(str(path), reason)


def check_place(path: Path, checksum: int, expected: int) -> None:
    """Refuse a chunk of another place or time.

    Raises:
        DamagedCheckpointError: its checksum is not the one that was noted.
    """
    # A write that a drive misdirected or lost leaves whole bytes of another place or time, with their own checksum.
    if checksum != expected:
        reason = (
            f"holds other bytes than were written there: their checksum is {checksum:#010x}, noted is {expected:#010x}"
        )
        raise DamagedCheckpointError(str(path), reason)


def create(path: Path) -> int:
    """Create a file to write, by O_DIRECT if the file system takes it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise

    # The refused attempt may have made the file.
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    return os.open(path, flags, 0o600)


def open_plain(path: Path, more: int = 0) -> int:
    """Open a file to read, unless it is a link, and without waiting if it is a pipe."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.open(path, flags | more)


def open_direct(path: Path) -> int:
    """Open a file to read by O_DIRECT, if the file system takes it."""
    # EINVAL is how a file system says that it has no O_DIRECT. Every other error is the file's.
    try:
        return open_plain(path, os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return open_plain(path)
