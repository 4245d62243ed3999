"""Traffic on one drive, as the store makes it: blocks in block files, native I/O, checksums, slots of an arena.

Files are removed whatever happens but kill -9.
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
from megatier.config.values import MountBudget
from megatier.drives.blockfile import BlockFiles, FileBatch, IoOptions
from megatier.drives.extent import STRIPE_BYTES
from megatier.measure.block_device import block_device
from megatier.measure.link_traffic import UpdateTraffic
from megatier.numerics.optimizer import adamw_threads
from megatier.store.arena import Arena

BLOCK_BYTES = STRIPE_BYTES
"""A plane of moments of the largest update chunk: what the store moves at once."""
BYTES_OF_MOMENT = 4
DEPTH = 4
"""Blocks in flight in each direction."""
MIXED_READS = 7
MIXED_WRITES = 6
"""14 to 12: what a spilled parameter is read and written in a step."""
UPDATED_AT = (6, 12)
"""Operations of a mixed turn at which AdamW gets another chunk."""
MIXED_WINDOWS = 6
"""Times that of the other flows for which the mixed one goes on: what binds a step, and drives waver."""

SUSTAINED_STEP_BYTES = 1 << 30

Operation = tuple[bool, int]
"""(write, index of the block)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Blocks moved one after the other, several in flight."""

    num_bytes: int
    seconds: float
    p50_ms: float
    """Of one block, from the start of its first request to the end of its last."""
    p99_ms: float
    device_bytes: int | None
    """What the block device counted meanwhile, others' traffic included; None where nothing counts."""
    windows: tuple[float, ...] = ()
    """Bytes per second in one stretch of time after the other; empty where the flow is one stretch."""

    @property
    def bytes_per_s(self) -> float:
        """The rate: that of the median window where there are several."""
        return statistics.median(self.windows) if self.windows else self.num_bytes / self.seconds


class UpdatesBeside:
    """AdamW on as many parameters as blocks are read of, while they are read and written."""

    def __init__(self, num_elements: int, threads: int) -> None:
        """Allocate two chunks of so many parameters: one is updated while the one before ends.

        Raises:
            CapacityError: there is less memory.
        """
        self._traffic = UpdateTraffic(torch.device("cpu"), 2 * num_elements, chunk_elements=num_elements)
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
        """The operations, with two updates begun in each mixed turn: so many parameters its 7 blocks hold."""
        chunks = itertools.cycle(range(2))
        for number, operation in enumerate(operations):
            if number % (MIXED_READS + MIXED_WRITES) in UPDATED_AT:
                if len(self._flying) == 2:
                    self._flying.popleft().wait()
                self._flying.append(self._traffic.submit(self._pool, next(chunks)))
            yield operation


class BlockTraffic:
    """A block file filled with blocks, and slots in RAM through which they are written and read."""

    def __init__(self, directory: Path, num_blocks: int, block_bytes: int, options: IoOptions, *, pin: bool) -> None:
        """Create the file at full size and fill it: first writes are slower, reads of what was never written faster.

        Raises:
            ConfigError, CapacityError, TransferError: the mount cannot be used, is full, or failed.
        """
        run_id = f"bench-{secrets.token_hex(6)}"
        self._block_bytes = block_bytes
        self._stamp_words = options.chunk_bytes // 8
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

    def updated(self, seconds: float, threads: int) -> Flow:
        """The same as updates of what spills do it, for MIXED_WINDOWS times as long: AdamW runs on what was read.

        Through the page cache there are no windows, since what is written counts in the end alone.
        """
        with UpdatesBeside(self._block_bytes // BYTES_OF_MOMENT, threads) as updates:
            window_s = seconds if self.is_direct else None
            return self._measure(updates.among(self._turns()), (0, 1), MIXED_WINDOWS * seconds, window_s)

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
        reads = self._reads(half)
        writes = itertools.cycle(range(half, len(self._extents)))
        for turn in itertools.count():
            if turn % (MIXED_READS + MIXED_WRITES) % 2:
                yield True, next(writes)
            elif (operation := next(reads, None)) is not None:
                yield operation
            else:
                return

    def _measure(
        self, operations: Iterator[Operation], ways: tuple[int, ...], seconds: float, window_s: float | None = None
    ) -> Flow:
        """Ways: 0, reading; 1, writing; or both. With the rates of windows so long, if that is given."""
        if not self.is_direct:
            self._leave_page_cache()
        before = self._device.moved_bytes()
        began = time.perf_counter_ns()
        spans = self._run(operations, DEPTH * len(ways), began + int(seconds * 1e9))
        if not self.is_direct:
            self._leave_page_cache()  # what is written counts once it is on the drive

        ended = time.perf_counter_ns()
        after = self._device.moved_bytes()
        counted = None if before is None or after is None else sum(after[way] - before[way] for way in ways)
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
        key = f"block {index}"
        extent = self._extents[index]
        size = self._block_bytes
        address = view.data_ptr()
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


def quantile(ordered: Sequence[float], share: float) -> float:
    """The least number that so large a share of them does not exceed; 0 of nothing."""
    return ordered[max(1, math.ceil(share * len(ordered))) - 1] if ordered else 0.0


def step_rates(began_ns: int, ends_ns: Iterable[int], block_bytes: int) -> tuple[float, ...]:
    """Bytes per second of each whole GiB, from the moments at which blocks were written; of all if it is less."""
    ends = sorted(ends_ns)
    per_step = min(max(1, SUSTAINED_STEP_BYTES // block_bytes), max(1, len(ends)))
    marks = [began_ns, *ends[per_step - 1 :: per_step]]
    return tuple(per_step * block_bytes * 1e9 / max(1, b - a) for a, b in itertools.pairwise(marks))


def window_rates(began_ns: int, ends_ns: Iterable[int], block_bytes: int, seconds: float) -> tuple[float, ...]:
    """Bytes per second of each stretch of so many seconds and at least one mixed turn; what is left over is left out.

    Args:
        began_ns: when the flow began.
        ends_ns: when its blocks were done.
        block_bytes: of one.
        seconds: of a stretch.
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
