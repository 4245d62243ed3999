"""The files of a frozen base: the user's own files of weights, from which blocks read their frozen bytes in place.

`BlockFiles` opens them, for reading only. Because a tensor may begin at any byte of such a file, the engine reads the
whole pages around it and copies the part (`IoEngine.gather`). Granules are verified like those of block files.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatier.drives.extent import FilePart
from megatier.drives.io_engine import Segment
from megatier.errors import BaseChangedError, FileChangedError, TransferError
from megatier.files import FileVersion


class BaseFiles:
    """The open files of one base.

    Threads: `open` and `close` are called from one thread. In between any thread may call the others.
    """

    def __init__(self, *, direct: bool) -> None:
        """Open nothing yet.

        Args:
            direct: whether to try O_DIRECT. A file system that refuses it is read through its cache.
        """
        self._direct = direct
        self._files: dict[Path, int] = {}
        """An open descriptor for each file."""
        self._versions: dict[Path, FileVersion] = {}
        """What each file was when it was opened."""

    def open(self, parts: Iterable[FilePart]) -> None:
        """Open the files in which parts lie. Those that are open stay so.

        Raises:
            TransferError: a file cannot be opened.
            FileChangedError: it is another one than that in which the parts were found, or was written since.
        """
        versions = {part.path: part.version for part in parts}
        for path, version in versions.items():
            if path not in self._files:
                # Noted as it is when it is opened, so that a later write is seen.
                file = self._open_file(path)
                self._files[path] = file
                self._versions[path] = FileVersion.of(file)

            opened = self._versions[path]

            # Between a look at the file and this opening it may have been written, and its tensors may lie elsewhere
            # now.
            if version is not None and version != opened:
                raise FileChangedError(str(path))

    def segments(
        self, parts: Iterable[FilePart], start: int, stop: int, address: int
    ) -> tuple[list[Segment], list[Path]]:
        """Return where bytes [start, stop) of a block lie, whose first byte goes to `address`, and the file of each."""
        segments: list[Segment] = []
        paths: list[Path] = []
        for part in parts:
            first = max(start, part.start)
            last = min(stop, part.start + part.num_bytes)
            if first >= last:
                continue

            # Reads go by descriptors, so a file that is renamed or removed while the run goes on is still read.
            file = self._files[part.path]
            offset = part.file_offset + first - part.start
            target = address + first - start
            segments.append((file, offset, target, last - first))
            paths.append(part.path)
        return segments, paths

    def check(self, paths: Sequence[Path]) -> None:
        """Refuse files of the base that were written since they were opened.

        Raises:
            BaseChangedError: names the first one.
        """
        for path in paths:
            # A block may lie in files of the base and in our own, which nobody else writes.
            if path not in self._files:
                continue
            before = self._versions[path]
            now = FileVersion.of(self._files[path])
            if before != now:
                raise BaseChangedError(str(path), before.num_bytes, now.num_bytes)

    def close(self) -> None:
        """Close the files. It is safe to call this twice."""
        for file in self._files.values():
            with contextlib.suppress(OSError):
                os.close(file)
        # Forgotten, so that a second call closes no descriptor that somebody else has got meanwhile.
        self._files = {}

    def _open_file(self, path: Path) -> int:
        """Open a file, without O_DIRECT where its file system refuses that."""
        flags = os.O_RDONLY | os.O_CLOEXEC
        direct = os.O_DIRECT if self._direct else 0
        try:
            return os.open(path, flags | direct)
        except OSError as error:
            # EINVAL is how a file system refuses O_DIRECT. All else is an error of the file.
            if not direct or error.errno != errno.EINVAL:
                raise TransferError("opening", "nvme", str(path), 0, error.errno or 0) from error
        return os.open(path, flags)
