"""Block files: the NVMe tier. One preallocated, pre-filled file per mount, read and written with O_DIRECT.

Where it stands: hop 1 (NVMe extent -> RAM slot) and hop 6 (RAM slot -> NVMe extent) of a byte's journey.

What it is made of: `extent` says where the bytes of a block lie, `mounts` has the locked directories, `io_engine` reads
and writes. Here they meet: files are opened, filled, asked for spans of blocks, and failures become typed errors.

Files are filled once at the start: the first write into a fresh extent is half as fast as an overwrite, and a full disk
shows before training, not during it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatier.config.values import MountBudget
from megatier.drives.extent import Extent, Striping
from megatier.drives.io_engine import REQUEST_BYTES, IoBatch, IoEngine, NativeEngine
from megatier.drives.mounts import MountDirectories, budget_bytes, check_directory, free_bytes
from megatier.errors import CapacityError, IntegrityError, TransferError
from megatier.tier import PAGE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class IoOptions:
    """How block files are accessed.

    Attributes:
        num_threads: requests that the engine works on at once, per direction.
        engine: makes the engine that reads and writes, for so many threads.
        direct: try O_DIRECT; a file system that refuses it gets buffered access, which `BlockFiles.is_direct` reports.
        checksums: verify every chunk that is read.
        gpu_direct: read into GPU memory with kvikio (`gds`), past RAM.
        chunk_bytes: bytes under one checksum, a power of two from 4,096; spans of a block start on chunk boundaries.
        shares: the part that each mount takes, in any unit, such as its measured rate. Empty: by their budgets.
        reuses: take the files that a process of the same run id kept, and the bytes in them. Before anything is read,
            the checksums that belong to these are put back (`TieredStore.extents`).
    """

    num_threads: int = 4
    engine: Callable[[int], IoEngine] = NativeEngine
    direct: bool = True
    checksums: bool = True
    gpu_direct: bool = False
    chunk_bytes: int = 64 << 10
    shares: tuple[float, ...] = ()
    reuses: bool = False


class FileBatch:
    """A batch of the engine whose failure becomes a typed error."""

    def __init__(self, batch: IoBatch, what: str, key: str, paths: Sequence[Path]) -> None:
        """Take a batch that runs; `paths` name the file of each of its segments."""
        self._batch = batch
        self._what = what
        self._key = key
        self._paths = paths

    def wait(self) -> None:
        """Block, GIL free; raise TransferError or IntegrityError when a request failed."""
        self._batch.wait()
        if (error := self._batch.error()) is None:
            return

        kind, code, segment, offset, expected, found = error
        path = str(self._paths[segment])
        if kind == "checksum":
            raise IntegrityError(self._key, path, offset, expected, found)
        raise TransferError(f"{self._what} of block {self._key}", "nvme", path, offset, code if kind == "io" else 0)

    def done(self) -> bool:
        """True if every request has ended."""
        return self._batch.done()

    def span_ns(self) -> tuple[int, int]:
        """Start of the first request and end of the last one, in time.perf_counter_ns."""
        return self._batch.span_ns()


class BlockFiles:
    """All blocks of one store on NVMe.

    Threads: reserve, allocate and fill from one thread; read and write from any, after that.

    Attributes:
        options: how files are accessed.
        is_direct: whether access is O_DIRECT, known once allocated.
        paths: the file on each mount, there once allocated; for messages, since files are reached by descriptors.
    """

    def __init__(self, mounts: Sequence[MountBudget], run_id: str, options: IoOptions) -> None:
        """Create and lock a directory per mount. Nothing large is allocated yet.

        Raises:
            ConfigError: a mount does not exist, lies in RAM, or may not be written; or the run's directory there is
                not this user's alone.
            RunLockedError: the run's directory is in use.
        """
        self.options = options
        self.is_direct = options.direct
        self._is_kept = options.reuses
        self._mounts = tuple(mounts)
        for mount in mounts:
            check_directory(mount.directory)

        self._directories = MountDirectories(mounts, run_id)
        self.paths = self._directories.paths
        self._files: list[int] = []
        """An open descriptor per mount."""
        self._engine = options.engine(options.num_threads)

        # Threads, locks and files are given back by `close` alone, and whoever gets an error here has nothing to close.
        try:
            self._directories.lock(reuses=options.reuses)
            self._striping = Striping([budget_bytes(mount) for mount in mounts], options.shares, options.chunk_bytes)
        except BaseException:
            self.close()
            raise

    def set_threads(self, num_threads: int) -> None:
        """Go on with an engine of so many threads each way. Nothing is in flight."""
        self._engine.close()
        self._engine = self.options.engine(num_threads)

    @property
    def used_bytes(self) -> int:
        """Bytes that are reserved on all mounts together."""
        return sum(self._striping.used)

    @property
    def capacity_bytes(self) -> int:
        """The sum of the mounts' budgets."""
        return self._striping.capacity_bytes

    def reserve(self, num_bytes: int) -> Extent:
        """Give a block its place, striped over the mounts; it will hold zeros.

        Raises:
            CapacityError: the mounts' budgets are used up.
        """
        return self._striping.reserve(num_bytes)

    def allocate(self) -> None:
        """Create the files at full size, quickly; `fill` writes them. Or open those that were kept.

        Raises:
            CapacityError: a disk has less room than was reserved on it.
            TransferError: the device or the file system failed, or a file that was kept is missing.
            ConfigError: a file that was kept is not this user's alone.
        """
        for index, path in enumerate(self.paths):
            size = self._striping.used[index]
            if self.options.reuses:
                self._files.append(self._open(index))
                continue

            remedy = f"Give {self._mounts[index].directory} a smaller size in tiers.nvme or free space on it."
            if size > (free := free_bytes(path.parent)):  # else the attempt would fill the disk for a moment
                raise CapacityError("nvme", size, free, remedy)

            self._files.append(self._open(index))
            try:
                if size:
                    os.posix_fallocate(self._files[index], 0, size)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                    raise TransferError("preallocating", "nvme", str(path), 0, error.errno or 0) from error
                if error.errno == errno.EFBIG:
                    remedy = f"Raise the limit on the size of a file (ulimit -f); it stops {path}."
                raise CapacityError("nvme", size, free_bytes(path.parent), remedy) from error

    def fill(self) -> None:
        """Write zeros over everything that is new: the first write into a fresh extent is half as fast.

        Raises:
            TransferError: the device failed.
        """
        if self.options.reuses:
            return
        zeros = np.zeros(REQUEST_BYTES + PAGE_BYTES, dtype=np.uint8)
        address = zeros.ctypes.data + -zeros.ctypes.data % PAGE_BYTES
        batches = []

        # All mounts at once; the bounded queue of the native threads holds this loop back.
        for index, path in enumerate(self.paths):
            for offset in range(0, self._striping.used[index], REQUEST_BYTES):
                segment = (self._files[index], offset, address, min(REQUEST_BYTES, self._striping.used[index] - offset))
                batch = self._engine.submit([segment], 0, self.options.chunk_bytes, writes=True)
                batches.append(FileBatch(batch, "write", "(zeros)", [path]))

        try:
            for file_batch in batches:
                file_batch.wait()
        except BaseException:
            self._engine.close()  # no request may outlive the zeros
            raise

    def _open(self, mount: int) -> int:
        """Open a mount's block file; without O_DIRECT from the first file system on that refuses it."""
        flags = 0 if self.options.reuses else os.O_CREAT
        try:
            return self._directories.open(mount, flags | (os.O_DIRECT if self.is_direct else 0))
        except OSError as error:
            if not self.is_direct or error.errno != errno.EINVAL:
                raise TransferError("opening", "nvme", str(self.paths[mount]), 0, error.errno or 0) from error

        self.is_direct = False
        if not self.options.reuses:
            self._directories.remove(mount)  # the refused attempt may have made it
        return self._open(mount)

    def opened(self, mount: int) -> Path:
        """A path to the file that is open, whatever has its name now, for libraries that take no descriptor."""
        return Path(f"/proc/self/fd/{self._files[mount]}")

    # HOP 1/6: NVMe extent -> RAM slot
    def read(self, key: str, extent: Extent, start: int, stop: int, address: int) -> FileBatch:
        """Start reading bytes [start, stop) of a block into page-aligned memory; every chunk is verified."""
        return self._move(key, extent, (start, stop), address, writes=False)

    # HOP 6/6: RAM slot -> NVMe extent
    def write(self, key: str, extent: Extent, start: int, stop: int, address: int) -> FileBatch:
        """Start writing page-aligned memory to bytes [start, stop) of a block; every chunk's checksum is stored."""
        return self._move(key, extent, (start, stop), address, writes=True)

    def _move(self, key: str, extent: Extent, span: tuple[int, int], address: int, *, writes: bool) -> FileBatch:
        """Hand the pieces of a span to the engine."""
        start, stop = span
        chunk = self.options.chunk_bytes
        assert start % chunk == 0, "a span starts on a chunk boundary"
        assert stop % chunk == 0 or stop == extent.num_bytes, "a span ends on a chunk boundary or with its block"

        pieces = list(extent.pieces(start, stop))
        segments = [(self._files[p.mount], p.file_offset, address + p.start, p.num_bytes) for p in pieces]
        paths = [self.paths[piece.mount] for piece in pieces]
        table = extent.checksums.ctypes.data + 4 * (start // chunk) if self.options.checksums else 0
        batch = self._engine.submit(segments, table, chunk, writes=writes)
        return FileBatch(batch, "write" if writes else "read", key, paths)

    def keep(self, keeps: bool) -> None:
        """Decide whether the files outlive this process, as they are when it ends; a mark next to them says so.

        Raises:
            TransferError: a drive failed, or refuses the mark.
        """
        self._is_kept = keeps
        if keeps:
            self.sync()  # all of it, on all mounts, before a mark says that it is kept
        self._directories.keep(keeps)

    def sync(self) -> None:
        """Wait until everything written is on the drives, through a loss of power too.

        Raises:
            TransferError: a drive failed.
        """
        for mount, (file, path) in enumerate(zip(self._files, self.paths, strict=True)):
            try:
                os.fsync(file)
                self._directories.sync(mount)
            except OSError as error:
                raise TransferError("synchronising", "nvme", str(path), 0, error.errno or 0) from error

    def close(self) -> None:
        """Finish what runs, close and remove the files of this run unless they are kept, unlock. Safe to call twice.

        Files on a drive that is gone or read-only stay: whoever closes knows of it by a failed transfer.
        """
        self._engine.close()  # before the descriptors, whose numbers another file may get at once
        for file in self._files:
            with contextlib.suppress(OSError):
                os.close(file)
        self._directories.close(keeps=self._is_kept)
        self._files = []  # else a second call would close descriptors of somebody else
