"""Files and folders that are whole or not there: written under a hidden name, synchronised, and only then named.

The order is always the same, and is what makes a kill or a loss of power at any point harmless:

1. all of it is written beside its place, under a hidden name;
2. its bytes and the directories that list them are on the drive;
3. it gets its name, by one rename. Where the name is taken, old and new change places in one step;
4. the directory that holds the name is on the drive;
5. only now may anything go that it replaces.
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

REPLACED = ".replaced"
"""End of the hidden name of what is whole and gave its name up, where a file system cannot switch two names."""
NO_SWITCH = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
AT_FDCWD = -100
RENAME_EXCHANGE = 2


@contextlib.contextmanager
def becoming(partial: Path, target: Path, what: str, *, replaces: bool = False) -> Iterator[None]:
    """What is written to `partial` inside is `target` in the end, all of it on the drive; or nothing of it is there.

    Args:
        partial: a file or a folder beside the target.
        target: what it becomes.
        what: it is, for messages.
        replaces: something else may have the target's name. That stays whole until the new one is safe; a kill leaves
            it at `target` or at `partial`, or (`settle`) under its name with REPLACED.

    Raises:
        TransferError: writing failed. What had the target's name is whole.
    """
    old: Path | None = None
    try:
        yield
        synchronise = sync_tree if partial.is_dir() else sync
        synchronise(partial)
        old = _take_name(partial, target, replaces)
        synchronise(target.parent)
        if old is not None:
            discard(old)
    except BaseException as error:
        if old is None:  # else the old one may lie there, and it is not known whether the drive has the new one
            with contextlib.suppress(OSError):
                discard(partial)
        if isinstance(error, MegatierError) or not isinstance(error, OSError):
            raise
        path = str(error.filename or target.parent)
        raise TransferError(f"writing {what}", "disk", path, 0, error.errno or 0) from error


def settle(target: Path) -> None:
    """Give what was whole its name back, where a kill came between the two renames that stand for a switch.

    Raises:
        TransferError: the drive does not let it.
    """
    replaced = target.with_name(f".{target.name}{REPLACED}")
    if not os.path.lexists(replaced):
        return
    try:
        if os.path.lexists(target):
            discard(replaced)
        else:
            replaced.rename(target)
    except OSError as error:
        raise TransferError("settling", "disk", str(replaced), 0, error.errno or 0) from error


def sync(path: Path) -> None:
    """One file, or the names in one directory, on the drive.

    Raises:
        OSError: the drive failed.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_tree(folder: Path) -> None:
    """All of the file system on the drive: one call, where a large checkpoint has thousands of files and folders.

    Raises:
        OSError: the drive failed.
    """
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(directory):
            raise OSError(ctypes.get_errno(), "syncfs", str(folder))
    finally:
        os.close(directory)


def discard(path: Path) -> None:
    """Remove a file or folder; of a link the link alone. Nothing there is fine.

    Raises:
        OSError: the drive does not let go of it.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def switch(first: Path, second: Path) -> bool:
    """Let two names change places, in one step; False where the file system cannot.

    Raises:
        OSError: one of them is not there, or the drive failed.
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
    """Name what is whole; returns where what had the name lies now, whole too."""
    if not (replaces and os.path.lexists(target)):
        partial.rename(target)
        return None
    if switch(partial, target):
        return partial

    replaced = target.with_name(f".{target.name}{REPLACED}")
    discard(replaced)
    target.rename(replaced)
    try:
        partial.rename(target)
    except BaseException:
        replaced.rename(target)
        raise

    return replaced
