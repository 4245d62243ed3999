"""The locked directory of a run on each mount, and the mounts' budgets.

Files are in `<mount>/megatier-<run id>/`, under a lock, with modes 0700 and 0600. Only that directory is ever removed:
at the end of the process, unless a savepoint needs it, or by `leftovers` after the process was killed. A directory or
file that another user may have put there is refused (`private`).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from megatier.byte_counts import format_bytes
from megatier.config.values import MountBudget
from megatier.durable import free_bytes, total_bytes
from megatier.errors import ConfigError, TransferError
from megatier.hardware import mount_of
from megatier.private import FOLDER_FLAGS, LOCK_FILE, PrivateDirectory

BLOCK_FILE = "blocks"
KEPT_FILE = "savepoint"
"""A file of this name marks block files that outlive their process."""
RUN_NOTE_FILE = "note.json"
"""A file that says whose block files these are, for a process that finds them after this one was killed (`Note`)."""
NOTE_BYTES_MAX = 16 << 10
MOUNT_FILES = (KEPT_FILE, BLOCK_FILE, RUN_NOTE_FILE, LOCK_FILE)
"""All files of a run's directory on a mount, in the order in which they are removed. The mark goes first, so that it
never stands for block files that are gone. The lock goes last, because a process that removes files holds it."""

_OPEN: set[MountDirectories] = set()
"""The directories that are locked, also those of stores that nobody can reach any more."""


@atexit.register
def _close_all() -> None:
    """Remove the files of stores that nobody closed, when the process ends in the usual way."""
    for directories in list(_OPEN):
        directories.close(keeps=directories.is_marked)


# A forked child may end in the usual way too. It leaves the files to its parent.
os.register_at_fork(after_in_child=_OPEN.clear)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """The note in a directory on a mount about the process that made it."""

    owner: str
    """The run, or the directory in which the program ran, in words."""
    began: str
    """When the process locked the directory, in local time, such as "2026-11-25 01:16"."""

    @classmethod
    def of(cls, run: str) -> Self:
        """Return the note of this process.

        Args:
            run: the run directory; empty if there is none.
        """
        owner = f"the run {Path(run).absolute()}" if run else f"a program in {Path.cwd()}"
        return cls(owner=owner, began=time.strftime("%Y-%m-%d %H:%M"))

    @classmethod
    def read(cls, content: bytes) -> Self | None:
        """Return the note in a file; None if it has none, for example because the drive was full."""
        try:
            fields = json.loads(content)
        except (ValueError, RecursionError):
            return None

        # Notes are only for people, so one of another version is ignored.
        if not isinstance(fields, dict) or fields.keys() != {"owner", "began"}:
            return None
        return cls(owner=str(fields["owner"]), began=str(fields["began"]))

    def written(self) -> bytes:
        """Return the content of its file."""
        return json.dumps({"owner": self.owner, "began": self.began}).encode()


class MountDirectories:
    """The directories of one run, one on each mount, locked."""

    def __init__(self, mounts: Sequence[MountBudget], run_id: str, run: str = "") -> None:
        """Name the directories, without making them yet.

        Args:
            mounts: the mounts.
            run_id: the part of the names that identifies the run.
            run: the run directory, for `Note`; empty if there is none.
        """
        self._run = run
        self._names = [directory_of(mount.directory, run_id) for mount in mounts]
        self.paths = [directory / BLOCK_FILE for directory in self._names]
        """The block file on each mount, for messages. The files are reached from the open directories."""
        self._directories: list[PrivateDirectory] = []
        """The locked directories."""

    def lock(self, *, reuses: bool) -> None:
        """Make and lock the directories, and remove files of an earlier process of this run id.

        Args:
            reuses: whether to keep these files instead.

        Raises:
            ConfigError: other users may enter a directory.
            RunLockedError: another process uses a directory.
        """
        # Registered first, so that the end of the process removes directories that were made before an error.
        _OPEN.add(self)
        for path in self._names:
            # Listed as soon as it is locked, so that `close` unlocks it if the next one is refused.
            directory = PrivateDirectory(path)
            self._directories.append(directory)

            # The mark goes first, so that a partly removed directory does not count as a savepoint.
            if not reuses:
                for name in (KEPT_FILE, BLOCK_FILE):
                    with contextlib.suppress(OSError):  # a file that stays only takes room
                        directory.remove(name)

            # If the drive refuses the note, it will refuse the blocks too, with a better message.
            with contextlib.suppress(OSError):
                directory.write(RUN_NOTE_FILE, Note.of(self._run).written())

    def open(self, mount: int, flags: int) -> int:
        """Open the block file on a mount, and return its descriptor.

        Raises:
            OSError: the file system refused.
            ConfigError: other users may open the file.
        """
        return self._directories[mount].open(BLOCK_FILE, flags)

    def remove(self, mount: int) -> None:
        """Remove the block file on a mount, if it is there and may be removed."""
        with contextlib.suppress(OSError):
            self._directories[mount].remove(BLOCK_FILE)

    def keep(self, keeps: bool) -> None:
        """Mark the block files as kept, or remove the marks.

        Raises:
            TransferError: a drive failed, or refuses the mark.
        """
        for directory in self._directories:
            try:
                directory.mark(KEPT_FILE) if keeps else directory.remove(KEPT_FILE)
            except OSError as error:
                mark = directory.path / KEPT_FILE
                raise TransferError("marking", "nvme", str(mark), 0, error.errno or 0) from error

        # A new name is on the drive only when its directory is.
        synchronised = self._directories if keeps else []
        for directory in synchronised:
            try:
                directory.sync()
            except OSError as error:
                raise TransferError("synchronising", "nvme", str(directory.path), 0, error.errno or 0) from error

    @property
    def is_marked(self) -> bool:
        """Whether the block files are marked as kept."""
        return any(directory.holds(KEPT_FILE) for directory in self._directories)

    def sync(self, mount: int) -> None:
        """Wait until the names of a mount's files, and of the directory itself, are on the drive.

        Raises:
            OSError: the drive failed.
        """
        self._directories[mount].sync()
        _sync(self._names[mount].parent)

    def close(self, *, keeps: bool) -> None:
        """Remove the files, unless they are kept, and unlock. It is safe to call this twice.

        In a forked child it does nothing.
        """
        if self not in _OPEN:
            return
        _OPEN.discard(self)
        for directory in self._directories:
            # A directory that was locked before an error has no block file, and nothing to keep.
            directory.close(() if keeps and directory.holds(BLOCK_FILE) else MOUNT_FILES)
        self._directories = []


def directory_of(mount: Path, run_id: str) -> Path:
    """Return the directory that a run, or one of its ranks, has on a mount."""
    return mount / f"megatier-{run_id}"


def rank_id(run_id: str, rank: int) -> str:
    """Return the name of the directories of one of several ranks."""
    return f"{run_id}-{rank}"


def _sync(directory: Path) -> None:
    """Wait until the names in a directory are on the drive."""
    file = os.open(directory, FOLDER_FLAGS)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def check_directory(directory: Path, setting: str = "tiers.nvme") -> None:
    """Refuse a directory that cannot be a mount. Bytes in a file system in RAM are RAM that no budget counts.

    Raises:
        ConfigError: it is not a directory, or its files lie in RAM; the message begins with `setting`.
    """
    if not directory.is_dir():
        raise ConfigError(f"{setting}: {directory} is not a directory. Create it, or name a mount that exists.")
    if (mount := mount_of(directory)).is_memory:
        raise ConfigError(
            f"{setting}: files in {directory} lie in RAM ({mount.file_system} on {mount.directory}), outside tiers.ram."
            " Name a directory on a drive, or raise tiers.ram and leave this one out."
        )


def budget_bytes(mount: MountBudget, left_bytes: int = 0) -> int:
    """Return a mount's budget: nine tenths of the free space there if none was given.

    Args:
        mount: the mount.
        left_bytes: bytes that are not free yet, and will be once the run has locked its directories.

    Raises:
        ConfigError: it is no directory on a drive, the drive is smaller than the budget, or it is full.
        TransferError: the drive does not say what it has.
    """
    check_directory(mount.directory)

    # A budget may be more than is free now: other files may go before it is used. More than the whole drive it cannot
    # be.
    if mount.num_bytes is not None:
        if mount.num_bytes > (total := total_bytes(mount.directory)):
            raise ConfigError(
                f"tiers.nvme gives {mount.directory} {format_bytes(mount.num_bytes)}, but its drive has "
                f"{format_bytes(total)} in all. Lower the budget, or leave it out for what is free."
            )
        return mount.num_bytes
    if not (budget := (free_bytes(mount.directory) + left_bytes) * 9 // 10):
        raise ConfigError(f"tiers.nvme: {mount.directory} is full. Free space on it, or name another drive.")
    return budget
