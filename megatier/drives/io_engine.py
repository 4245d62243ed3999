"""I/O engines: how bytes get from open files into memory and back.

An engine is given segments of open files, and the memory that their bytes go to or come from. It moves every byte, or
says which segment failed. It also takes care of checksums: it stores one for each granule that it writes, and compares
that of each granule that it reads. It knows nothing of blocks, extents, locks and errors, which belong to `blockfile`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatier import _native

REQUEST_BYTES = 8 << 20
"""The most bytes of one read or write call."""
GATHERED_BYTES = (2 << 20) - (64 << 10)
"""The most bytes that one request puts together from parts of files. A thread keeps a window for them and the pages
around them, which is one huge page."""
QUEUE_DEPTH_MAX = 1024
"""The most requests that wait for a thread. Submitting a batch that has more of them waits for room."""

Segment = tuple[int, int, int, int]
"""A file descriptor, an offset in that file, an address in memory, and a number of bytes."""
Memory = tuple[int, int]
"""An address, and a number of bytes."""


class IoBatch(Protocol):
    """Segments that are being moved. Any thread may ask, any number of times."""

    def wait(self) -> bool:
        """Block, with the GIL free, until every segment has ended, well or not. An interrupt of it harms nothing."""

    def done(self) -> bool:
        """Return whether every segment has ended. The engine touches none of the memory from then on."""

    def span_ns(self) -> tuple[int, int]:
        """Return when the first request began and when the last one ended, in time.perf_counter_ns."""

    def error(self) -> tuple[str, int, int, int, int, int] | None:
        """Return None, or the first failure as (what, errno, segment, file_offset, expected, found).

        `what` is "io" (errno is set), "short" (the file ended early; expected and found count bytes), or "checksum"
        (file_offset is that of the granule; expected and found are checksums).
        """


class IoEngine(Protocol):
    """Reads and writes files, with several batches at once. Any thread may submit one."""

    def __init__(self, num_threads: int) -> None:
        """Prepare to work on so many requests in each direction at once."""

    def submit(self, segments: Sequence[Segment], checksums: int, granule_bytes: int, *, writes: bool) -> IoBatch:
        """Begin to read or to write.

        Args:
            segments: all of them but the last have whole granules. With O_DIRECT everything is page aligned.
            checksums: the address of one uint32 for each granule of the segments laid end to end. 0: keep no checksums.
            granule_bytes: the bytes under one checksum.
            writes: whether the bytes go from memory to the files, or the other way.
        """

    def gather(self, target: Memory, parts: Sequence[Segment], checksums: int, granule_bytes: int) -> IoBatch:
        """Begin to put memory together from parts of files, with zeros between them, and to verify it.

        Args:
            target: the memory, in whole granules, of which the last may be shorter.
            parts: where its bytes lie, in the order of their addresses. A part may begin at any byte of its file, and
                an error names it as its segment. With O_DIRECT whole pages of the files are read.
            checksums: the address of one uint32 for each granule of the memory.
            granule_bytes: the bytes under one checksum.
        """

    def close(self) -> None:
        """Finish what was submitted, and stop. It is safe to call this twice."""


class NativeEngine:
    """Calls `pread` and `pwrite` in native threads, which never hold the GIL. Each direction has threads of its own."""

    def __init__(self, num_threads: int) -> None:
        """Start the threads, which sleep until something is submitted."""
        # Threads take requests in order, so a read that compute waits for would come after all writes asked for before.
        self._readers = _native.ThreadPool(num_threads, QUEUE_DEPTH_MAX)
        self._writers = _native.ThreadPool(num_threads, QUEUE_DEPTH_MAX)

    def submit(self, segments: Sequence[Segment], checksums: int, granule_bytes: int, *, writes: bool) -> IoBatch:
        """Begin to read or to write; see `IoEngine.submit`."""
        # Requests of at most so many bytes, so that all threads share a large segment.
        pool = self._writers if writes else self._readers
        return pool.submit_io(writes, segments, checksums, granule_bytes, REQUEST_BYTES)

    def gather(self, target: Memory, parts: Sequence[Segment], checksums: int, granule_bytes: int) -> IoBatch:
        """Begin to put memory together from parts of files; see `IoEngine.gather`."""
        # By readers alone: files of the base are never written.
        return self._readers.submit_gather(*target, parts, checksums, granule_bytes, GATHERED_BYTES)

    def close(self) -> None:
        """Finish what was submitted, and stop the threads."""
        self._readers.close()
        self._writers.close()
