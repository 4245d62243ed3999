"""Block files: the NVMe tier. One preallocated, pre-filled file per mount, read and written with O_DIRECT.

Where it stands: hop 1 (NVMe extent -> RAM slot) and hop 6 (RAM slot -> NVMe extent) of a byte's journey.

A block is cut into stripes that are dealt to the mounts by their shares. Every chunk of 64 KiB has a checksum, held in
RAM, stored when it is written and verified when it is read. Files are filled once at the start: the first write into a
fresh extent is half as fast as an overwrite, and a full disk shows before training, not during it.

Files live in `<mount>/megatier-<run id>/`, under a lock, with modes 0700 and 0600; only that directory is ever removed.
They go with the process, unless a savepoint needs them (`keep`). `leftovers` removes those of a killed process. Files
that others may have put in their place are refused (`private`).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatier import _native
from megatier.config.values import MountBudget
from megatier.drives.io_engine import REQUEST_BYTES, IoBatch, IoEngine, NativeEngine
from megatier.errors import CapacityError, ConfigError, IntegrityError, TransferError
from megatier.hardware import mount_of
from megatier.private import FOLDER_FLAGS, LOCK_FILE, PrivateDirectory
from megatier.tier import PAGE_BYTES, round_up

STRIPE_BYTES = 32 << 20
"""Most bytes of one stripe."""
BLOCK_FILE = "blocks"
KEPT_FILE = "savepoint"
"""Marks block files that outlive their process."""
FILES = (KEPT_FILE, BLOCK_FILE, LOCK_FILE)
"""All that a run's directory on a mount holds; the lock goes last."""


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Stripe:
    """A run of a block's bytes on one mount.

    Attributes:
        mount: index of the mount.
        file_offset: where it begins in the mount's file.
        start: where it begins in the block.
        num_bytes: its length.
    """

    mount: int
    file_offset: int
    start: int
    num_bytes: int


class Extent:
    """The place of one block, and the checksum of each of its chunks.

    Attributes:
        num_bytes: the block's size in whole pages.
        stripes: its pieces, in order.
        checksums: uint32 per chunk, in RAM. Native threads store them and compare with them.
    """

    __slots__ = ("checksums", "num_bytes", "stripes")

    def __init__(self, num_bytes: int, stripes: tuple[Stripe, ...], checksums: npt.NDArray[np.uint32]) -> None:
        """Take the place of a block, in whole pages."""
        self.num_bytes = num_bytes
        self.stripes = stripes
        self.checksums = checksums

    def padded(self, stop: int) -> int:
        """The end on the drive of a span that ends at `stop`: a block's last page is moved whole."""
        return round_up(stop)

    def pieces(self, start: int, stop: int) -> Iterator[Stripe]:
        """Give the parts of stripes that hold bytes [start, stop) of the block; a part's `start` counts from there."""
        for stripe in self.stripes:
            first = max(start, stripe.start)
            last = min(stop, stripe.start + stripe.num_bytes)
            if first < last:
                yield Stripe(stripe.mount, stripe.file_offset + first - stripe.start, first - start, last - first)


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

        directories = [mount.directory / f"megatier-{run_id}" for mount in mounts]
        self.paths = [directory / BLOCK_FILE for directory in directories]
        self._directories: list[PrivateDirectory] = []
        self._files: list[int] = []
        """An open descriptor per mount."""
        self._used = [0] * len(mounts)
        """Bytes reserved per mount."""
        self._engine = options.engine(options.num_threads)

        # Threads, locks and files are given back by `close` alone, and whoever gets an error here has nothing to close.
        try:
            for path in directories:
                self._directories.append(PrivateDirectory(path))
                for name in () if options.reuses else (KEPT_FILE, BLOCK_FILE):
                    with contextlib.suppress(OSError):  # a run of this id left it; now it would only fill the drive
                        self._directories[-1].remove(name)
            self._budgets = [budget_bytes(mount) for mount in mounts]
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
        return sum(self._used)

    @property
    def capacity_bytes(self) -> int:
        """The sum of the mounts' budgets."""
        return sum(self._budgets)

    def reserve(self, num_bytes: int) -> Extent:
        """Give a block its place, striped over the mounts; it will hold zeros.

        Raises:
            CapacityError: the mounts' budgets are used up.
        """
        total = round_up(num_bytes)
        chunk = self.options.chunk_bytes
        before = list(self._used)
        stripes = []
        start = 0
        while start < total:
            mount, size = self._next_mount(total - start)
            if not size:
                free = self.capacity_bytes - sum(before)
                self._used = before
                raise CapacityError("nvme", total, free, "Raise a mount's size in tiers.nvme or add a mount.")
            stripes.append(Stripe(mount, self._used[mount], start, size))
            self._used[mount] += size
            start += size
        return Extent(total, tuple(stripes), zero_checksums(total, chunk))

    def _next_mount(self, missing: int) -> tuple[int, int]:
        """The mount with room that has taken least for its share, and the bytes that it takes; 0 if none has room."""
        chunk = self.options.chunk_bytes
        shares = self.options.shares or self._budgets
        free = [budget - used for budget, used in zip(self._budgets, self._used, strict=True)]
        sizes = [min(missing, STRIPE_BYTES, room if room >= missing else room // chunk * chunk) for room in free]
        best = min(range(len(free)), key=lambda i: (sizes[i] <= 0, self._used[i] / max(1, shares[i]), i))
        return best, max(0, sizes[best])

    def allocate(self) -> None:
        """Create the files at full size, quickly; `fill` writes them. Or open those that were kept.

        Raises:
            CapacityError: a disk has less room than was reserved on it.
            TransferError: the device or the file system failed, or a file that was kept is missing.
            ConfigError: a file that was kept is not this user's alone.
        """
        for index, path in enumerate(self.paths):
            size = self._used[index]
            if self.options.reuses:
                self._files.append(self._open(index))
                continue

            remedy = f"Give {self._mounts[index].directory} a smaller size in tiers.nvme or free space on it."
            if size > (free := _free_bytes(path.parent)):  # else the attempt would fill the disk for a moment
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
                raise CapacityError("nvme", size, _free_bytes(path.parent), remedy) from error

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
            for offset in range(0, self._used[index], REQUEST_BYTES):
                segment = (self._files[index], offset, address, min(REQUEST_BYTES, self._used[index] - offset))
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
        directory = self._directories[mount]
        try:
            return directory.open(BLOCK_FILE, flags | (os.O_DIRECT if self.is_direct else 0))
        except OSError as error:
            if not self.is_direct or error.errno != errno.EINVAL:
                raise TransferError("opening", "nvme", str(self.paths[mount]), 0, error.errno or 0) from error

        self.is_direct = False
        if not self.options.reuses:
            with contextlib.suppress(OSError):
                directory.remove(BLOCK_FILE)  # the refused attempt may have made it
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
        for directory in self._directories:
            try:
                directory.mark(KEPT_FILE) if keeps else directory.remove(KEPT_FILE)
            except OSError as error:
                mark = directory.path / KEPT_FILE
                raise TransferError("marking", "nvme", str(mark), 0, error.errno or 0) from error

        # A name that was made is on the drive only when its directory is.
        for directory in self._directories if keeps else ():
            try:
                directory.sync()
            except OSError as error:
                raise TransferError("synchronising", "nvme", str(directory.path), 0, error.errno or 0) from error

    def sync(self) -> None:
        """Wait until everything written is on the drives, through a loss of power too.

        Raises:
            TransferError: a drive failed.
        """
        for directory, file, path in zip(self._directories, self._files, self.paths, strict=True):
            try:
                os.fsync(file)
                directory.sync()
                _sync(path.parent.parent)
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
        for directory in self._directories:
            directory.close(() if self._is_kept and directory.holds(BLOCK_FILE) else FILES)

        # Else a second call would close descriptors of somebody else.
        self._files = []
        self._directories = []


def _sync(directory: Path) -> None:
    """Wait until the names in a directory are on the drive."""
    file = os.open(directory, FOLDER_FLAGS)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@functools.cache
def zero_checksum(num_bytes: int) -> int:
    """The checksum of so many zeros."""
    zeros = np.zeros(num_bytes, dtype=np.uint8)
    return _native.checksum(zeros.ctypes.data, num_bytes)


def zero_checksums(num_bytes: int, chunk_bytes: int) -> npt.NDArray[np.uint32]:
    """The checksum of each chunk of so many zeros; the last chunk may be shorter."""
    checksums = np.full(-(-num_bytes // chunk_bytes), zero_checksum(chunk_bytes), dtype=np.uint32)
    if tail := num_bytes % chunk_bytes:
        checksums[-1] = zero_checksum(tail)
    return checksums


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


def budget_bytes(mount: MountBudget) -> int:
    """A mount's budget; nine tenths of the free space there if none was given.

    Raises:
        ConfigError: it is no directory on a drive, or full.
    """
    check_directory(mount.directory)
    if mount.num_bytes is not None:
        return mount.num_bytes
    if not (budget := _free_bytes(mount.directory) * 9 // 10):
        raise ConfigError(f"tiers.nvme: {mount.directory} is full. Free space on it, or name another drive.")
    return budget


def _free_bytes(directory: Path) -> int:
    """Bytes that this user may still fill."""
    file_system = os.statvfs(directory)
    return file_system.f_bavail * file_system.f_frsize
