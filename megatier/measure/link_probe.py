"""Links and processors, measured as a run uses them: the store's lanes between arenas, AdamW's kernels, products.

Nothing is printed. A *flag* says that a figure is not to be believed, a *note* what to know about it.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch

from megatier import _native
from megatier.hardware import ram_available_bytes
from megatier.numerics.optimizer import adamw_threads
from megatier.schedule.jobs import UPDATE_BYTES
from megatier.store.arena import Arena
from megatier.store.lanes import Lanes
from megatier.store.transfer import Transfer
from megatier.tier import PAGE_BYTES, round_up

STATE_BYTES_PER_PARAMETER = 14
"""12 of state, 2 of gradient."""
UPDATE_ELEMENTS = 1 << 27
"""1.9 GB of state and gradient: more than CPU caches hold."""
UPDATE_CHUNK_ELEMENTS = 8 << 20
"""As the store's largest update chunks."""
SCALARS = (0.9, 0.1, 0.999, 0.001, 1e-8, 1e-4, 1.0, 1.0)
STATE_BYTE = 0x3C
"""Any plane filled with it holds numbers of about 0.01."""

COPY_BYTES = 1 << 30
COPY_PIECES = 8
COPY_DEPTH = 2
COPY_LIMIT_BYTES_PER_S = 450e9
"""The fastest link between a CPU and a GPU there is, NVLink-C2C, one way."""
RAM_PARTS = 8
"""Of the available RAM, one such part is used for each kind of traffic."""

MATMUL_SIZE = {"cuda": 8192, "cpu": 2048}
LAYER_EFFICIENCY = {"cuda": 0.90, "cpu": 1.0}
"""FLOP/s of a layer's deterministic forward and backward over those of a large product that goes on for seconds. cuda:
measured, 596 of 662 TFLOP/s, 8B shape on an H200. A product of 50 ms makes 787 there: its power limit acts later. cpu:
not known."""
LAUNCHES_IN_A_ROW = 8


@dataclass(frozen=True, slots=True)
class CopyFigures:
    """Copies between pinned RAM and one GPU; bytes per second."""

    device: str
    """Its name; "cpu" where the native memory copy stands for the link."""
    to_gpu_bytes_per_s: float
    to_ram_bytes_per_s: float
    to_gpu_both_bytes_per_s: float
    """With copies in the other direction going on."""
    to_ram_both_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class UpdateFigures:
    """AdamW on the CPU with split masters, alone and beside copies both ways."""

    threads: int
    parameters_per_s: float
    memory_bytes_per_s: float
    """26 bytes a parameter."""
    shared_parameters_per_s: float
    shared_to_gpu_bytes_per_s: float
    shared_to_ram_bytes_per_s: float
    shared_memory_bytes_per_s: float
    """Of AdamW and the copies together; a copied byte counts once."""


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """All that is no drive."""

    device: str
    """"cuda" or "cpu"."""
    copies: tuple[CopyFigures, ...]
    """Per GPU."""
    updates: tuple[UpdateFigures, ...]
    """Per number of threads, ascending."""
    gpu_update_parameters_per_s: float
    matmul_flops_per_s: float
    """One large product: bf16 on cuda, fp32 on cpu."""
    flops_per_s: float
    """As a layer's forward and backward reach it."""
    notes: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


Work = Callable[[Callable[[], bool]], float]
"""Goes on until told to stop; returns its rate."""


def at_once(works: Mapping[str, Work], seconds: float) -> dict[str, float]:
    """Run all for a while; the rate of each."""
    end = time.perf_counter() + seconds
    with ThreadPoolExecutor(len(works)) as threads:
        running = {name: threads.submit(work, lambda: time.perf_counter() > end) for name, work in works.items()}
        return {name: future.result() for name, future in running.items()}


def alone(work: Work, seconds: float) -> float:
    """Run one for a while; its rate."""
    end = time.perf_counter() + seconds
    return work(lambda: time.perf_counter() > end)


class CopyTraffic:
    """Copies both ways on the store's lanes, between arenas as the store's."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        """Allocate num_bytes on both sides for each direction.

        Raises:
            CapacityError: there is less memory.
        """
        self._piece = max(PAGE_BYTES, num_bytes // COPY_PIECES // PAGE_BYTES * PAGE_BYTES)
        self._way_bytes = COPY_PIECES * self._piece
        self._host = Arena(2 * self._way_bytes, torch.device("cpu"), pin=device.type == "cuda")
        try:
            self._device = Arena(2 * self._way_bytes, device)
            self._lanes = Lanes(device)
        except BaseException:
            self._host.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._lanes.close()
        self._host.close()

    def to_gpu(self, until: Callable[[], bool]) -> float:
        """Copy from RAM; bytes per second."""
        return self._run(0, until)

    def to_ram(self, until: Callable[[], bool]) -> float:
        """Copy to RAM; bytes per second."""
        return self._run(1, until)

    def _run(self, way: int, until: Callable[[], bool]) -> float:
        flying: deque[Transfer] = deque()
        done = 0
        began = time.perf_counter()
        for piece in itertools.cycle(range(COPY_PIECES)):
            offset = way * self._way_bytes + piece * self._piece
            host = self._host.view(offset, self._piece)
            device = self._device.view(offset, self._piece)
            copy = self._lanes.to_ram("copy", host, device) if way else self._lanes.to_gpu("copy", device, host)
            flying.append(copy)
            if len(flying) == COPY_DEPTH:
                flying.popleft().wait()
                done += self._piece
                if until():
                    break

        while flying:
            flying.popleft().wait()
            done += self._piece
        return done / (time.perf_counter() - began)


class UpdateTraffic:
    """AdamW on a state of split masters, chunk by chunk."""

    WIDTHS = (2, 2, 4, 4, 2)
    """Bytes an element of weight, remainder, exp_avg, exp_avg_sq, grad."""

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
        self._chunk = min(chunk_elements, round_up(num_elements))  # planes start at multiples of their width
        self.num_elements = max(1, num_elements // self._chunk) * self._chunk
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
        """Begin to update a chunk, by its number; never one that is being updated."""
        return pool.submit_adamw(self._addresses(chunk * self._chunk), True, [(0, self._chunk, 1.0)], SCALARS)

    def on_cpu(self, threads: int, until: Callable[[], bool]) -> float:
        """Update with native threads; parameters per second."""
        pool = adamw_threads(threads)
        try:
            return self._on_cpu(pool, until)
        finally:
            pool.close()

    def on_gpu(self, seconds: float) -> float:
        """Update with the GPU's kernel; parameters per second."""
        from megatier.numerics.kernels import adamw  # Triton comes with torch's CUDA builds alone

        starts = [self.num_elements * width for width in itertools.accumulate(self.WIDTHS, initial=0)]
        weight, remainder, exp_avg, exp_avg_sq, grad = (
            self._arena.bytes[start:stop] for start, stop in itertools.pairwise(starts)
        )

        def work() -> None:
            adamw((weight, remainder, exp_avg, exp_avg_sq, grad), [(0, self.num_elements, 1.0)], SCALARS)

        return self.num_elements * _repeats_per_s(work, self._arena.bytes.device, seconds)

    def _on_cpu(self, pool: _native.ThreadPool, until: Callable[[], bool]) -> float:
        flying: deque[_native.Batch] = deque()
        done = 0
        began = time.perf_counter()
        chunks = range(self.num_elements // self._chunk)
        depth = min(2, len(chunks))  # the next chunk is queued while one is worked on; never one chunk twice
        for chunk in itertools.cycle(chunks):
            flying.append(self.submit(pool, chunk))
            if len(flying) == depth:
                flying.popleft().wait()
                done += self._chunk
                if until():
                    break

        while flying:
            flying.popleft().wait()
            done += self._chunk
        return done / (time.perf_counter() - began)

    def _addresses(self, start: int) -> tuple[int, int, int, int, int]:
        begins = itertools.accumulate(self.WIDTHS, initial=0)
        weight, remainder, exp_avg, exp_avg_sq, grad = (
            self._arena.address + begin * self.num_elements + width * start
            for begin, width in zip(begins, self.WIDTHS, strict=False)
        )
        return weight, remainder, exp_avg, exp_avg_sq, grad


def matmul_flops_per_s(device: torch.device, size: int, seconds: float) -> float:
    """FLOP/s of a square product: bf16 on cuda, fp32 on cpu."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)

    def work() -> None:
        torch.mm(left, right, out=product)

    return 2.0 * size**3 * _repeats_per_s(work, device, seconds)


def _repeats_per_s(work: Callable[[], None], device: torch.device, seconds: float) -> float:
    """How often a second; on a GPU several in a row, so that it need not wait for the host."""
    has_stream = device.type == "cuda"
    in_a_row = LAUNCHES_IN_A_ROW if has_stream else 1
    work()  # compiles kernels, wakes threads
    if has_stream:
        torch.cuda.synchronize()

    done = 0
    began = time.perf_counter()
    while not done or time.perf_counter() - began < seconds:
        for _ in range(in_a_row):
            work()
        if has_stream:
            torch.cuda.synchronize()
        done += in_a_row

    return done / (time.perf_counter() - began)


def probe_links(
    device: str,
    threads: Sequence[int],
    *,
    seconds: float,
    copy_bytes: int = COPY_BYTES,
    update_elements: int = UPDATE_ELEMENTS,
    matmul_size: int | None = None,
) -> LinkFigures:
    """Measure copies, AdamW and products.

    Args:
        device: "cuda" or "cpu".
        threads: numbers of threads to run AdamW on the CPU with.
        seconds: of each measurement.
        copy_bytes: on each side for each direction; less where RAM is short.
        update_elements: parameters to update; fewer where RAM is short.
        matmul_size: rows and columns of the product; None: as fits the device.

    Raises:
        CapacityError: there is not even so much memory.
    """
    part = ram_available_bytes() // RAM_PARTS
    copy_bytes = min(copy_bytes, part // 2)
    update_elements = min(update_elements, part // STATE_BYTES_PER_PARAMETER)
    devices = [torch.device(device)]
    if device == "cuda":
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]

    host = torch.device("cpu")
    has_gpu = device == "cuda"
    others = tuple(_probe_copies(other, copy_bytes, seconds) for other in devices[1:])
    with (
        CopyTraffic(devices[0], copy_bytes) as copies,
        UpdateTraffic(host, update_elements, pin=has_gpu) as update,
    ):
        first = _copy_figures(devices[0], copies, seconds)
        updates = tuple(_update_figures(update, copies, count, seconds) for count in sorted(set(threads)))

    size = matmul_size or MATMUL_SIZE[device]
    matmul = matmul_flops_per_s(devices[0], size, seconds)
    gpu_update = UpdateTraffic(devices[0], update_elements).on_gpu(seconds) if has_gpu else None
    figures = LinkFigures(
        device=device,
        copies=(first, *others),
        updates=updates,
        gpu_update_parameters_per_s=gpu_update or updates[-1].parameters_per_s,
        matmul_flops_per_s=matmul,
        flops_per_s=matmul * LAYER_EFFICIENCY[device],
        notes=link_notes(device),
    )
    return replace(figures, flags=link_flags(figures))


def _probe_copies(device: torch.device, num_bytes: int, seconds: float) -> CopyFigures:
    with torch.cuda.device(device), CopyTraffic(device, num_bytes) as copies:
        return _copy_figures(device, copies, seconds)


def _copy_figures(device: torch.device, copies: CopyTraffic, seconds: float) -> CopyFigures:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    to_gpu, to_ram = (alone(work, seconds) for work in (copies.to_gpu, copies.to_ram))
    both = at_once({"to_gpu": copies.to_gpu, "to_ram": copies.to_ram}, seconds)
    return CopyFigures(name, to_gpu, to_ram, both["to_gpu"], both["to_ram"])


def _update_figures(update: UpdateTraffic, copies: CopyTraffic, threads: int, seconds: float) -> UpdateFigures:
    work = partial(update.on_cpu, threads)
    parameters_per_s = alone(work, seconds)
    shared = at_once({"update": work, "to_gpu": copies.to_gpu, "to_ram": copies.to_ram}, seconds)
    return UpdateFigures(
        threads=threads,
        parameters_per_s=parameters_per_s,
        memory_bytes_per_s=parameters_per_s * UPDATE_BYTES,
        shared_parameters_per_s=shared["update"],
        shared_to_gpu_bytes_per_s=shared["to_gpu"],
        shared_to_ram_bytes_per_s=shared["to_ram"],
        shared_memory_bytes_per_s=shared["update"] * UPDATE_BYTES + shared["to_gpu"] + shared["to_ram"],
    )


def link_notes(device: str) -> tuple[str, ...]:
    """What to know about the figures."""
    if device == "cuda":
        share = LAYER_EFFICIENCY[device]
        return (f"flops_per_s: {share} of a sustained bf16 product, as measured for layers of 8B shape on an H200",)
    return (
        "no GPU: the native memory copy stands for the link, AdamW on the CPU for AdamW on the GPU",
        "flops_per_s: of a large fp32 product; layers reach less",
    )


def link_flags(figures: LinkFigures) -> tuple[str, ...]:
    """Figures that no machine reaches."""
    return tuple(
        f"{copies.device}: copies at {rate / 1e9:.0f} GB/s, more than any link carries"
        for copies in figures.copies
        for rate in (copies.to_gpu_bytes_per_s, copies.to_ram_bytes_per_s)
        if rate > COPY_LIMIT_BYTES_PER_S
    )
