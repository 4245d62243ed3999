"""The native core: thread pool, block I/O, checksums, AdamW. Every call drops the GIL while it works or waits.

Addresses are plain integers (`tensor.data_ptr()`); the caller keeps the memory alive until the batch is done.
"""

from collections.abc import Sequence
from typing import Self, final

@final
class Batch:
    """One submitted operation, split into requests that several threads work on."""

    def wait(self, timeout_s: float = -1.0) -> bool:
        """Block, GIL free, until all requests ended (True) or the time is over (False). Negative: for ever."""
    def done(self) -> bool: ...
    def span_ns(self) -> tuple[int, int]:
        """CLOCK_MONOTONIC nanoseconds (as time.perf_counter_ns) of the first request's start and the last one's end."""
    def error(self) -> tuple[str, int, int, int, int, int] | None:
        """None, or the first failure as (what, errno, segment, file_offset, expected, found).

        what: "io" (errno set; expected and found are byte counts), "short" (the device ended early; byte counts),
        "checksum" (file_offset is the granule's; expected and found are CRCs).
        """

@final
class Latch:
    """An event that is set once.

    Unlike `threading.Event`, whose lock is taken and given back by Python code, an exception that a signal handler
    raises in the waiting thread leaves it whole.
    """

    def __new__(cls) -> Self: ...
    def set(self) -> None:
        """Let everyone pass who waits, from now on. Setting it again has no effect."""
    def wait(self, timeout_s: float = -1.0) -> bool:
        """Block, GIL free, until it is set (True) or the time is over (False). Negative: for ever."""
    def is_set(self) -> bool: ...

@final
class ThreadPool:
    """num_threads native threads over one queue of requests, first in, first out, at most queue_depth_max long.

    Submitting blocks, GIL free, while the queue is full. After a failure the requests of that batch that had not begun
    are skipped. Submitting after close, or in a forked child, raises RuntimeError; impossible arguments ValueError.
    """

    def __new__(cls, num_threads: int, queue_depth_max: int) -> Self: ...
    def submit_io(
        self,
        write: bool,
        segments: Sequence[tuple[int, int, int, int]],
        checksums: int,
        granule_bytes: int,
        request_bytes: int,
    ) -> Batch:
        """Read or write segments of (fd, file_offset, address, num_bytes), cut into requests of at most request_bytes.

        checksums: address of one uint32 per granule_bytes of the segments laid end to end, or 0 for none. A read
        verifies each granule, a write stores each granule's checksum once its bytes are written. Segment lengths are
        multiples of granule_bytes except the last's. Requests hold whole granules, at least one, where checksums are
        used. Retries EINTR and continues after a short transfer; a transfer that gets no further is "short".
        """
    def submit_gather(
        self,
        address: int,
        num_bytes: int,
        parts: Sequence[tuple[int, int, int, int]],
        checksums: int,
        granule_bytes: int,
        request_bytes: int,
    ) -> Batch:
        """Put num_bytes of memory together from parts (fd, file_offset, address, num_bytes), and verify each granule.

        Parts lie in the memory in order and apart, and begin at any byte of their files; what is between them becomes
        zeros. A part is read as whole pages of its file, as O_DIRECT asks, so the memory outside of it is not touched.
        checksums: address of one uint32 per granule_bytes of the memory. The segment of an error is a part.
        """
    def submit_adamw(
        self,
        planes: tuple[int, int, int, int, int],
        split: bool,
        segments: Sequence[tuple[int, int, float]],
        scalars: tuple[float, float, float, float, float, float, float, float],
        before: tuple[int, int, int, int] = ...,
        rounding: tuple[int, int, int] | None = None,
    ) -> Batch:
        """AdamW over planes (weight, remainder, exp_avg, exp_avg_sq, grad), or into them from those before.

        exp_avg_sq 0: Lion, whose momentum is exp_avg, in fp32; step_size is its learning rate then.

        before: weight, remainder, exp_avg and exp_avg_sq; each the plane itself or one that does not overlap it.
        split True: weight is the bf16 plane, remainder its int16 plane, grad bf16. False: weight is the fp32 master,
        remainder 0, grad fp32. segments: (start, stop, decay) in elements; decay is 1 - lr * weight_decay as fp32.
        scalars, each rounded to fp32: beta1, 1 - beta1, beta2, 1 - beta2, eps, step_size = lr / (1 - beta1^t),
        sqrt_bias2 = sqrt(1 - beta2^t), grad_scale. native/adamw.h holds the definition, bit for bit. Segments must not
        overlap. rounding: None where moments are fp32. Where they are rounded stochastically, to bf16 or to 8 bits, the
        bytes of one, the key of 64 bits, and the number in its unit of the planes' first element.
        """
    def submit_copy(self, target: int, source: int, num_bytes: int, request_bytes: int) -> Batch:
        """Copy bytes that do not overlap, in requests of at most request_bytes, which all threads take."""
    def close(self) -> None:
        """Finish what was submitted, then join the threads."""

def copy(target: int, source: int, num_bytes: int) -> None: ...
def fill(target: int, byte: int, num_bytes: int) -> None: ...
def checksum(address: int, num_bytes: int) -> int:
    """Of a granule of a block file; native/checksum.h holds the definition."""

def crc32c(address: int, num_bytes: int) -> int:
    """Plain CRC32C, as other formats store it."""

def split(master: int, weight: int, remainder: int, num_elements: int) -> None:
    """fp32 -> (bf16 rounded half away from zero, int16 remainder). Every NaN becomes (0x7fc0, 0)."""

def join(weight: int, remainder: int, master: int, num_elements: int) -> None: ...
def round_bf16(source: int, target: int, num_elements: int) -> None:
    """fp32 -> bf16, round to nearest even as torch does; every NaN becomes 0x7fc0. target may be source."""

def accumulate(accumulator: int, source: int, num_elements: int, first: bool) -> None:
    """fp32: accumulator += source; first: accumulator = source."""

def sum_squares(address: int, num_elements: int, is_bf16: bool, partials: int) -> None:
    """fp64 sums of squares, one per tile of 65,536 elements (the last may be shorter), in a fixed order.

    Within a tile lane l of 256 adds elements l, l + 256, ... in turn; then the lanes fold: lane l += lane l + 128,
    then + 64, ... + 1.
    A square of an fp32 number is exact in fp64, so fused multiply-add cannot change a bit.
    """

def sum_exactly(address: int, num_elements: int) -> float:
    """Sum of fp64 numbers, rounded once, as math.fsum; the plain sum where one, or a sum on the way, is not finite."""

def isa_levels() -> list[str]:
    """Levels this CPU can run, best first, among "avx512", "avx2", "crc32" (Arm), "portable"."""

def set_isa(level: str) -> None:
    """Use this level from now on (all give the same bits; for tests and benches). ValueError when not supported."""
