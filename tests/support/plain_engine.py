"""A second I/O engine, as plain as can be: Python's `preadv` and `pwritev`, in the thread that asks.

It shows that block files need nothing of an engine but what `IoEngine` says.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence

from megatier import _native
from megatier.drives.io_engine import Memory, Segment

Failure = tuple[str, int, int, int, int, int]


class PlainBatch:
    """Over as soon as it is there."""

    def __init__(self, failure: Failure | None, span_ns: tuple[int, int]) -> None:
        self._failure = failure
        self._span_ns = span_ns

    def wait(self) -> bool:
        return True

    def done(self) -> bool:
        return True

    def span_ns(self) -> tuple[int, int]:
        return self._span_ns

    def error(self) -> Failure | None:
        return self._failure


class PlainEngine:
    """Moves one segment after the other, and its granules' checksums after that."""

    def __init__(self, num_threads: int) -> None:
        assert num_threads > 0

    def submit(self, segments: Sequence[Segment], checksums: int, granule_bytes: int, *, writes: bool) -> PlainBatch:
        began = time.perf_counter_ns()
        failure: Failure | None = None
        first = 0
        for index, segment in enumerate(segments):
            failure = failure or self._move(segment, index, writes=writes)
            if checksums and failure is None:
                failure = self._check(segment, index, checksums + 4 * first, granule_bytes, writes=writes)
            first += -(-segment[3] // granule_bytes)
        return PlainBatch(failure, (began, time.perf_counter_ns()))

    def gather(self, target: Memory, parts: Sequence[Segment], checksums: int, granule_bytes: int) -> PlainBatch:
        began = time.perf_counter_ns()
        address, num_bytes = target
        ctypes.memset(address, 0, num_bytes)
        failure: Failure | None = None
        for index, part in enumerate(parts):
            failure = failure or self._move(part, index, writes=False)
        if failure is None:
            failure = self._check((-1, 0, address, num_bytes), 0, checksums, granule_bytes, writes=False)
        return PlainBatch(failure, (began, time.perf_counter_ns()))

    def close(self) -> None:
        pass

    def _move(self, segment: Segment, index: int, *, writes: bool) -> Failure | None:
        file, offset, address, num_bytes = segment
        memory = memoryview((ctypes.c_ubyte * num_bytes).from_address(address))
        moved = 0
        while moved < num_bytes:
            try:
                part = (os.pwritev if writes else os.preadv)(file, [memory[moved:]], offset + moved)
            except OSError as error:
                return "io", error.errno or 0, index, offset + moved, num_bytes, moved
            if not part:
                return "short", 0, index, offset + moved, num_bytes, moved
            moved += part
        return None

    def _check(
        self, segment: Segment, index: int, checksums: int, granule_bytes: int, *, writes: bool
    ) -> Failure | None:
        _, offset, address, num_bytes = segment
        for number, start in enumerate(range(0, num_bytes, granule_bytes)):
            found = _native.checksum(address + start, min(granule_bytes, num_bytes - start))
            stored = ctypes.c_uint32.from_address(checksums + 4 * number)
            if writes:
                stored.value = found
            elif stored.value != found:
                return "checksum", 0, index, offset + start, stored.value, found
        return None
