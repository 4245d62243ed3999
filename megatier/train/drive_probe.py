"""Drives, measured as the store uses them: blocks in block files, native I/O, checksums, slots of an arena.

Nothing is printed; files are removed whatever happens but kill -9. A *flag* says that a figure is not to be believed, a
*note* what to know about it.
"""

from __future__ import annotations

import itertools
import math
import os
import secrets
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch

from megatier.config_values import MountBudget
from megatier.errors import CapacityError, ConfigError, at_least
from megatier.hardware import mount_of
from megatier.schedule.rates import DriveRates
from megatier.store.arena import Arena
from megatier.store.blockfile import STRIPE_BYTES, BlockFiles, FileBatch, IoOptions, check_directory
from megatier.store.tier import PAGE_BYTES
from megatier.train.block_device import block_device

BLOCK_BYTES = STRIPE_BYTES
"""A plane of moments of the largest update chunk: what the store moves at once."""
BLOCKS_MIN = 16
DEPTH = 4
"""Blocks in flight in each direction."""
MIXED_READS, MIXED_WRITES = 7, 6
"""14 to 12: what a spilled parameter is read and written in a step."""

THREADS = (4, 8, 16)
"""Native threads each way that are tried. DEPTH blocks have 16 requests, so more would find nothing to do."""
TRIAL_ROUNDS = 3
TRIAL_SHARE = 0.1
"""Of the time of a flow, for each number of threads in each round, mixed and writing."""
AS_FAST = 0.97
"""Of the best rates: the fewest threads that reach it are taken."""

DRIVE_LIMIT_BYTES_PER_S = 16e9
"""PCIe 5.0 with 4 lanes carries 15.8 GB/s, each way."""
UNCOUNTED_SHARE_MAX = 1.5
"""Bytes of a flow over those that the block device counted; beyond it a cache answered."""
KNEE_SHARE = 0.7
SUSTAINED_STEP_BYTES = 1 << 30

Operation = tuple[bool, int]
"""(write, index of the block)."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Blocks moved one after the other, several in flight."""

    num_bytes: int
    seconds: float
    p50_ms: float
    """Of one block, from the start of its first request to the end of its last."""
    p99_ms: float
    device_bytes: int | None
    """What the block device counted meanwhile, others' traffic included; None where nothing counts."""

    @property
    def bytes_per_s(self) -> float:
        """The rate."""
        return self.num_bytes / self.seconds


@dataclass(frozen=True, slots=True)
class DriveFigures:
    """One mount."""

    directory: str
    device: str
    logical_block_bytes: int | None
    num_drives: int
    file_system: str
    is_direct: bool
    """O_DIRECT; else through the page cache."""
    alignment_bytes: int
    """Of every offset, address and length."""
    size_bytes: int
    block_bytes: int
    read: Flow
    write: Flow
    mixed: Flow
    """14 read to 12 written."""
    sustained_bytes_per_s: tuple[float, ...]
    """Rate of each GiB of a long write; empty where none was asked for."""
    knee_bytes: int | None
    """Bytes after which a long write got slower for good: the drive's write cache; None: no such point."""
    io_threads: int | None = None
    """Native threads each way with which read, write and mixed were measured."""
    first_write_bytes_per_s: float | None = None
    """Of filling the file, with the threads of `options`; None where that went to the page cache."""
    trials: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """Median rates, mixed and writing, in bytes per second by threads each way; empty where none were tried."""
    notes: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    @property
    def rates(self) -> DriveRates:
        """For a plan."""
        read, write, mixed = (flow.bytes_per_s for flow in (self.read, self.write, self.mixed))
        return DriveRates(self.directory, read, write, mixed, self.io_threads, self.first_write_bytes_per_s)


class BlockTraffic:
    """A block file filled with blocks, and slots in RAM through which they are written and read."""

    def __init__(self, directory: Path, num_blocks: int, block_bytes: int, options: IoOptions, *, pin: bool) -> None:
        """Create the file at full size and fill it: first writes are slower, reads of what was never written faster.

        Raises:
            ConfigError, CapacityError, TransferError: the mount cannot be used, is full, or failed.
        """
        run_id = f"bench-{secrets.token_hex(6)}"
        self._block_bytes, self._stamp_words = block_bytes, options.chunk_bytes // 8
        self._device = block_device(directory)
        self._arena = Arena(2 * DEPTH * block_bytes, torch.device("cpu"), pin=pin)
        try:
            self._files = BlockFiles([MountBudget(directory, num_blocks * block_bytes)], run_id, options)
        except BaseException:
            self._arena.close()
            raise
        try:
            self._extents = [self._files.reserve(block_bytes) for _ in range(num_blocks)]
            self._files.allocate()
            noise = np.random.default_rng(0).bytes(block_bytes)  # a drive may compress, or skip zeros
            for slot in range(2 * DEPTH):
                self._slot(slot).numpy()[:] = np.frombuffer(noise, dtype=np.uint8)
            began_ns = time.perf_counter_ns()
            self._run(((True, index) for index in range(num_blocks)), DEPTH)
            self.fill_bytes_per_s = num_blocks * block_bytes * 1e9 / (time.perf_counter_ns() - began_ns)
            """Rate of the first writes."""
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the file."""
        self._files.close()  # first: requests in flight still use the slots
        self._arena.close()

    @property
    def is_direct(self) -> bool:
        """Whether the page cache is out of it."""
        return self._files.is_direct

    def set_threads(self, num_threads: int) -> None:
        """Go on with so many native threads each way."""
        self._files.set_threads(num_threads)

    def read(self, seconds: float) -> Flow:
        """Read the file from its start, again and again; through the page cache once, since then RAM would answer."""
        return self._measure(self._reads(len(self._extents)), (0,), seconds)

    def write(self, seconds: float) -> Flow:
        """Overwrite the file from its start, again and again."""
        return self._measure(((True, i) for i in itertools.cycle(range(len(self._extents)))), (1,), seconds)

    def mixed(self, seconds: float) -> Flow:
        """Read one half and write the other, 7 blocks to 6."""
        return self._measure(self._turns(), (0, 1), seconds)

    def sustained(self, num_bytes: int) -> tuple[float, ...]:
        """Write so many bytes without a pause; the rate of each GiB."""
        indices = itertools.cycle(range(len(self._extents)))
        writes = ((True, index) for index in itertools.islice(indices, -(-num_bytes // self._block_bytes)))
        began = time.perf_counter_ns()
        ends = [end for _, end in self._run(writes, DEPTH)]
        return step_rates(began, ends, self._block_bytes)

    def _reads(self, num_blocks: int) -> Iterator[Operation]:
        indices = range(num_blocks)
        return ((False, index) for index in (itertools.cycle(indices) if self.is_direct else indices))

    def _turns(self) -> Iterator[Operation]:
        half = len(self._extents) // 2
        reads, writes = self._reads(half), itertools.cycle(range(half, len(self._extents)))
        for turn in itertools.count():
            if turn % (MIXED_READS + MIXED_WRITES) % 2:
                yield True, next(writes)
            elif (operation := next(reads, None)) is not None:
                yield operation
            else:
                return

    def _measure(self, operations: Iterator[Operation], ways: tuple[int, ...], seconds: float) -> Flow:
        """Ways: 0, reading; 1, writing; or both."""
        if not self.is_direct:
            self._leave_page_cache()
        before, began = self._device.moved_bytes(), time.perf_counter_ns()
        spans = self._run(operations, DEPTH * len(ways), began + int(seconds * 1e9))
        if not self.is_direct:
            self._leave_page_cache()  # what is written counts once it is on the drive
        ended, after = time.perf_counter_ns(), self._device.moved_bytes()
        counted = None if before is None or after is None else sum(after[way] - before[way] for way in ways)
        times = sorted((end - start) / 1e6 for start, end in spans)
        p50, p99 = quantile(times, 0.5), quantile(times, 0.99)
        return Flow(len(spans) * self._block_bytes, (ended - began) / 1e9, p50, p99, counted)

    def _run(self, operations: Iterable[Operation], window: int, until_ns: int | None = None) -> list[tuple[int, int]]:
        """Do operations until the time is over, each mixed turn at least once; start and end of each, in ns."""
        flying: deque[FileBatch] = deque()
        spans: list[tuple[int, int]] = []

        def land() -> None:
            batch = flying.popleft()
            batch.wait()
            spans.append(batch.span_ns())

        for number, (write, index) in enumerate(operations):
            if len(flying) == window:
                land()
            is_over = until_ns is not None and time.perf_counter_ns() >= until_ns
            if is_over and number >= MIXED_READS + MIXED_WRITES:
                break
            flying.append(self._submit(write, index, number % window))
        while flying:
            land()
        return spans

    def _submit(self, write: bool, index: int, slot: int) -> FileBatch:
        view = self._slot(slot)
        key, extent, size, address = f"block {index}", self._extents[index], self._block_bytes, view.data_ptr()
        if not write:
            return self._files.read(key, extent, 0, size, address)
        view.view(torch.int64)[:: self._stamp_words] = index  # a block read from another's place has wrong checksums
        return self._files.write(key, extent, 0, size, address)

    def _slot(self, slot: int) -> torch.Tensor:
        return self._arena.view(slot * self._block_bytes, self._block_bytes)

    def _leave_page_cache(self) -> None:
        file = os.open(self._files.opened(0), os.O_RDWR | os.O_CLOEXEC)
        try:
            os.fsync(file)  # dirty pages cannot be dropped
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def check_mount(mount: MountBudget) -> int:
    """Bytes of the file to measure with, once it is clear that the mount can hold it.

    Raises:
        ConfigError: it is no directory on a drive, or the size is too small to measure anything.
        CapacityError: the mount has less room.
    """
    directory, num_bytes = mount.directory, mount.num_bytes or 0
    check_directory(directory, "--nvme")
    if num_bytes < (least := BLOCKS_MIN * IoOptions().chunk_bytes):
        raise ConfigError(f"--nvme: {at_least(num_bytes)} on {directory} is too small; give {at_least(least)} or more.")
    room = os.statvfs(directory)
    if num_bytes > (free := room.f_bavail * room.f_frsize):
        raise CapacityError("nvme", num_bytes, free, f"Free space on {directory}, or give it less: {directory}:SIZE.")
    return num_bytes


def probe_drive(
    mount: MountBudget,
    *,
    seconds: float,
    sustained_bytes: int = 0,
    options: IoOptions | None = None,
    pin: bool = False,
) -> DriveFigures:
    """Measure one mount with a file of the mount's size, filled before, with as many threads as it is best with.

    Args:
        mount: directory and size of the file, rounded down to whole blocks.
        seconds: of each of the three flows. The numbers of threads take 1.8 times as long, all together.
        sustained_bytes: of the long write; 0: none. It goes first, so that the others meet a write cache that is full.
        options: how block files are accessed.
        pin: page-lock the slots, as on a machine with a GPU.

    Raises:
        ConfigError, CapacityError: the mount cannot be used; see `check_mount`.
        TransferError, IntegrityError: the drive failed, or gave other bytes than were written.
    """
    options = options or IoOptions()
    num_bytes = check_mount(mount)
    block_bytes = min(BLOCK_BYTES, num_bytes // BLOCKS_MIN // options.chunk_bytes * options.chunk_bytes)
    device, directory = block_device(mount.directory), mount.directory
    with BlockTraffic(directory, num_bytes // block_bytes, block_bytes, options, pin=pin) as traffic:
        sustained = traffic.sustained(sustained_bytes) if sustained_bytes else ()
        is_direct, io_threads = traffic.is_direct, options.num_threads
        trials = try_threads(traffic, seconds * TRIAL_SHARE) if is_direct else {}  # else RAM answers for a part
        if trials:
            io_threads = fewest_threads(trials)
            traffic.set_threads(io_threads)
        write, mixed, read = traffic.write(seconds), traffic.mixed(seconds), traffic.read(seconds)
    knee_step = knee(sustained)
    figures = DriveFigures(
        directory=str(directory),
        device=device.name,
        logical_block_bytes=device.logical_block_bytes,
        num_drives=device.num_drives,
        file_system=mount_of(directory).file_system,
        is_direct=is_direct,
        alignment_bytes=PAGE_BYTES,
        size_bytes=num_bytes // block_bytes * block_bytes,
        block_bytes=block_bytes,
        read=read,
        write=write,
        mixed=mixed,
        sustained_bytes_per_s=sustained,
        knee_bytes=None if knee_step is None else knee_step * max(SUSTAINED_STEP_BYTES, block_bytes),
        io_threads=io_threads,
        first_write_bytes_per_s=traffic.fill_bytes_per_s if is_direct else None,
        trials=trials,
    )
    return replace(figures, notes=drive_notes(figures), flags=drive_flags(figures))


def try_threads(traffic: BlockTraffic, seconds: float) -> dict[int, tuple[float, float]]:
    """Median rates, mixed and writing, in bytes per second, by number of THREADS; they take turns: drives waver."""
    found: dict[int, list[tuple[float, float]]] = {count: [] for count in THREADS}
    for number in range(TRIAL_ROUNDS):
        first = number % len(THREADS)
        for count in THREADS[first:] + THREADS[:first]:
            traffic.set_threads(count)
            found[count].append((traffic.mixed(seconds).bytes_per_s, traffic.write(seconds).bytes_per_s))
    return {
        count: (statistics.median(m for m, _ in r), statistics.median(w for _, w in r)) for count, r in found.items()
    }


def fewest_threads(trials: Mapping[int, tuple[float, float]]) -> int:
    """The smallest number whose rates are near the best; else that of the best mixed one.

    A lone read beside writes waits longer the more threads write.
    """
    best = [max(rates) for rates in zip(*trials.values(), strict=True)]
    near = [n for n, rates in trials.items() if all(r >= AS_FAST * b for r, b in zip(rates, best, strict=True))]
    return min(near, default=max(trials, key=lambda count: trials[count][0]))


def drive_flags(figures: DriveFigures) -> tuple[str, ...]:
    """What makes the figures of a mount no figures of a drive."""
    flags = []
    limit = DRIVE_LIMIT_BYTES_PER_S * figures.num_drives
    for name, flow in (("read", figures.read), ("write", figures.write), ("mixed", figures.mixed)):
        if flow.bytes_per_s > limit * (1 if name != "mixed" else 2):
            flags.append(f"{name}: more than {limit / 1e9:.0f} GB/s, which PCIe does not carry: a cache answered")
        elif flow.device_bytes is not None and flow.num_bytes > UNCOUNTED_SHARE_MAX * flow.device_bytes:
            share = flow.device_bytes / flow.num_bytes
            flags.append(f"{name}: the device moved {share:.0%} of the bytes: the page cache answered for the rest")
    if not figures.is_direct and figures.read.device_bytes is None:
        flags.append("through the page cache, and no counter tells how much the drive really moved")
    return tuple(flags)


def drive_notes(figures: DriveFigures) -> tuple[str, ...]:
    """What to know about the figures of a mount."""
    notes = []
    if not figures.is_direct:
        notes.append("no O_DIRECT here: measured through the page cache, read once after it was dropped")
    if figures.block_bytes < BLOCK_BYTES:
        least = at_least(BLOCKS_MIN * BLOCK_BYTES)
        notes.append(f"blocks smaller than the store's, {at_least(BLOCK_BYTES)}: give {least} or more")
    if (figures.logical_block_bytes or 0) > PAGE_BYTES:
        notes.append(f"the device wants transfers of {figures.logical_block_bytes} bytes; the store's may be smaller")
    flows = (figures.read, figures.write, figures.mixed)
    if any(flow.device_bytes and flow.device_bytes > UNCOUNTED_SHARE_MAX * flow.num_bytes for flow in flows):
        notes.append("others used the device meanwhile: the figures are too low")
    return tuple(notes)


def quantile(ordered: Sequence[float], share: float) -> float:
    """The least number that so large a share of them does not exceed; 0 of nothing."""
    return ordered[max(1, math.ceil(share * len(ordered))) - 1] if ordered else 0.0


def step_rates(began_ns: int, ends_ns: Iterable[int], block_bytes: int) -> tuple[float, ...]:
    """Bytes per second of each whole GiB, from the moments at which blocks were written; of all if it is less."""
    ends = sorted(ends_ns)
    per_step = min(max(1, SUSTAINED_STEP_BYTES // block_bytes), max(1, len(ends)))
    marks = [began_ns, *ends[per_step - 1 :: per_step]]
    return tuple(per_step * block_bytes * 1e9 / max(1, b - a) for a, b in itertools.pairwise(marks))


def knee(rates: Sequence[float]) -> int | None:
    """How many steps a long write kept its first rate, when it lost a third of it or more for good; else None.

    The split into two levels that leaves the least sum of squares; both last for two steps at least.
    """

    def squares(part: Sequence[float]) -> float:
        mean = statistics.fmean(part)
        return sum((rate - mean) ** 2 for rate in part)

    splits = range(2, len(rates) - 1)
    best = min(splits, key=lambda split: squares(rates[:split]) + squares(rates[split:]), default=None)
    if best is None or statistics.median(rates[best:]) > KNEE_SHARE * statistics.median(rates[:best]):
        return None
    return best
