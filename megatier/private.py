"""Private directories of a run: locked, and closed to other users, even on a mount that others may write to.

Bytes in a run's directory become weights, and a run must not write to a file that another user chose. So the directory
is used only if it belongs to this user and no other user may enter it. It stays open, and its files are opened relative
to its descriptor, because its name may lead elsewhere a moment later. For the same reason a file is checked after it
was opened, and never before.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from megatier.errors import ConfigError, RunLockedError

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
FILE_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""These flags follow no link and wait for no pipe."""
OTHERS = stat.S_IRWXG | stat.S_IRWXO
"""The modes that let other users in."""
LOCK_FILE = "lock"
NO_FILE = "it is no regular file"
IN_ITS_PLACE = (errno.EEXIST, errno.ENOTDIR, errno.ELOOP)
"""The errors of making or opening a directory if something else lies in its place."""


class PrivateDirectory:
    """A run's locked directory on a mount. Its files are opened and removed by their names in it.

    Threads: any thread may call its methods until `close`.
    """

    def __init__(self, path: Path) -> None:
        """Create the directory if it is missing, open it and lock it.

        Raises:
            ConfigError: the mount is not writable, or other users may use the directory.
            RunLockedError: another process holds the lock.
        """
        self.path = path
        """The directory, for messages."""
        # The mount itself may be a link, but the run's directory must not, because a link could lead anywhere.
        self._folder, self._lock = _opened_and_locked(path, os.O_NOFOLLOW, _refuse_shared)

    def open(self, name: str, flags: int = 0) -> int:
        """Open a file in it for reading and writing, or with O_CREAT a new one. No other user may open that file.

        Raises:
            ConfigError: other users may open the file.
            OSError: it cannot be opened or created, or it is a link.
        """
        # A new file must not exist yet. O_CREAT by itself would open a file that another user has put there.
        if flags & os.O_CREAT:
            flags |= os.O_EXCL
        file = os.open(name, FILE_FLAGS | flags, 0o600, dir_fd=self._folder)
        try:
            # The open file is checked, because its name may be that of another file by now.
            _refuse_shared(self.path / name, file)
        except BaseException:
            os.close(file)
            raise
        return file

    def mark(self, name: str) -> None:
        """Make an empty file, unless it exists."""
        with contextlib.suppress(FileExistsError):
            file = self._create(name)
            os.close(file)

    def write(self, name: str, content: bytes) -> None:
        """Make or replace a small file with this content.

        Raises:
            OSError: the drive refused.
        """
        self.remove(name)
        file = self._create(name)
        with os.fdopen(file, "wb") as opened:
            opened.write(content)

    def _create(self, name: str) -> int:
        """Create a new file that only this user may open."""
        # O_EXCL refuses whatever exists, even a link.
        flags = FILE_FLAGS | os.O_CREAT | os.O_EXCL
        return os.open(name, flags, 0o600, dir_fd=self._folder)

    def remove(self, name: str) -> None:
        """Remove a file, or a link itself, if it exists.

        Raises:
            OSError: it could not be removed.
        """
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._folder)

    def holds(self, name: str) -> bool:
        """Return whether the name exists."""
        try:
            # A link counts too, wherever it leads.
            os.stat(name, dir_fd=self._folder, follow_symlinks=False)
        except OSError:
            return False
        return True

    def sync(self) -> None:
        """Wait until new and removed names in it are on the drive.

        Raises:
            OSError: the drive failed.
        """
        os.fsync(self._folder)

    def close(self, remove: Iterable[str] = ()) -> None:
        """Remove these files, and the directory if it is empty, and unlock.

        Files on a drive that is gone or read-only stay, and so do files of other users.
        """
        # Descriptors are closed last, so that the lock is held while files are removed.
        for name in remove:
            with contextlib.suppress(OSError):
                self.remove(name)

        # The directory stays if it has other files.
        with contextlib.suppress(OSError):
            self.path.rmdir()
        for file in (self._folder, self._lock):
            with contextlib.suppress(OSError):
                os.close(file)


def lock_directory(directory: Path) -> int:
    """Create or open a directory of the user's choice, and lock it. Return the descriptor of the lock.

    Other users may write to it.

    Raises:
        ConfigError: the parent is missing or may not be written, or the lock is no plain file.
        RunLockedError: another process holds the lock.
    """
    # The lock has a descriptor of its own, so that of the directory is not needed any more.
    folder, lock = _opened_and_locked(directory, 0, _refuse_special)
    os.close(folder)
    return lock


def make_private(directory: Path) -> None:
    """Create a directory for code, and its parents, unless it exists.

    Raises:
        ConfigError: it cannot be made, other users may open it, or all users may replace it.
    """
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        above = directory.parent.stat()

        # The link itself, and not its target.
        status = directory.lstat()
    except OSError as error:
        raise _unusable(directory, error) from error

    is_link = stat.S_ISLNK(status.st_mode)
    reason = "it is a link" if is_link else _shared_by(status)
    if reason:
        raise _refused(directory, reason)

    # A user who may write to the parent may replace the directory.
    if above.st_mode & stat.S_IWOTH:
        raise _refused(directory.parent, "all users may write in it")


def is_ours_alone(status: os.stat_result) -> bool:
    """Return whether a file or directory belongs to this user, who alone may open it, and has no other name."""
    return not _shared_by(status)


def _opened_and_locked(directory: Path, flags: int, check: Callable[[Path, int], None]) -> tuple[int, int]:
    """Open a directory, or make it, and lock it. Return the descriptors of directory and lock.

    Args:
        directory: a directory whose parent exists.
        flags: more flags for opening the directory.
        check: refuses an open directory or lock by ConfigError.
    """
    # If another run ends meanwhile and removes the directory or its lock, this begins again and makes the directory
    # itself. Each further round needs another run that ends at that moment, so this loop ends.
    while True:
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            folder = os.open(directory, FOLDER_FLAGS | flags)
        except OSError as error:
            raise _unusable(directory, error) from error

        try:
            check(directory, folder)
            lock = _locked(directory, folder, check)
            if lock is not None:
                return folder, lock
        except BaseException:
            os.close(folder)
            raise
        os.close(folder)


def _locked(directory: Path, folder: int, check: Callable[[Path, int], None]) -> int | None:
    """Take the lock in an open directory. Return None if its last holder has removed lock or directory."""
    path = directory / LOCK_FILE
    try:
        lock = os.open(LOCK_FILE, FILE_FLAGS | os.O_CREAT, 0o600, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = "it is a link" if error.errno == errno.ELOOP else os.strerror(error.errno or 0)
        raise _refused(path, reason) from error

    try:
        check(path, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunLockedError(
                f"{directory} is in use by another run. Wait for it to end or choose another directory."
            ) from error
        except OSError as error:
            # File systems without locks, such as some network drives, have other errors.
            raise _refused(path, f"it cannot be locked: {os.strerror(error.errno or 0)}") from error

        # The last holder removes file and directory before it unlocks. A lock on a removed file guards nothing, so the
        # names still have to be those of both.
        with contextlib.suppress(FileNotFoundError):
            named_lock = os.stat(LOCK_FILE, dir_fd=folder, follow_symlinks=False)
            has_lock = os.path.samestat(os.fstat(lock), named_lock)
            if has_lock and os.path.samestat(os.fstat(folder), directory.stat()):
                return lock
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _refuse_special(path: Path, file: int) -> None:
    """Raise unless it is a directory or a regular file."""
    mode = os.fstat(file).st_mode
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        raise _refused(path, NO_FILE)


def _refuse_shared(path: Path, file: int) -> None:
    """Raise unless it is a directory or a regular file that no other user may open."""
    reason = _shared_by(os.fstat(file))
    if reason:
        raise _refused(path, reason)


def _shared_by(status: os.stat_result) -> str:
    """Return why other users may open a directory or file; empty if they may not."""
    is_folder = stat.S_ISDIR(status.st_mode)
    if not (is_folder or stat.S_ISREG(status.st_mode)):
        return NO_FILE
    if status.st_uid != os.geteuid():
        return f"it belongs to another user (uid {status.st_uid})"
    if status.st_mode & OTHERS:
        return f"other users may open it (mode {stat.S_IMODE(status.st_mode):04o})"
    if not is_folder and status.st_nlink != 1:
        return "it has another name as well (a hard link)"
    return ""


def _unusable(directory: Path, error: OSError) -> ConfigError:
    """Return the error of a directory that cannot be made or opened, which names what is in the way."""
    is_taken = error.errno in IN_ITS_PLACE
    if is_taken and directory.is_symlink():
        return _refused(directory, "it is a link")
    if is_taken and directory.exists():
        return _refused(directory, "it is no directory")

    reason = os.strerror(error.errno or 0)
    return ConfigError(f"cannot use {directory.parent}: {reason}. Name a directory that exists and is yours.")


def _refused(path: Path, reason: str) -> ConfigError:
    """Return the error that refuses a directory or file, and says what to do."""
    return ConfigError(
        f"cannot use {path}: {reason}. A run uses only files that belong to its user alone. Look at it and remove it, "
        "or name another directory, on a file system that keeps owners and modes."
    )
