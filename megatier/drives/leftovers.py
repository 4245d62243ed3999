"""Leftovers: directories of killed runs on mounts. They are found and, if asked for, removed.

A run removes its block files when it ends, by an error or a signal too. A process that the system kills cannot do so,
and files that a savepoint needs stay; the lock goes with the process in any case. Whether a directory is left over is
decided under that lock, and it is removed before the lock is let go. Files are reached from the open directory, so that
nothing put in its place meanwhile is touched. A run that takes the lock at this very moment begins anew or is refused
(`RunLockedError`); it has no bytes yet.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatier.drives.mounts import FILES, KEPT_FILE
from megatier.errors import ConfigError, TransferError
from megatier.private import FOLDER_FLAGS, LOCK_FILE, is_ours_alone

NAME = re.compile(r"megatier-(bench-)?[0-9a-f]{12}")
"""Directories of run ids that nobody chose. Whoever names a store has its directory again by opening it under that
name."""
LOCK_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Some file systems lock only a file that is open for writing too. The lock is never created here."""
REASONS = {
    errno.ENOTDIR: "it is no directory",
    errno.ENOENT: "it has no lock",
    errno.ELOOP: "its lock is a link",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A directory with the name of a run's.

    Attributes:
        path: the directory.
        num_bytes: bytes that it takes on the drive.
        age_s: seconds since something in it was written.
        has_savepoint: whether a run could go on from it.
        stays: why it is not to be removed; empty if nothing is against it.
    """

    path: Path
    num_bytes: int = 0
    age_s: float = 0.0
    has_savepoint: bool = False
    stays: str = ""


def find_leftovers(mount: Path, *, remove: bool = False) -> Iterator[Leftover]:
    """Find directories on a mount that have the name of a run's, one after the other.

    Args:
        mount: a directory as in `tiers.nvme`.
        remove: also remove those that no process uses and that hold nothing but a run's files.

    Raises:
        ConfigError: the mount cannot be read.
        TransferError: a drive does not let go of a file.
    """
    try:
        paths = sorted(path for path in mount.iterdir() if NAME.fullmatch(path.name))
    except OSError as error:
        raise ConfigError(f"cannot read {mount}: {error.strerror}. Name a directory, as in tiers.nvme.") from error

    for path in paths:
        yield _examined(path, remove)


def is_abandoned(directory: Path) -> bool:
    """True if a process that held the lock in a directory is gone and has not removed it."""
    with contextlib.suppress(OSError), _opened(directory) as folder, _locked(folder) as is_free:
        return is_free
    return False


def _examined(path: Path, remove: bool) -> Leftover:
    """Look at one directory, as far as one may, and remove it if that is asked for and allowed."""
    try:
        with _opened(path) as folder:
            # Of the directory that is open: its name may lead elsewhere a moment later.
            if os.fstat(folder).st_uid != os.geteuid():
                return Leftover(path=path, stays="it is another user's")
            if not is_ours_alone(os.fstat(folder)):
                return Leftover(path=path, stays="other users may open it")
            with _locked(folder) as is_free:
                if not is_free:
                    return Leftover(path=path, stays="a run uses it")
                return _examined_under_lock(path, folder, remove)
    except TransferError:
        raise
    except OSError as error:
        return Leftover(path=path, stays=REASONS.get(error.errno or 0, str(error.strerror)))


def _examined_under_lock(path: Path, folder: int, remove: bool) -> Leftover:
    with os.scandir(folder) as entries:
        files = {entry.name: entry.stat(follow_symlinks=False) for entry in entries}
    if foreign := sorted(name for name, status in files.items() if not _is_a_runs(name, status)):
        return Leftover(path=path, stays=f"no run made {foreign[0]!r} in it")

    if remove:
        _remove(path, folder)
    age = time.time() - max(status.st_mtime for status in files.values())
    num_bytes = sum(status.st_blocks for status in files.values()) * 512
    return Leftover(path=path, num_bytes=num_bytes, age_s=max(0.0, age), has_savepoint=KEPT_FILE in files)


def _is_a_runs(name: str, status: os.stat_result) -> bool:
    return name in FILES and stat.S_ISREG(status.st_mode) and is_ours_alone(status)


def _remove(path: Path, folder: int) -> None:
    """Remove the files, the lock last, and the directory."""
    # The lock goes last: if this breaks off before, the directory is found again, and one without a lock is left alone.
    try:
        for name in FILES:
            with contextlib.suppress(FileNotFoundError):  # a run killed before it made its block file
                os.unlink(name, dir_fd=folder)
        path.rmdir()
    except OSError as error:
        raise TransferError("removing", "nvme", str(path), 0, error.errno or 0) from error


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a directory that is no link."""
    folder = os.open(path, FOLDER_FLAGS | os.O_NOFOLLOW)
    try:
        yield folder
    finally:
        os.close(folder)


@contextlib.contextmanager
def _locked(folder: int) -> Iterator[bool]:
    """Try to take the lock in an open directory; False if somebody holds it."""
    lock = os.open(LOCK_FILE, LOCK_FLAGS, dir_fd=folder)
    try:
        # The last holder may have removed the file between the two calls: a lock on a file that is gone guards nothing.
        yield _take(lock) and os.path.samestat(os.fstat(lock), os.stat(LOCK_FILE, dir_fd=folder, follow_symlinks=False))
    finally:
        os.close(lock)


def _take(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
