"""I/O engines: how bytes get from open files into memory and back. Files, extents and locks are `blockfile`'s.

An engine is told segments of open files and the memory that they go to or come from. It moves every byte or says which
segment failed, and it keeps the checksums: it stores one for each chunk that it writes, and compares that of each chunk
that it reads. Everything else (where a block lies, what a failure is called) is decided by those who ask it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatier import _native

REQUEST_BYTES = 8 << 20
"""The most bytes of one read or write call."""
QUEUE_DEPTH_MAX = 1024
"""The most requests that wait for a thread; a batch with more of them waits for room."""

Segment = tuple[int, int, int, int]
"""A file descriptor, an offset in that file, an address in memory, and a number of bytes."""


class IoBatch(Protocol):
    """Segments under way. Any thread may ask, any number of times."""

    def wait(self) -> bool:
        """Block, GIL free, until every segment has ended, well or not. An interrupt in between leaves it whole."""

    def done(self) -> bool:
        """Whether every segment has ended. The engine touches none of the memory from then on."""

    def span_ns(self) -> tuple[int, int]:
        """When the first request began and the last one ended, in time.perf_counter_ns."""

    def error(self) -> tuple[str, int, int, int, int, int] | None:
        """None, or the first failure as (what, errno, segment, file_offset, expected, found).

        `what` is "io" (errno is set), "short" (the file ended early; expected and found are bytes), or "checksum"
        (file_offset is the chunk's; expected and found are checksums).
        """


class IoEngine(Protocol):
    """Reads and writes, several batches at once. Any thread may submit."""

    def __init__(self, num_threads: int) -> None:
        """Be ready to work on so many requests in each direction at once."""

    def submit(self, segments: Sequence[Segment], checksums: int, chunk_bytes: int, *, writes: bool) -> IoBatch:
        """Begin to read or to write.

        Args:
            segments: all but the last have whole chunks; with O_DIRECT everything is page aligned.
            checksums: address of one uint32 for each chunk of the segments laid end to end; 0 for none.
            chunk_bytes: bytes under one checksum.
            writes: from memory to the files; False: from the files to memory.
        """

    def close(self) -> None:
        """Finish what was submitted, and stop. Safe to call twice."""


class NativeEngine:
    """`pread` and `pwrite` in native threads, with threads of its own for each direction; the GIL is never held."""

    def __init__(self, num_threads: int) -> None:
        """Start the threads, which sleep until something is submitted."""
        self._readers = _native.ThreadPool(num_threads, QUEUE_DEPTH_MAX)
        self._writers = _native.ThreadPool(num_threads, QUEUE_DEPTH_MAX)

    def submit(self, segments: Sequence[Segment], checksums: int, chunk_bytes: int, *, writes: bool) -> IoBatch:
        """See `IoEngine`."""
        pool = self._writers if writes else self._readers
        return pool.submit_io(writes, segments, checksums, chunk_bytes, REQUEST_BYTES)

    def close(self) -> None:
        """See `IoEngine`."""
        self._readers.close()
        self._writers.close()
