"""The block files of a run: one file on each mount, allocated and filled before use. Together they are the NVMe tier.

This file has hop 1 (NVMe extent -> RAM slot) and hop 6 (RAM slot -> NVMe extent) of a byte's journey. It opens and
fills the files, moves spans of blocks, and turns failures into typed errors. `extent` says where the bytes of a block
lie, `mounts` has the locked directories, and `io_engine` reads and writes.

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
    """The number of native threads of the engine in each direction."""
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
    """The share of the bytes for each mount, in any unit, such as its measured rate. If empty, budgets decide."""
    reuses: bool = False
    """Whether to take the files that a process of the same run id kept, with the bytes in them. The caller puts
    their checksums back before anything is read (`TieredStore.extents`)."""
    run: str = ""
    """The run directory, for the note beside the files; empty if there is none."""


class FileBatch:
    """Batches of the engine as one completion, with typed errors."""

    def __init__(
        self, batches: Sequence[tuple[IoBatch, Sequence[Path]]], action: str, key: str, base: BaseFiles | None = None
    ) -> None:
        """Take batches that run.

        Args:
            batches: each with the file of each of its segments.
            action: "read" or "write", for messages.
            key: the block that is moved.
            base: files of the base, some of which may be read.
        """
        self._batches = batches
        self._what = action
        self._key = key
        self._base = base

    def wait(self) -> None:
        """Block, with the GIL free, until all batches have ended. Raise the error of a failed one.

        Raises:
            TransferError, IntegrityError: a device failed, or a granule is damaged.
            BaseChangedError: such a granule is one of a file of the base that was written.
        """
        # All have to end first, because a batch goes on to use the memory after another one has failed.
        for batch, _ in self._batches:
            batch.wait()

        for batch, paths in self._batches:
            error = batch.error()
            if error is not None:
                self._fail(error, paths)

    def _fail(self, error: tuple[str, int, int, int, int, int], paths: Sequence[Path]) -> None:
        kind, code, segment, offset, expected, found = error
        path = paths[segment]

        # A base file that was changed meanwhile explains any error, so check that first.
        if self._base is not None:
            self._base.check([path])
        if kind == "checksum":
            raise IntegrityError(self._key, str(path), offset, expected, found)

        # A file that is too short is not an error of the system, so there is no errno.
        action = f"{self._what} of block {self._key}"
        raise TransferError(action, "nvme", str(path), offset, code if kind == "io" else 0)

    def done(self) -> bool:
        """Return whether every request has ended."""
        return all(batch.done() for batch, _ in self._batches)

    def span_ns(self) -> tuple[int, int]:
        """Return the start of the first request and the end of the last one, in time.perf_counter_ns."""
        starts, stops = zip(*(batch.span_ns() for batch, _ in self._batches), strict=True)
        return min(starts), max(stops)


class BlockFiles:
    """The blocks of one store on NVMe.

    Threads: `reserve`, `allocate` and `fill` are called from one thread. After that, any thread may read and write.
    """

    def __init__(self, mounts: Sequence[MountBudget], run_id: str, options: IoOptions) -> None:
        """Create and lock a directory on each mount, without allocating files yet.

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
        # Before any directory is made, so that an error leaves nothing on other mounts.
        for mount in mounts:
            check_directory(mount.directory)

        self._directories = MountDirectories(mounts, run_id, options.run)
        self.paths = self._directories.paths
        """The file on each mount, for messages. It exists after `allocate`."""
        self._files: list[int] = []
        """An open descriptor for each mount."""
        self._engine = options.engine(options.num_threads)
        self._base = BaseFiles(direct=options.direct)

        # After an error in here the caller has no object to close, so threads, locks and files are closed here.
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
        """Reserve an extent for a block, in stripes over the mounts. It will hold zeros.

        Args:
            num_bytes: the size of the block.
            elsewhere: the bytes at its end, in whole granules, that are in other files (`attach`).

        Raises:
            CapacityError: the mounts' budgets are used up.
        """
        return self._striping.reserve(num_bytes, elsewhere)

    def attach(self, extent: Extent, parts: Sequence[FilePart]) -> None:
        """Set the parts of the user's own files that have the bytes of a block which are not on the mounts.

        These can be read after their checksums are set (`note`).

        Raises:
            TransferError: a file cannot be opened.
        """
        self._base.open(parts)
        extent.parts = tuple(parts)

    def note(self, extent: Extent, start: int, stop: int, address: int) -> None:
        """Compute the checksums of bytes [start, stop) of a block from memory. `read` compares with these.

        The bytes are in files of the base, and were read in another way.
        """
        granule = self.options.granule_bytes
        assert start % granule == 0, "a span starts where a granule does"
        for first in range(start, stop, granule):
            granule_address = address + first - start
            num_bytes = min(granule, stop - first)
            extent.checksums[first // granule] = _native.checksum(granule_address, num_bytes)

    def allocate(self) -> None:
        """Create the files at full size, or open kept ones. This is quick, because `fill` writes zeros later.

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

            # Checked first, because a failing attempt would fill the drive for a moment.
            directory = self._mounts[index].directory
            remedy = f"Give {directory} a smaller size in tiers.nvme or free space on it."
            free = free_bytes(path.parent)
            if size > free:
                raise CapacityError("nvme", size, free, remedy)

            self._files.append(self._open(index))
            try:
                # Allocated, and not only extended, so that training never finds the drive full.
                if size:
                    os.posix_fallocate(self._files[index], 0, size)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                    raise TransferError("preallocating", "nvme", str(path), 0, error.errno or 0) from error
                if error.errno == errno.EFBIG:
                    remedy = f"Raise the limit on the size of a file (ulimit -f); it stops {path}."
                raise CapacityError("nvme", size, free_bytes(path.parent), remedy) from error

    def fill(self, progress: Callable[[int], None] = lambda _: None) -> None:
        """Fill new files with zeros; the head of this file says why.

        Args:
            progress: gets the bytes that were submitted since its last call, and 0 while the last ones are written.

        Raises:
            TransferError: the device failed.
        """
        if self.options.reuses:
            return
        # O_DIRECT needs page-aligned memory, which numpy does not guarantee. So there is one page more than is written.
        zeros = np.zeros(REQUEST_BYTES + PAGE_BYTES, dtype=np.uint8)
        address = zeros.ctypes.data + -zeros.ctypes.data % PAGE_BYTES
        in_flight: deque[FileBatch] = deque()

        try:
            # By turns, so that all mounts are filled at once. Terabytes have too many requests to submit all of them.
            for offset in range(0, max(self._striping.used), REQUEST_BYTES):
                for file, path, used in zip(self._files, self.paths, self._striping.used, strict=True):
                    num_bytes = min(REQUEST_BYTES, used - offset)
                    if num_bytes <= 0:
                        continue
                    if len(in_flight) == QUEUE_DEPTH_MAX:
                        in_flight.popleft().wait()

                    # No checksums are stored, because every extent begins with those of zeros.
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
        """Return a path to a mount's open file, even if its name leads elsewhere by now, for code that takes paths."""
        return Path(f"/proc/self/fd/{self._files[mount]}")

    # HOP 1/6: NVMe extent -> RAM slot
    def read(self, key: str, extent: Extent, start: int, stop: int, address: int) -> FileBatch:
        """Start to read bytes [start, stop) of a block into page-aligned memory. Every granule is verified."""
        batches = []
        own_stop = min(stop, extent.own_bytes)
        if start < own_stop:
            batches.append(self._move(extent, start, own_stop, address, writes=False))

        # The remaining bytes are in files of the base.
        base_start = max(start, own_stop)
        if base_start < stop:
            try:
                batches.append(self._gather(extent, base_start, stop, address + base_start - start))
            except BaseException:
                # After an error the caller reuses the memory, so nothing may still write to it.
                for batch, _ in batches:
                    batch.wait()
                raise
        return FileBatch(batches, "read", key, self._base)

    # HOP 6/6: RAM slot -> NVMe extent
    def write(self, key: str, extent: Extent, start: int, stop: int, address: int) -> FileBatch:
        """Start to write page-aligned memory to bytes [start, stop) of a block. Each granule's checksum is stored."""
        assert stop <= extent.own_bytes, "files of the base are never written"
        return FileBatch([self._move(extent, start, stop, address, writes=True)], "write", key)

    def _gather(self, extent: Extent, start: int, stop: int, address: int) -> tuple[IoBatch, Sequence[Path]]:
        """Submit the parts of a span in files of the base. Return their batch, and the file of each."""
        granule = self.options.granule_bytes
        table = self._checksums_at(extent, start)
        segments, paths = self._base.segments(extent.parts, start, stop, address)
        memory = (address, stop - start)
        return self._engine.gather(memory, segments, table, granule), paths

    def _checksums_at(self, extent: Extent, start: int) -> int:
        """Return the address of the checksum of the granule that starts at a byte of a block."""
        # The table is in the order of the block's bytes, wherever its stripes are.
        granule_index = start // self.options.granule_bytes
        return extent.checksums.ctypes.data + granule_index * extent.checksums.itemsize

    def _move(
        self, extent: Extent, start: int, stop: int, address: int, *, writes: bool
    ) -> tuple[IoBatch, Sequence[Path]]:
        """Submit the stripes of a span. Return their batch, and the file of each."""
        granule = self.options.granule_bytes
        assert start % granule == 0, "a span starts where a granule does"
        assert stop % granule == 0 or stop == extent.num_bytes, "a span ends with a granule or with its block"

        # All parts of stripes are in one batch, so that mounts work at the same time.
        segments = []
        paths = []
        for part in extent.stripe_parts(start, stop):
            file = self._files[part.mount]
            segments.append((file, part.file_offset, address + part.start, part.num_bytes))
            paths.append(self.paths[part.mount])

        table = self._checksums_at(extent, start) if self.options.checksums else 0
        return self._engine.submit(segments, table, granule, writes=writes), paths

    def keep(self, keeps: bool) -> None:
        """Decide whether the files stay after this process ends. A mark beside them says so.

        Raises:
            TransferError: a drive failed, or refuses the mark.
        """
        # Set first, so that files stay if a drive fails below, until this is called again with False.
        self._is_kept = keeps

        # All bytes have to be on the drives before a mark says that they are kept.
        if keeps:
            self.sync()
        self._directories.keep(keeps)

    def sync(self) -> None:
        """Wait until all written bytes are on the drives, and survive a loss of power.

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
        """Finish all requests, close the files, remove them unless they are kept, and unlock.

        It is safe to call this twice. Files on a drive that is gone or read-only stay; a transfer that failed has told
        the caller about that drive.
        """
        # The engine ends first, because another file may get a closed descriptor at once.
        self._engine.close()

        # A second call must not close descriptors that other files have by then.
        while self._files:
            with contextlib.suppress(OSError):
                os.close(self._files.pop())
        self._base.close()
        self._directories.close(keeps=self._is_kept)
