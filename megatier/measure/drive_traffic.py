"""Traffic on one drive like that of the store: blocks in block files, native I/O, checksums, slots.

`drive_probe` measures its rates. Files are removed except after kill -9.
"""

from __future__ import annotations

import itertools
import math
import os
import secrets
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch

from megatier import _native
from megatier.address import address_of
from megatier.config.values import MountBudget
from megatier.drives.blockfile import BlockFiles, FileBatch, IoOptions
from megatier.drives.extent import STRIPE_BYTES
from megatier.measure.block_device import block_device
from megatier.measure.link_traffic import UpdateTraffic
from megatier.optim.adamw import adamw_threads
from megatier.schedule.rates import UPDATE_READ_BYTES, UPDATE_WRITTEN_BYTES
from megatier.store.arena import Arena

BLOCK_BYTES = STRIPE_BYTES
"""The size of a block: one plane of moments of the largest update chunk, which the store moves at once."""
BYTES_OF_MOMENT = 4
"""The bytes of an element of a moment."""
DEPTH = 4
"""The blocks in flight in each direction."""
MIXED_READS = UPDATE_READ_BYTES // 2
MIXED_WRITES = UPDATE_WRITTEN_BYTES // 2
"""A mixed turn reads and writes so many blocks: half of the bytes that an update of a parameter that spills does."""
UPDATED_AT = (6, 12)
"""The operations of a mixed turn at which AdamW gets another chunk."""
MIXED_WINDOWS = 6
"""The mixed flow goes on for so many times as long as the others. Its rate binds a step, and the rates of drives waver.
"""

SUSTAINED_STEP_BYTES = 1 << 30
"""The bytes of a long write over which one rate is taken."""

Operation = tuple[bool, int]
"""Whether to write, and the index of the block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """A series of block moves in one direction, with several in flight."""

    num_bytes: int
    """The bytes of all blocks."""
    seconds: float
    """The time that they took."""
    p50_ms: float
    """The median time of one block, from the start of its first request to the end of its last."""
    p99_ms: float
    """The 99th percentile of the time of one block."""
    device_bytes: int | None
    """The bytes that the block device has counted, including those of other processes; None: no counter."""
    windows: tuple[float, ...] = ()
    """The bytes per second in one stretch of time after the other. It is empty if the flow is one stretch."""

    @property
    def bytes_per_s(self) -> float:
        """The rate, which is that of the median window if there are several."""
        return statistics.median(self.windows) if self.windows else self.num_bytes / self.seconds


class UpdatesBeside:
    """AdamW on as many parameters as are read, while blocks are read and written."""

    def __init__(self, num_elements: int, threads: int) -> None:
        """Allocate two chunks of so many parameters, so that one is updated while the one before it ends.

        Raises:
            CapacityError: there is less memory.
        """
        self._traffic = UpdateTraffic(
            torch.device("cpu"),
            2 * num_elements,
            chunk_elements=num_elements,
        )

        # Threads of its own, as in a run: AdamW and the drive's threads share the cores.
        self._pool = adamw_threads(threads)
        self._flying: deque[_native.Batch] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        while self._flying:
            self._flying.popleft().wait()
        self._pool.close()
        self._traffic.close()

    def among(self, operations: Iterable[Operation]) -> Iterator[Operation]:
        """Yield the operations, and begin two updates in each mixed turn, as its 7 blocks hold so many parameters."""
        # One update of each chunk may be under way while blocks are read and written.
        chunks = itertools.cycle(range(2))
        for number, operation in enumerate(operations):
            if number % (MIXED_READS + MIXED_WRITES) in UPDATED_AT:
                if len(self._flying) == 2:
                    self._flying.popleft().wait()
                update = self._traffic.submit(self._pool, next(chunks))
                self._flying.append(update)
            yield operation


class BlockTraffic:
    """A block file full of blocks, and slots in RAM through which they are written and read."""

    def __init__(self, directory: Path, num_blocks: int, block_bytes: int, options: IoOptions, *, pin: bool) -> None:
        """Create the file and fill it, because first writes are slower, and reads of unwritten bytes faster.

        Raises:
            ConfigError, CapacityError, TransferError: the mount cannot be used, is full, or failed.
        """
        # Random, so that two benches of one mount use different files.
        run_id = f"bench-{secrets.token_hex(6)}"
        self._block_bytes = block_bytes
        self._stamp_words = options.granule_bytes // 8
        self._device = block_device(directory)

        # Slots for both directions, which a mixed flow uses at once.
        self._arena = Arena(2 * DEPTH * block_bytes, torch.device("cpu"), pin=pin)
        try:
            self._files = BlockFiles([MountBudget(directory, num_blocks * block_bytes)], run_id, options)
        except BaseException:
            self._arena.close()
            raise

        try:
            # All extents are reserved before the file is made, as a run does, so that its size is known.
            self._extents = [self._files.reserve(block_bytes) for _ in range(num_blocks)]
            self._files.allocate()

            # Noise, because a drive may compress bytes or skip zeros.
            noise = np.random.default_rng(0).bytes(block_bytes)
            for slot in range(2 * DEPTH):
                self._slot(slot).numpy()[:] = np.frombuffer(noise, dtype=np.uint8)

            began_ns = time.perf_counter_ns()
            self._run(((True, index) for index in range(num_blocks)), DEPTH)
            self.fill_bytes_per_s = num_blocks * block_bytes * 1e9 / (time.perf_counter_ns() - began_ns)
            """The rate of the first writes."""
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the file."""
        # Files first, because requests in flight still use the slots.
        self._files.close()
        self._arena.close()

    @property
    def is_direct(self) -> bool:
        """Whether reads and writes go past the page cache."""
        return self._files.is_direct

    def set_threads(self, num_threads: int) -> None:
        """Go on with so many native threads in each direction."""
        self._files.set_threads(num_threads)

    def read(self, seconds: float) -> Flow:
        """Read the file from its start, again and again; only once through the page cache, because RAM answers then."""
        return self._measure(self._reads(len(self._extents)), (0,), seconds)

    def write(self, seconds: float) -> Flow:
        """Overwrite the file from its start, again and again."""
        indices = itertools.cycle(range(len(self._extents)))
        return self._measure(((True, index) for index in indices), (1,), seconds)

    def mixed(self, seconds: float) -> Flow:
        """Read one half and write the other, 7 blocks to 6."""
        return self._measure(self._turns(), (0, 1), seconds)

    def updated(self, seconds: float, threads: int) -> Flow:
        """Do the same as updates of state that spills do: read, run AdamW and write.

        This takes MIXED_WINDOWS times as long as the other flows. Through the page cache there are no windows, since
        what was written is counted only at the end.
        """
        # Without O_DIRECT a write is over when the page cache has it, so the rate of a window would be that of RAM.
        window_s = seconds if self.is_direct else None
        num_elements = self._block_bytes // BYTES_OF_MOMENT
        with UpdatesBeside(num_elements, threads) as updates:
            operations = updates.among(self._turns())
            return self._measure(operations, (0, 1), MIXED_WINDOWS * seconds, window_s)

    def sustained(self, num_bytes: int) -> tuple[float, ...]:
        """Write so many bytes without a pause. Return the rate of each GiB."""
        num_blocks = math.ceil(num_bytes / self._block_bytes)
        indices = itertools.cycle(range(len(self._extents)))
        chosen = itertools.islice(indices, num_blocks)
        writes = ((True, index) for index in chosen)
        began = time.perf_counter_ns()

        # No time limit here: what is asked for is a number of bytes, after which a cache must be full.
        spans = self._run(writes, DEPTH)
        return step_rates(began, [end for _, end in spans], self._block_bytes)

    def _reads(self, num_blocks: int) -> Iterator[Operation]:
        """Return reads of the first blocks, again and again; only once through the page cache."""
        indices: Iterable[int] = range(num_blocks)
        if self.is_direct:
            indices = itertools.cycle(indices)
        return ((False, index) for index in indices)

    def _turns(self) -> Iterator[Operation]:
        """Yield mixed turns: reads of the first half of the blocks among writes to the second half."""
        # Two halves, so that no block is read and written at the same time.
        half = len(self._extents) // 2
        reads = self._reads(half)
        writes = itertools.cycle(range(half, len(self._extents)))
        for turn in itertools.count():
            # The even ones of 13 operations are reads and the odd ones writes, so the two are spread among each other.
            if turn % (MIXED_READS + MIXED_WRITES) % 2:
                yield True, next(writes)
            elif (operation := next(reads, None)) is not None:
                yield operation
            else:
                return

    def _measure(
        self, operations: Iterator[Operation], ways: tuple[int, ...], seconds: float, window_s: float | None = None
    ) -> Flow:
        """Do operations for so many seconds, and return how it went.

        Args:
            operations: reads and writes.
            ways: the counters of the block device that count: 0 for reads, 1 for writes.
            seconds: the time to go on for.
            window_s: the length of the windows whose rates are taken; None: there are none.
        """
        # Without O_DIRECT, pages that are still in RAM would answer reads, and their writing would count here.
        if not self.is_direct:
            self._leave_page_cache()
        before = self._device.moved_bytes()
        began = time.perf_counter_ns()

        # DEPTH counts for each way, and a mixed flow has two.
        spans = self._run(operations, DEPTH * len(ways), began + int(seconds * 1e9))
        if not self.is_direct:
            # Bytes that were written count once they are on the drive.
            self._leave_page_cache()

        ended = time.perf_counter_ns()
        after = self._device.moved_bytes()

        # A counter may be missing in a container, or on a file system over a network.
        counted = None
        if before is not None and after is not None:
            counted = sum(after[way] - before[way] for way in ways)
        times = sorted((end - start) / 1e6 for start, end in spans)
        p50 = quantile(times, 0.5)
        p99 = quantile(times, 0.99)
        ends = [end for _, end in spans]
        windows = () if window_s is None else window_rates(began, ends, self._block_bytes, window_s)
        return Flow(
            num_bytes=len(spans) * self._block_bytes,
            seconds=(ended - began) / 1e9,
            p50_ms=p50,
            p99_ms=p99,
            device_bytes=counted,
            windows=windows,
        )

    def _run(self, operations: Iterable[Operation], window: int, until_ns: int | None = None) -> list[tuple[int, int]]:
        """Do operations until the time is over, and at least one mixed turn; return start and end of each, in ns."""
        flying: deque[FileBatch] = deque()
        spans: list[tuple[int, int]] = []

        def land() -> None:
            batch = flying.popleft()
            batch.wait()
            spans.append(batch.span_ns())

        # Operations are waited for in order, so a slot is reused when its operation has ended.
        for number, (write, index) in enumerate(operations):
            if len(flying) == window:
                land()
            is_over = until_ns is not None and time.perf_counter_ns() >= until_ns

            # A slow drive may not end one turn in the time given, and fewer operations would be no mixture.
            if is_over and number >= MIXED_READS + MIXED_WRITES:
                break
            flying.append(self._submit(write, index, number % window))

        while flying:
            land()

        return spans

    def _submit(self, write: bool, index: int, slot: int) -> FileBatch:
        """Begin to read or write a block."""
        view = self._slot(slot)
        key = f"block {index}"
        extent = self._extents[index]
        size = self._block_bytes
        address = address_of(view, torch.uint8, size)
        if not write:
            return self._files.read(key, extent, 0, size, address)

        # Each granule gets its block's number, so that a block read from the wrong place has wrong checksums.
        view.view(torch.int64)[:: self._stamp_words] = index
        return self._files.write(key, extent, 0, size, address)

    def _slot(self, slot: int) -> torch.Tensor:
        """Return the bytes of a slot."""
        return self._arena.view(slot * self._block_bytes, self._block_bytes)

    def _leave_page_cache(self) -> None:
        """Drop the pages of the file from the page cache, once they are on the drive."""
        file = os.open(self._files.opened(0), os.O_RDWR | os.O_CLOEXEC)
        try:
            # Dirty pages cannot be dropped.
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest number that this share of them does not exceed; 0 if there are none."""
    if not ordered:
        return 0.0
    num_within = max(1, math.ceil(share * len(ordered)))
    return ordered[num_within - 1]


def step_rates(began_ns: int, ends_ns: Iterable[int], block_bytes: int) -> tuple[float, ...]:
    """Return the bytes per second of each whole GiB, from the moments at which blocks were written.

    If all blocks together are less than a GiB, the rate is that of all of them.
    """
    ends = sorted(ends_ns)

    # A block may be larger than a step, and then each step is one block.
    blocks = max(1, SUSTAINED_STEP_BYTES // block_bytes)
    blocks = min(blocks, max(1, len(ends)))
    num_bytes = blocks * block_bytes
    marks = [began_ns, *ends[blocks - 1 :: blocks]]
    rates = []
    for start, end in itertools.pairwise(marks):
        # Two blocks may have one moment, as far as the clock can tell.
        lasted_ns = max(1, end - start)
        rates.append(num_bytes * 1e9 / lasted_ns)
    return tuple(rates)


def window_rates(began_ns: int, ends_ns: Iterable[int], block_bytes: int, seconds: float) -> tuple[float, ...]:
    """Return the bytes per second of each stretch of time. The blocks after the last whole stretch are left out.

    Args:
        began_ns: when the flow began.
        ends_ns: when its blocks were done.
        block_bytes: the size of a block.
        seconds: the least time of a stretch. It also has at least as many blocks as a mixed turn.
    """
    rates: list[float] = []
    start = began_ns
    count = 0
    for end in sorted(ends_ns):
        count += 1
        if end - start >= seconds * 1e9 and count >= MIXED_READS + MIXED_WRITES:
            rates.append(count * block_bytes * 1e9 / (end - start))
            start = end
            count = 0

    return tuple(rates)
