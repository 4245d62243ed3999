"""The block files of a run: one file on each mount, allocated and filled before use. Together they are the NVMe tier.

This file has hop 1 (NVMe extent -> RAM slot) and hop 6 (RAM slot -> NVMe extent) of a byte's journey. It uses
three others: `extent` says where the bytes of a block lie, `mounts` has the locked directories, and `io_engine` reads
and writes. This file opens and fills the files, moves spans of blocks, and turns failures into typed errors.

Files are filled with zeros at the start, for two reasons. The first write into a new extent of a file system is half as
fast as an overwrite, and a drive that is too full is found before training.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatier import _native
from megatier.config.values import MountBudget
from megatier.drives.base_files import BaseFiles
from megatier.drives.extent import Extent, FilePart, Striping
from megatier.drives.io_engine import QUEUE_DEPTH_MAX, REQUEST_BYTES, IoBatch, IoEngine, NativeEngine
from megatier.drives.mounts import MountDirectories, budget_bytes, check_directory
from megatier.durable import free_bytes
from megatier.errors import CapacityError, IntegrityError, TransferError
from megatier.tier import PAGE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class IoOptions:
    """The options of access to block files."""

    num_threads: int = 4
    """The number of requests that the engine works on at once, in each direction."""
    engine: Callable[[int], IoEngine] = NativeEngine
    """Makes the engine that reads and writes, for so many threads."""
    direct: bool = True
    """Whether to try O_DIRECT. If a file system refuses it, access is buffered, and `BlockFiles.is_direct` says so."""
    checksums: bool = True
    """Whether to verify every granule that is read."""
    gpu_direct: bool = False
    """Whether to read into GPU memory past RAM, with kvikio (`gds`)."""
    granule_bytes: int = 64 << 10
    """The bytes under one checksum: a power of two, at least 4,096. Spans of a block start where granules do."""
    shares: tuple[float, ...] = ()
    """The part of the bytes that each mount takes, in any unit, such as its measured rate. If empty, budgets decide."""
    reuses: bool = False
    """Whether to take the files that a process of the same run id kept, with the bytes in them. The caller puts
    their checksums back before anything is read (`TieredStore.extents`)."""
    run: str = ""
    """The run directory, which a note beside the files names. Empty: there is none."""


class FileBatch:
    """Batches of the engine, whose failure becomes a typed error."""

    def __init__(
        self, batches: Sequence[tuple[IoBatch, Sequence[Path]]], what: str, key: str, base: BaseFiles | None = None
    ) -> None:
        """Take batches that run.

        Args:
            batches: each with the file of each of its segments.
            what: "read" or "write", for messages.
            key: the block that is moved.
            base: files of the base, some of which may be read.
        """
        self._batches = batches
        self._what = what
        self._key = key
        self._base = base

    def wait(self) -> None:
        """Block, with the GIL free, until all batches have ended; raise the error of one that failed.

        Raises:
            TransferError, IntegrityError: a device failed, or a granule is damaged.
            BaseChangedError: such a granule is one of a file of the base that was written.
        """
        # All of them end first, since a batch goes on to touch the memory if another one has failed.
        for batch, _ in self._batches:
            batch.wait()

        for batch, paths in self._batches:
            error = batch.error()
            if error is not None:
                self._fail(error, paths)

    def _fail(self, error: tuple[str, int, int, int, int, int], paths: Sequence[Path]) -> None:
        kind, code, segment, offset, expected, found = error
        path = paths[segment]

        # A file that somebody wrote meanwhile explains any of the errors, so that is looked at first.
        if self._base is not None:
            self._base.check([path])
        if kind == "checksum":
            raise IntegrityError(self._key, str(path), offset, expected, found)

        # A file that ends too early is no error of the system, so there is no errno.
        what = f"{self._what} of block {self._key}"
        raise TransferError(what, "nvme", str(path), offset, code if kind == "io" else 0)

    def done(self) -> bool:
        """Return whether every request has ended."""
        return all(batch.done() for batch, _ in self._batches)

    def span_ns(self) -> tuple[int, int]:
        """Return the start of the first request and the end of the last one, in time.perf_counter_ns."""
        starts, stops = zip(*(batch.span_ns() for batch, _ in self._batches), strict=True)
        return min(starts), max(stops)


class BlockFiles:
    """All blocks of one store on NVMe.

    Threads: `reserve`, `allocate` and `fill` are called from one thread. After that, any thread may read and write.
    """

    def __init__(self, mounts: Sequence[MountBudget], run_id: str, options: IoOptions) -> None:
        """Create and lock a directory on each mount. Nothing large is allocated yet.

        Raises:
            ConfigError: a mount does not exist, lies in RAM, or may not be written; or other users may enter the run's
                directory there.
            RunLockedError: another process uses the run's directory.
        """
        self.options = options
        """How files are accessed."""
        self.is_direct = options.direct
        """Whether access is by O_DIRECT, which is known once the files are allocated."""
        self._is_kept = options.reuses
        self._mounts = tuple(mounts)
        # Before any directory is made: a mount that is refused leaves nothing on the others.
        for mount in mounts:
            check_directory(mount.directory)

        self._directories = MountDirectories(mounts, run_id, options.run)
        self.paths = self._directories.paths
        """The file on each mount, for messages. It is there once it is allocated."""
        self._files: list[int] = []
        """An open descriptor for each mount."""
        self._engine = options.engine(options.num_threads)
        self._base = BaseFiles(direct=options.direct)

        # A caller that gets an error here has nothing to close, and `close` alone gives threads, locks and files back.
        try:
            self._directories.lock(reuses=options.reuses)
            self._striping = Striping([budget_bytes(mount) for mount in mounts], options.shares, options.granule_bytes)
        except BaseException:
            self.close()
            raise

    def set_threads(self, num_threads: int) -> None:
        """Go on with an engine of so many threads in each direction. Nothing may be in flight."""
        self._engine.close()
        self._engine = self.options.engine(num_threads)

    @property
    def used_bytes(self) -> int:
        """The bytes that are reserved on all mounts together."""
        return sum(self._striping.used)

    @property
    def capacity_bytes(self) -> int:
        """The sum of the mounts' budgets."""
        return self._striping.capacity_bytes

    def reserve(self, num_bytes: int, elsewhere: int = 0) -> Extent:
        """Give a block its place, in stripes over the mounts. It will hold zeros.

        Args:
            num_bytes: its size.
            elsewhere: bytes at its end, in whole granules from their first on, that `attach` finds in other files.

        Raises:
            CapacityError: the mounts' budgets are used up.
        """
        return self._striping.reserve(num_bytes, elsewhere)

    def attach(self, extent: Extent, parts: Sequence[FilePart]) -> None:
        """Say in which parts of the user's own files the bytes of a block lie that have no place on the mounts.

        They may be read once their checksums are there (`note`).

        Raises:
            TransferError: a file cannot be opened.
        """
        self._base.open(parts)
        extent.parts = tuple(parts)

    def note(self, extent: Extent, start: int, stop: int, address: int) -> None:
        """Take the checksums of bytes [start, stop) of a block, which files of the base hold, from memory.

        They were read in another way than by `read`, which compares with these.
        """
        granule = self.options.granule_bytes
        assert start % granule == 0, "a span starts where a granule does"
        for first in range(start, stop, granule):
            granule_address = address + first - start
            num_bytes = min(granule, stop - first)
            extent.checksums[first // granule] = _native.checksum(granule_address, num_bytes)

    def allocate(self) -> None:
        """Create the files at full size, or open those that were kept. This is quick, and `fill` writes them later.

        Raises:
            CapacityError: a drive has less room than was reserved on it.
            TransferError: the device or the file system failed, or a file that was kept is missing.
            ConfigError: other users may open a file that was kept.
        """
        for index, path in enumerate(self.paths):
            size = self._striping.used[index]
            if self.options.reuses:
                self._files.append(self._open(index))
                continue

            # Room is looked at first, since an attempt that fails would fill the drive for a moment.
            directory = self._mounts[index].directory
            remedy = f"Give {directory} a smaller size in tiers.nvme or free space on it."
            free = free_bytes(path.parent)
            if size > free:
                raise CapacityError("nvme", size, free, remedy)

            self._files.append(self._open(index))
            try:
                # Allocated and not only given a length, so that the drive cannot be full when training writes here.
                if size:
                    os.posix_fallocate(self._files[index], 0, size)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                    raise TransferError("preallocating", "nvme", str(path), 0, error.errno or 0) from error
                if error.errno == errno.EFBIG:
                    remedy = f"Raise the limit on the size of a file (ulimit -f); it stops {path}."
                raise CapacityError("nvme", size, free_bytes(path.parent), remedy) from error

    def fill(self, progress: Callable[[int], None] = lambda _: None) -> None:
        """Write zeros over everything that is new. The head of this file says why.

        Args:
            progress: is called with the bytes that were asked for since the last call, and then as the last ones come.

        Raises:
            TransferError: the device failed.
        """
        if self.options.reuses:
            return
        # O_DIRECT takes page-aligned memory alone, which numpy does not promise: hence one page more than is written.
        zeros = np.zeros(REQUEST_BYTES + PAGE_BYTES, dtype=np.uint8)
        address = zeros.ctypes.data + -zeros.ctypes.data % PAGE_BYTES
        in_flight: deque[FileBatch] = deque()

        try:
            # In turns, so that all mounts are filled at once, and few requests at a time: terabytes have too many.
            for offset in range(0, max(self._striping.used), REQUEST_BYTES):
                for file, path, used in zip(self._files, self.paths, self._striping.used, strict=True):
                    num_bytes = min(REQUEST_BYTES, used - offset)
                    if num_bytes <= 0:
                        continue
                    if len(in_flight) == QUEUE_DEPTH_MAX:
                        in_flight.popleft().wait()

                    # Without checksums: every extent begins with those of zeros.
                    segment = (file, offset, address, num_bytes)
                    batch = self._engine.submit([segment], 0, self.options.granule_bytes, writes=True)
                    in_flight.append(FileBatch([(batch, [path])], "write", "(zeros)"))
                    progress(num_bytes)

            while in_flight:
                in_flight.popleft().wait()
                progress(0)
        except BaseException:
            self._engine.close()  # it waits for all requests, which read the zeros
            raise

    def _open(self, mount: int) -> int:
        """Open the block file of a mount. Once a file system refuses O_DIRECT, no further file is opened with it."""
        flags = 0 if self.options.reuses else os.O_CREAT
        direct = os.O_DIRECT if self.is_direct else 0
        try:
            return self._directories.open(mount, flags | direct)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise TransferError("opening", "nvme", str(self.paths[mount]), 0, error.errno or 0) from error

        self.is_direct = False
        if not self.options.reuses:
            self._directories.remove(mount)  # the refused attempt may have made it
        return self._open(mount)

    def opened(self, mount: int) -> Path:
        """Return a path to a mount's open file, wherever its name leads by now, for what takes no descriptor."""
        return Path(f"/proc/self/fd/{self._files[mount]}")

    # HOP 1/6: NVMe extent -> RAM slot
    def read(self, key: str, extent: Extent, start: int, stop: int, address: int) -> FileBatch:
        """Start reading bytes [start, stop) of a block into page-aligned memory. Every granule is verified."""
        batches = []
        own_stop = min(stop, extent.own_bytes)
        if start < own_stop:
            batches.append(self._move(extent, start, own_stop, address, writes=False))

        # What lies behind its own bytes is read where the base holds it.
        base_start = max(start, own_stop)
        if base_start < stop:
            try:
                batches.append(self._gather(extent, base_start, stop, address + base_start - start))
            except BaseException:
                # The caller that gets the error takes the memory for free, and the engine would go on to write into it.
                for batch, _ in batches:
                    batch.wait()
                raise
        return FileBatch(batches, "read", key, self._base)

    # HOP 6/6: RAM slot -> NVMe extent
    def write(self, key: str, extent: Extent, start: int, stop: int, address: int) -> FileBatch:
        """Start writing page-aligned memory to bytes [start, stop) of a block. Each granule's checksum is stored."""
        assert stop <= extent.own_bytes, "files of the base are never written"
        return FileBatch([self._move(extent, start, stop, address, writes=True)], "write", key)

    def _gather(self, extent: Extent, start: int, stop: int, address: int) -> tuple[IoBatch, Sequence[Path]]:
        """Hand the parts of a span in files of the base to the engine; returns their batch, and the file of each."""
        granule = self.options.granule_bytes
        table = self._checksums_at(extent, start)
        segments, paths = self._base.segments(extent.parts, start, stop, address)
        memory = (address, stop - start)
        return self._engine.gather(memory, segments, table, granule), paths

    def _checksums_at(self, extent: Extent, start: int) -> int:
        """Return the address of the checksum of the granule that starts at a byte of a block."""
        # One checksum for each granule, in the order of the block's bytes, wherever its stripes lie.
        granule_index = start // self.options.granule_bytes
        return extent.checksums.ctypes.data + granule_index * extent.checksums.itemsize

    def _move(
        self, extent: Extent, start: int, stop: int, address: int, *, writes: bool
    ) -> tuple[IoBatch, Sequence[Path]]:
        """Hand the stripes of a span to the engine; returns their batch, and the file of each."""
        granule = self.options.granule_bytes
        assert start % granule == 0, "a span starts where a granule does"
        assert stop % granule == 0 or stop == extent.num_bytes, "a span ends with a granule or with its block"

        # The engine gets a segment for each part of a stripe, all in one batch: mounts work at the same time.
        segments = []
        paths = []
        for part in extent.stripe_parts(start, stop):
            file = self._files[part.mount]
            segments.append((file, part.file_offset, address + part.start, part.num_bytes))
            paths.append(self.paths[part.mount])

        table = self._checksums_at(extent, start) if self.options.checksums else 0
        return self._engine.submit(segments, table, granule, writes=writes), paths

    def keep(self, keeps: bool) -> None:
        """Decide whether the files outlive this process, as they are when it ends. A mark next to them says so.

        Raises:
            TransferError: a drive failed, or refuses the mark.
        """
        # Noted first: if a drive fails below, the files stay until this is called again with False.
        self._is_kept = keeps

        # All bytes are on all drives before a mark on any of them says that they are kept.
        if keeps:
            self.sync()
        self._directories.keep(keeps)

    def sync(self) -> None:
        """Wait until everything that was written is on the drives, and survives a loss of power.

        Raises:
            TransferError: a drive failed.
        """
        for mount, file in enumerate(self._files):
            path = self.paths[mount]
            try:
                os.fsync(file)
                self._directories.sync(mount)
            except OSError as error:
                raise TransferError("synchronising", "nvme", str(path), 0, error.errno or 0) from error

    def close(self) -> None:
        """Finish what runs, close the files, remove them unless they are kept, and unlock.

        It is safe to call this twice. Files on a drive that is gone or read-only stay; a transfer that failed has told
        the caller about that drive.
        """
        # The engine ends before the descriptors are closed, since another file may get their numbers at once.
        self._engine.close()

        # Forgotten first: a second call would close files of others, which have these numbers by then.
        while self._files:
            with contextlib.suppress(OSError):
                os.close(self._files.pop())
        self._base.close()
        self._directories.close(keeps=self._is_kept)
