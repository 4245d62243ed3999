"""Traffic on links and processors like that of a run: copies on queues between arenas, AdamW, products.

`link_probe` measures its rates. Each kind of traffic runs until it is told to stop, and then returns its rate, so that
several kinds can run at the same time.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from typing import Self

import torch

from megatier import _native
from megatier.compute.fp8 import FP8_DTYPE, FP8_FROM
from megatier.optim.adamw import adamw_threads
from megatier.state import ADAMW_BF16
from megatier.store.arena import Arena
from megatier.store.staging import Staging
from megatier.store.tier_queues import TierQueues
from megatier.store.transfer import Transfer
from megatier.tier import PAGE_BYTES, round_up
from megatier.workers import Workers

STATE_BYTES_PER_PARAMETER = ADAMW_BF16.bytes_per_parameter + ADAMW_BF16.grad_width
"""The bytes of state and gradient of a parameter."""
UPDATE_CHUNK_ELEMENTS = 8 << 20
"""The elements of the store's largest update chunks."""
SCALARS = (0.9, 0.1, 0.999, 0.001, 1e-8, 1e-4, 1.0, 1.0)
"""The scalars of AdamW's kernels (`optim.adamw.step_scalars`), without clipping."""
STATE_BYTE = 0x3C
"""The byte that fills every plane. Its numbers are about 0.01 then."""

COPY_PIECES = 8
"""The pieces that the bytes of one direction are copied in."""
COPY_DEPTH = 2
"""The copies in flight in one direction."""
LAUNCHES_IN_A_ROW = 8
"""The kernels that are launched before the host waits for the GPU."""

Until = Callable[[], bool]
"""Tells traffic when to stop."""
TimedWork = Callable[[Until], float]
"""Traffic of one kind, which returns its rate."""


def at_once(works: Mapping[str, TimedWork], seconds: float) -> dict[str, float]:
    """Run all of them at once for a while. Return the rate of each."""
    # One end for all, so that none goes on alone when the others are over.
    end = time.perf_counter() + seconds

    def run(work: TimedWork) -> float:
        return work(lambda: time.perf_counter() > end)

    with closing(Workers(len(works), "megatier-traffic")) as workers:
        # A thread for each kind of traffic. All of them release the interpreter while they wait.
        rates = workers.map(run, works.values())
        return dict(zip(works, rates, strict=True))


def alone(work: TimedWork, seconds: float) -> float:
    """Run one of them for a while. Return its rate."""
    end = time.perf_counter() + seconds
    return work(lambda: time.perf_counter() > end)


class CopyTraffic:
    """Copies in both directions on the queues of the store, between arenas like those of the store."""

    def __init__(self, device: torch.device, num_bytes: int, *, through_rings: bool = False) -> None:
        """Allocate num_bytes on both sides for each direction. Through rings, those in RAM are not pinned.

        Raises:
            CapacityError: there is less memory.
        """
        # Pieces begin at pages, like slots, so that copies have the alignment of those of a run.
        self._piece = max(PAGE_BYTES, num_bytes // COPY_PIECES // PAGE_BYTES * PAGE_BYTES)
        self._way_bytes = COPY_PIECES * self._piece
        pins = device.type == "cuda" and not through_rings
        self._host = Arena(2 * self._way_bytes, torch.device("cpu"), pin=pins)
        try:
            self._device = Arena(2 * self._way_bytes, device)
            self._queues = TierQueues(device)
            if through_rings:
                self._queues.staging = Staging(None, self._queues.clock)
        except BaseException:
            self._host.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        # Closing the queues finishes the copies that are under way, which still need the arenas.
        self._queues.close()
        self._host.close()

    def to_gpu(self, until: Until) -> float:
        """Copy from RAM; return bytes per second."""
        return self._bytes_per_s(self._begin_to_gpu, until)

    def to_ram(self, until: Until) -> float:
        """Copy to RAM; return bytes per second."""
        return self._bytes_per_s(self._begin_to_ram, until)

    def _bytes_per_s(self, begin: Callable[[int], Transfer], until: Until) -> float:
        pieces_per_s = _pieces_per_s(begin, COPY_PIECES, COPY_DEPTH, until)
        return self._piece * pieces_per_s

    def _begin_to_gpu(self, piece: int) -> Transfer:
        host, device = self._views(piece * self._piece)
        return self._queues.to_gpu("copy", device, host)

    def _begin_to_ram(self, piece: int) -> Transfer:
        # Behind the bytes that go the other way, because both may be under way at once.
        host, device = self._views(self._way_bytes + piece * self._piece)
        return self._queues.to_ram("copy", host, device)

    def _views(self, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the bytes of a piece in RAM and on the GPU."""
        return self._host.view(offset, self._piece), self._device.view(offset, self._piece)


class UpdateTraffic:
    """AdamW on a state of split masters, chunk by chunk."""

    WIDTHS = (*(plane.width for plane in ADAMW_BF16.planes), ADAMW_BF16.grad_width)
    """The bytes of an element of weight, remainder, exp_avg, exp_avg_sq and grad."""

    def __init__(
        self,
        device: torch.device,
        num_elements: int,
        *,
        chunk_elements: int = UPDATE_CHUNK_ELEMENTS,
        pin: bool = False,
    ) -> None:
        """Allocate the state, with small numbers in it.

        Raises:
            CapacityError: there is less memory.
        """
        # Rounded up, so that planes start at multiples of their width.
        self._chunk = min(chunk_elements, round_up(num_elements))
        num_chunks = max(1, num_elements // self._chunk)
        self.num_elements = num_chunks * self._chunk
        self._arena = Arena(self.num_elements * STATE_BYTES_PER_PARAMETER, device, pin=pin)
        self._arena.bytes.fill_(STATE_BYTE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back."""
        self._arena.close()

    def submit(self, pool: _native.ThreadPool, chunk: int) -> _native.Batch:
        """Begin to update the chunk of this number, which must not be under way."""
        addresses = self._addresses(chunk * self._chunk)
        return pool.submit_adamw(addresses, True, [(0, self._chunk, 1.0)], SCALARS)

    def on_cpu(self, threads: int, until: Until) -> float:
        """Update with native threads; return parameters per second."""
        num_chunks = self.num_elements // self._chunk

        # One chunk waits while another one is updated; no chunk is updated twice at once.
        depth = min(2, num_chunks)
        with closing(adamw_threads(threads)) as pool:
            begin = partial(self.submit, pool)
            chunks_per_s = _pieces_per_s(begin, num_chunks, depth, until)
        return self._chunk * chunks_per_s

    def on_gpu(self, seconds: float) -> float:
        """Update with the kernel of the GPU; return parameters per second."""
        # Triton comes with the CUDA builds of torch only.
        from megatier.optim.kernels import adamw

        sizes = [width * self.num_elements for width in self.WIDTHS]
        planes = self._arena.bytes[: sum(sizes)]
        weight, remainder, exp_avg, exp_avg_sq, grad = planes.split(sizes)
        state = (weight, remainder, exp_avg, exp_avg_sq, grad)

        def work() -> None:
            adamw(state, [(0, self.num_elements, 1.0)], SCALARS)

        updates_per_s = _alone_per_s(work, planes.device, seconds)
        return self.num_elements * updates_per_s

    def _addresses(self, start: int) -> tuple[int, int, int, int, int]:
        """Return where each plane has the element `start`. The planes lie one after the other, with all elements."""
        addresses = []
        plane = self._arena.address
        for width in self.WIDTHS:
            addresses.append(plane + width * start)
            plane += width * self.num_elements
        weight, remainder, exp_avg, exp_avg_sq, grad = addresses
        return weight, remainder, exp_avg, exp_avg_sq, grad


def _pieces_per_s(begin: Callable[[int], Transfer | _native.Batch], num_pieces: int, depth: int, until: Until) -> float:
    """Do pieces in turn, so many at once, until something is true. Return how many a second.

    Args:
        begin: begins the piece of a number.
        num_pieces: their number. They are done again and again.
        depth: how many are under way at once.
        until: is asked after each.
    """
    flying: deque[Transfer | _native.Batch] = deque()
    done = 0
    began = time.perf_counter()
    for piece in itertools.cycle(range(num_pieces)):
        flying.append(begin(piece))

        # The next one is enqueued before this one is waited for, so the GPU or the threads never idle.
        if len(flying) == depth:
            flying.popleft().wait()
            done += 1
            if until():
                break

    for last in flying:
        last.wait()
    # What was under way at the end has been waited for, so it counts like its time.
    return (done + len(flying)) / (time.perf_counter() - began)


def matmul_flops_per_s(device: torch.device, size: int, seconds: float) -> float:
    """Return the FLOP/s of a square product, in bf16 on cuda and in fp32 on the CPU."""
    work = square_product(device, size)
    return _product_flops(size) * _alone_per_s(work, device, seconds)


def square_product(device: torch.device, size: int) -> Callable[[], object]:
    """Return a function that multiplies two square matrices, in bf16 on cuda and in fp32 on the CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left = torch.randn(size, size, device=device, dtype=dtype)
    right = torch.randn(size, size, device=device, dtype=dtype)

    # Into one result, so that allocations are not measured.
    out = torch.empty_like(left)
    return partial(torch.mm, left, right, out=out)


def fp8_matmul_flops_per_s(device: torch.device, size: int, seconds: float) -> float | None:
    """Return the FLOP/s of a square product in FP8; None if the GPU has none."""
    if torch.cuda.get_device_capability(device) < FP8_FROM:
        return None

    # torch draws no FP8 numbers.
    shape = (2, size, size)
    left, right = torch.randn(shape, device=device, dtype=torch.float32).to(FP8_DTYPE)
    one = torch.ones((), device=device, dtype=torch.float32)

    # The kernels of FP8 take a second matrix by columns alone.
    by_columns = right.t()
    work = partial(torch._scaled_mm, left, by_columns, one, one, out_dtype=torch.bfloat16)
    per_second = _alone_per_s(work, device, seconds)
    return _product_flops(size) * per_second


def _product_flops(size: int) -> float:
    """Return the FLOPs of a square product: a product and a sum for each of size^3 pairs."""
    return 2.0 * size**3


def _alone_per_s(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return how often a second it can be done, after a first time, which compiles kernels and wakes threads."""
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return alone(partial(repeats_per_s, work, device.type), seconds)


def repeats_per_s(work: Callable[[], object], device: str, until: Until) -> float:
    """Return how often a second it can be done, until something is true."""
    # Several are launched in a row, so that a GPU never idles.
    in_a_row = LAUNCHES_IN_A_ROW if device == "cuda" else 1
    done = 0
    began = time.perf_counter()
    # At least once: on a slow machine the time may be over before, and there would be no rate.
    while not done or not until():
        for _ in range(in_a_row):
            work()

        # Not the whole device, on which collectives may run too.
        if device == "cuda":
            torch.cuda.current_stream().synchronize()
        done += in_a_row

    return done / (time.perf_counter() - began)
