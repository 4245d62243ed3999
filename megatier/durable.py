"""Durable files and folders: they are complete or absent, even after a kill or a loss of power at any moment.

Each one is made in this order:

1. All of it is written beside its final place, under a hidden name.
2. The bytes, and the directories that list them, are synchronised to the drive.
3. One rename gives it its name. If something has that name already, the two are exchanged atomically.
4. The directory with the name is synchronised to the drive.
5. Only then is whatever it replaces removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatier.errors import MegatierError, TransferError

REPLACED_SUFFIX = ".replaced"
"""The end of a hidden name. If a file system cannot switch two names, the old file or folder, which is whole, gets it
for a moment."""
NO_SWITCH = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
AT_FDCWD = -100
RENAME_EXCHANGE = 2


@contextlib.contextmanager
def committing(partial: Path, target: Path, what: str, *, replaces: bool = False) -> Iterator[None]:
    """Make the file or folder that this block writes to `partial` durable as `target`, or remove all of it.

    Args:
        partial: a file or a folder beside the target.
        target: the final name.
        what: a word for it, for messages.
        replaces: whether something else may have the target's name. That stays whole until the new one is safe. A kill
            leaves it at `target` or at `partial`, or under its hidden name with REPLACED_SUFFIX, from which
            `restore_replaced` takes it.

    Raises:
        TransferError: writing failed. Whatever had the target's name is whole.
    """
    old: Path | None = None
    try:
        yield
        synchronise = sync_tree if partial.is_dir() else sync
        synchronise(partial)

        # A kill before this line leaves the old target, and a kill after it the new one, which is on the drive already.
        old = _take_name(partial, target, replaces)
        synchronise(target.parent)
        if old is not None:
            discard(old)
    except BaseException as error:
        # After the exchange the old one is at `partial`. It has to stay, because the drive may not have the new one.
        if old is None:
            with contextlib.suppress(OSError):
                discard(partial)

        # A `TransferError` is an OSError too, and says more than the one below.
        if isinstance(error, MegatierError) or not isinstance(error, OSError):
            raise
        path = str(error.filename or target.parent)
        raise TransferError(f"writing {what}", "disk", path, 0, error.errno or 0) from error


def restore_replaced(target: Path) -> None:
    """Give a replaced file or folder its name back, if a kill came between the two renames of `committing`.

    Raises:
        TransferError: the drive failed.
    """
    replaced = target.with_name(f".{target.name}{REPLACED_SUFFIX}")
    if not os.path.lexists(replaced):
        return
    try:
        # If the target exists, the second rename was made too, and the old one is not needed any more.
        if os.path.lexists(target):
            discard(replaced)
        else:
            replaced.rename(target)
    except OSError as error:
        raise TransferError("settling", "disk", str(replaced), 0, error.errno or 0) from error


def sync(path: Path) -> None:
    """Wait until one file, or the names in one directory, are on the drive.

    Raises:
        OSError: the drive failed.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def free_bytes(directory: Path) -> int:
    """Return the bytes that this user may still write to the drive of a directory.

    Raises:
        TransferError: the drive does not answer, for example because it is gone.
    """
    return _usage(directory)[1]


def total_bytes(directory: Path) -> int:
    """Return the size of the drive of a directory, in bytes.

    Raises:
        TransferError: as `free_bytes`.
    """
    return _usage(directory)[0]


def _usage(directory: Path) -> tuple[int, int]:
    """Return the size of a drive, and its free bytes."""
    try:
        usage = shutil.disk_usage(directory)
    except OSError as error:
        raise TransferError("asking for room", "disk", str(directory), 0, error.errno or 0) from error
    return usage.total, usage.free


def sync_tree(folder: Path) -> None:
    """Wait until all of the folder's file system is on the drive.

    It is one call, because a large checkpoint has thousands of files and folders.

    Raises:
        OSError: the drive failed.
    """
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _sync_file_system(directory, folder)
    finally:
        os.close(directory)


def _sync_file_system(directory: int, folder: Path) -> None:
    """Wait until all of the file system of an open directory is on the drive. An error names the folder.

    Raises:
        OSError: the drive failed.
    """
    # Python has no function for this call of the C library.
    library = ctypes.CDLL(None, use_errno=True)
    if library.syncfs(directory):
        raise OSError(ctypes.get_errno(), "syncfs", str(folder))


def discard(path: Path) -> None:
    """Remove a file, a folder, or a link itself. It is no error if nothing is there.

    Raises:
        OSError: it could not be removed.
    """
    # The target of a link is not ours to remove.
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def exchange_names(first: Path, second: Path) -> bool:
    """Exchange two names atomically. Return False if the file system cannot do that.

    Raises:
        OSError: a name does not exist, or the drive failed.
    """
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # an old C library
        return False

    if not rename(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE):
        return True
    if (code := ctypes.get_errno()) in NO_SWITCH:
        return False
    raise OSError(code, os.strerror(code), str(second))


def _take_name(partial: Path, target: Path, replaces: bool) -> Path | None:
    """Rename `partial` to `target`. If something else had that name, return its path now, where it is whole."""
    if not (replaces and os.path.lexists(target)):
        partial.rename(target)
        return None
    if exchange_names(partial, target):
        return partial

    # Without an exchange the name is free for a moment. `restore_replaced` mends a kill in that moment.
    replaced = target.with_name(f".{target.name}{REPLACED_SUFFIX}")

    # A kill may have left one there. If the target exists, it is not needed any more (`restore_replaced`).
    discard(replaced)
    target.rename(replaced)
    try:
        partial.rename(target)
    except BaseException:
        replaced.rename(target)
        raise

    return replaced
