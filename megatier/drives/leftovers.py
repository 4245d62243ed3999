"""Leftovers: directories of killed runs on mounts, which `megatier clean` finds and removes.

A run removes its block files when it ends, even by an error or a signal. A killed process cannot do so, and files that
a savepoint needs stay. In each case the lock on the directory ends with the process.

So a directory with a free lock is left over. This process inspects and removes it while it holds the lock. It reaches
the files through the open directory, so that it touches nothing that was put in its place. A run that wants the lock at
that moment makes a new directory or is refused (`RunLockedError`), and loses no bytes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatier.drives.mounts import KEPT_FILE, MOUNT_FILES, NOTE_BYTES_MAX, RUN_NOTE_FILE, Note, directory_of
from megatier.errors import ConfigError, TransferError
from megatier.private import FOLDER_FLAGS, LOCK_FILE, is_ours_alone

NAME = re.compile(r"megatier-(bench-)?[0-9a-f]{12}(-\d{1,6})?")
"""The names of directories whose run id is random, with the number of a rank if there are several. A directory under a
name that somebody chose is never left over: opening a store of that name takes it again."""
LOCK_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""The lock is opened for writing too, because some file systems lock no other file. It is never created here."""
NOTE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
LEFTOVER_REASONS = {
    errno.ENOTDIR: "it is no directory",
    errno.ENOENT: "it has no lock",
    errno.ELOOP: "its lock is a link",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A directory that has the name of a run's directory."""

    path: Path
    """The directory."""
    num_bytes: int = 0
    """The bytes that it takes on the drive."""
    age_s: float = 0.0
    """The seconds since something in it was written."""
    note: Note | None = None
    """Whose it is; None if an older version made it, or if it holds no note that can be read."""
    has_savepoint: bool = False
    """Whether a run could go on from it."""
    stays: str = ""
    """The reason why it must not be removed. It is empty if there is none."""


def find_leftovers(mount: Path, *, remove: bool = False, run_id: str = "") -> Iterator[Leftover]:
    """Yield the directories on a mount that have the name of a run's directory.

    Args:
        mount: a directory as in `tiers.nvme`.
        run_id: of which run; of any if it is empty.
        remove: whether to remove those that no process uses and that hold nothing but a run's files.

    Raises:
        ConfigError: the mount cannot be read.
        TransferError: a file could not be removed.
    """
    try:
        paths = [path for path in mount.iterdir() if NAME.fullmatch(path.name)]
    except OSError as error:
        raise ConfigError(f"cannot read {mount}: {error.strerror}. Name a directory, as in tiers.nvme.") from error

    for path in sorted(paths):
        # A whole part of the name: an id may begin as another one does.
        if not run_id or run_id in path.name.split("-"):
            yield _examine(path, remove)


def left_bytes(mount: Path, run_ids: Iterable[str]) -> int:
    """Return the bytes that come free on a mount when a run locks its directories there: those that a kill has left.

    Files that a process uses, or that a savepoint needs, do not count.

    Args:
        mount: a directory as in `tiers.nvme`.
        run_ids: names the directories, of which each rank has its own.
    """
    leftovers = [_examine(directory_of(mount, run_id), remove=False) for run_id in run_ids]
    return sum(left.num_bytes for left in leftovers if not left.stays and not left.has_savepoint)


def is_abandoned(directory: Path) -> bool:
    """Return whether a process that held the lock in a directory is gone and has not removed it."""
    with contextlib.suppress(OSError), _opening(directory) as folder, _locking(folder) as is_free:
        return is_free
    return False


def _examine(path: Path, remove: bool) -> Leftover:
    """Look at one directory, as far as this user may, and remove it if that is asked for and allowed."""
    try:
        with _opening(path) as folder:
            # The open directory is asked, and not the one of that name, which may be another one a moment later.
            if os.fstat(folder).st_uid != os.geteuid():
                return Leftover(path=path, stays="it is another user's")
            if not is_ours_alone(os.fstat(folder)):
                return Leftover(path=path, stays="other users may open it")
            with _locking(folder, shares=not remove) as is_free:
                if not is_free:
                    return Leftover(path=path, stays="a run uses it")
                return _examined_under_lock(path, folder, remove)
    except TransferError:
        raise
    except OSError as error:
        return Leftover(path=path, stays=LEFTOVER_REASONS.get(error.errno or 0, str(error.strerror)))


def _examined_under_lock(path: Path, folder: int, remove: bool) -> Leftover:
    with os.scandir(folder) as entries:
        files = {entry.name: entry.stat(follow_symlinks=False) for entry in entries}

    foreign = [name for name, status in files.items() if not _is_a_runs(name, status)]
    if foreign:
        first = min(foreign)
        return Leftover(path=path, stays=f"no run made {first!r} in it")

    # Read before the files go.
    note = _note(folder) if RUN_NOTE_FILE in files else None
    if remove:
        _remove(path, folder)

    # `st_blocks` counts units of 512 bytes on every file system.
    num_blocks = sum(status.st_blocks for status in files.values())
    last_write = max(status.st_mtime for status in files.values())
    return Leftover(
        path=path,
        num_bytes=512 * num_blocks,
        # The clock may have been set back since.
        age_s=max(0.0, time.time() - last_write),
        note=note,
        has_savepoint=KEPT_FILE in files,
    )


def _note(folder: int) -> Note | None:
    file = os.open(RUN_NOTE_FILE, NOTE_FLAGS, dir_fd=folder)
    with os.fdopen(file, "rb") as opened:
        content = opened.read(NOTE_BYTES_MAX)
    return Note.read(content)


def _is_a_runs(name: str, status: os.stat_result) -> bool:
    return name in MOUNT_FILES and stat.S_ISREG(status.st_mode) and is_ours_alone(status)


def _remove(path: Path, folder: int) -> None:
    """Remove the files and the directory."""
    # The lock goes last. If this breaks off before that, the directory is found again the next time; a directory
    # without a lock would be left alone for ever.
    try:
        for name in MOUNT_FILES:
            with contextlib.suppress(FileNotFoundError):  # the run may have been killed before it made this file
                os.unlink(name, dir_fd=folder)
        path.rmdir()
    except OSError as error:
        raise TransferError("removing", "nvme", str(path), 0, error.errno or 0) from error


@contextlib.contextmanager
def _opening(path: Path) -> Iterator[int]:
    """Open a directory. A link to one is refused."""
    folder = os.open(path, FOLDER_FLAGS | os.O_NOFOLLOW)
    try:
        yield folder
    finally:
        os.close(folder)


@contextlib.contextmanager
def _locking(folder: int, *, shares: bool = False) -> Iterator[bool]:
    """Try to take the lock in an open directory. Yield whether it was free.

    Args:
        folder: the directory.
        shares: let others have a look at the same time, as the ranks of a host do.
    """
    lock = os.open(LOCK_FILE, LOCK_FLAGS, dir_fd=folder)
    try:
        is_free = _take(lock, fcntl.LOCK_SH if shares else fcntl.LOCK_EX)
        if is_free:
            # The last holder may have removed the file between the two calls. A lock on a file that is gone guards
            # nothing, so the open file must still be the one of that name.
            named = os.stat(LOCK_FILE, dir_fd=folder, follow_symlinks=False)
            is_free = os.path.samestat(os.fstat(lock), named)
        yield is_free
    finally:
        os.close(lock)


def _take(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
