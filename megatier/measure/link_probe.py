"""The probe of links and processors: their rates as a run uses them, with queues, AdamW's kernels and products.

`megatier bench` runs it, and it prints nothing. A *flag* says that a figure is not reliable. A *note* says something
else about a figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from megatier.hardware import Gpu, gpus, ram_available_bytes
from megatier.measure.link_traffic import (
    STATE_BYTES_PER_PARAMETER,
    CopyTraffic,
    UpdateTraffic,
    alone,
    at_once,
    fp8_matmul_flops_per_s,
    matmul_flops_per_s,
)
from megatier.schedule.rates import UPDATE_BYTES

UPDATE_ELEMENTS = 1 << 27
"""The parameters that AdamW updates. They have 1.9 GB of state and gradient, more than the caches of a CPU hold."""
COPY_BYTES = 1 << 30
"""The bytes that are copied in each direction."""
COPY_LIMIT_BYTES_PER_S = 450e9
"""The rate of NVLink-C2C in one direction, which is the fastest link between a CPU and a GPU."""
RAM_PARTS = 8
"""Each kind of traffic uses at most this fraction of the available RAM: one part in so many."""

MATMUL_SIZE = {"cuda": 8192, "cpu": 2048}
"""The rows and columns of the product."""
LAYER_EFFICIENCY = {"cuda": 0.90, "cpu": 1.0}
"""The FLOP/s of a layer's deterministic forward and backward, as a share of those of a large product that goes on for
seconds. On cuda it was measured on an H200 with layers of 8B shape: 596 of 662 TFLOP/s. A product of 50 ms reaches 787
there, because the power limit acts later. For the CPU it is not known."""


FP8_EFFICIENCY = 0.6
"""The same of products in FP8. The rest of the time goes into rounding, and into turning rows into columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyFigures:
    """Rates of copies between pinned RAM and one GPU, in bytes per second."""

    device: str
    """The name of the GPU, or "cpu" if the native memory copy stands for the link."""
    to_gpu_bytes_per_s: float
    """The rate to the GPU, if nothing else is copied."""
    to_ram_bytes_per_s: float
    """The rate to RAM, if nothing else is copied."""
    to_gpu_both_bytes_per_s: float
    """The rate to the GPU, while bytes are copied to RAM as well."""
    to_ram_both_bytes_per_s: float
    """The rate to RAM, while bytes are copied to the GPU as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFigures:
    """Rates of AdamW on the CPU with split masters, alone and while bytes are copied in both directions."""

    threads: int
    """The number of its threads."""
    parameters_per_s: float
    """The parameters that it updates alone."""
    memory_bytes_per_s: float
    """The bytes that it moves alone, 26 for each parameter."""
    shared_parameters_per_s: float
    """The parameters that it updates during the copies."""
    shared_to_gpu_bytes_per_s: float
    """The rate of the copies to the GPU."""
    shared_to_ram_bytes_per_s: float
    """The rate of the copies to RAM."""
    shared_memory_bytes_per_s: float
    """The bytes that AdamW and the copies move together. A copied byte counts once; in unified memory, twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigures:
    """The rates of links, CPU and GPU."""

    device: str
    """The device that computes: "cuda" or "cpu"."""
    copies: tuple[CopyFigures, ...]
    """The copies from and to each GPU."""
    updates: tuple[UpdateFigures, ...]
    """AdamW on the CPU with each number of threads, in ascending order."""
    gpu_update_parameters_per_s: float
    """The parameters that AdamW on the GPU updates."""
    matmul_flops_per_s: float
    """The FLOP/s of one large product, in bf16 on cuda and in fp32 on the CPU."""
    flops_per_s: float
    """The FLOP/s that a layer's forward and backward reach."""
    rings: CopyFigures | None = None
    """Copies from and to RAM that is not pinned, through rings, of the first GPU; None: not measured."""
    locked_bytes: int | None = None
    """RAM that can be pinned; None: no limit was found."""
    fp8_matmul_flops_per_s: float | None = None
    """The FLOP/s of one large product in FP8; None: the GPU has none, or this is a CPU."""
    fp8_flops_per_s: float | None = None
    """The FLOP/s that a layer's products in FP8 reach, with the time of rounding to it."""
    notes: tuple[str, ...] = ()
    """Remarks on the figures."""
    flags: tuple[str, ...] = ()
    """The reasons why figures are not reliable."""

    @property
    def copy_rates(self) -> Iterator[tuple[str, float, float]]:
        """The directions of copies by name, each with its rate alone and with copies in the other direction."""
        for copies in self.copies:
            # Without a GPU, copies inside RAM are measured.
            name = copies.device if self.device == "cuda" else "native copy"
            yield f"{name}: RAM to GPU", copies.to_gpu_bytes_per_s, copies.to_gpu_both_bytes_per_s
            yield f"{name}: GPU to RAM", copies.to_ram_bytes_per_s, copies.to_ram_both_bytes_per_s
        if self.rings is not None:
            yield "through a ring, to GPU", self.rings.to_gpu_bytes_per_s, self.rings.to_gpu_both_bytes_per_s
            yield "through a ring, to RAM", self.rings.to_ram_bytes_per_s, self.rings.to_ram_both_bytes_per_s


def probe_links(
    device: str,
    threads: Sequence[int],
    *,
    seconds: float,
    locked_bytes: int | None = None,
    copy_bytes: int = COPY_BYTES,
    update_elements: int = UPDATE_ELEMENTS,
    matmul_size: int | None = None,
) -> LinkFigures:
    """Measure copies, AdamW and products.

    Args:
        device: "cuda" or "cpu".
        threads: the numbers of threads to run AdamW on the CPU with.
        seconds: the time of each measurement.
        locked_bytes: RAM that can be pinned; None: no limit was found.
        copy_bytes: the bytes on each side for each direction; fewer if RAM or pinned RAM is short.
        update_elements: the parameters to update; fewer if RAM is short.
        matmul_size: the rows and columns of the product; None: a size for the device.

    Raises:
        CapacityError: RAM is too short even for fewer.
    """
    # Copies need two regions in RAM, one for each direction, and copies and updates run at the same time.
    most = ram_available_bytes() // RAM_PARTS
    copy_bytes = min(copy_bytes, most // 2)
    rings_bytes = copy_bytes
    if locked_bytes is not None:
        copy_bytes = min(copy_bytes, locked_bytes // 4)
    update_elements = min(update_elements, most // STATE_BYTES_PER_PARAMETER)

    # A plan uses the rates of the first GPU, but copies are measured for all.
    devices = [torch.device(device)]
    if device == "cuda":
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]

    # The other GPUs come first, one by one. Their regions in RAM are free again before those of the first GPU and of
    # AdamW are allocated.
    host = torch.device("cpu")
    has_gpu = device == "cuda"
    gpu = gpus()[0] if has_gpu else None
    others = tuple(_probe_copies(other, copy_bytes, seconds) for other in devices[1:])
    rings = _probe_copies(devices[0], rings_bytes, seconds, through_rings=True)
    with (
        CopyTraffic(devices[0], copy_bytes) as copies,
        UpdateTraffic(host, update_elements, pin=has_gpu and locked_bytes is None) as update,
    ):
        first = _copy_figures(devices[0], copies, seconds)

        # In unified memory a copy reads and writes the same memory.
        ends = 2 if gpu is not None and gpu.is_unified else 1
        updates = tuple(_update_figures(update, copies, count, seconds, ends) for count in sorted(set(threads)))

    # Last, because copies and AdamW would use the bandwidth of RAM.
    size = matmul_size or MATMUL_SIZE[device]
    matmul = matmul_flops_per_s(devices[0], size, seconds)
    fp8 = fp8_matmul_flops_per_s(devices[0], size, seconds) if has_gpu else None
    gpu_update = UpdateTraffic(devices[0], update_elements).on_gpu(seconds) if has_gpu else None
    figures = LinkFigures(
        device=device,
        copies=(first, *others),
        rings=rings,
        locked_bytes=locked_bytes,
        updates=updates,
        # Without a GPU the CPU updates everything, with the most threads that were tried.
        gpu_update_parameters_per_s=gpu_update or updates[-1].parameters_per_s,
        matmul_flops_per_s=matmul,
        flops_per_s=matmul * LAYER_EFFICIENCY[device],
        fp8_matmul_flops_per_s=fp8,
        fp8_flops_per_s=None if fp8 is None else fp8 * FP8_EFFICIENCY,
        notes=link_notes(gpu),
    )
    return replace(figures, flags=link_flags(figures))


def _probe_copies(device: torch.device, num_bytes: int, seconds: float, *, through_rings: bool = False) -> CopyFigures:
    # Streams are those of the current device.
    current: AbstractContextManager[object] = nullcontext()
    if device.type == "cuda":
        current = torch.cuda.device(device)

    with current, CopyTraffic(device, num_bytes, through_rings=through_rings) as copies:
        return _copy_figures(device, copies, seconds)


def _copy_figures(device: torch.device, copies: CopyTraffic, seconds: float) -> CopyFigures:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    to_gpu = alone(copies.to_gpu, seconds)
    to_ram = alone(copies.to_ram, seconds)

    # A step loads and saves at the same time, and the two ways of a link share the bandwidth of RAM.
    both = at_once({"to_gpu": copies.to_gpu, "to_ram": copies.to_ram}, seconds)
    return CopyFigures(
        device=name,
        to_gpu_bytes_per_s=to_gpu,
        to_ram_bytes_per_s=to_ram,
        to_gpu_both_bytes_per_s=both["to_gpu"],
        to_ram_both_bytes_per_s=both["to_ram"],
    )


def _update_figures(
    update: UpdateTraffic, copies: CopyTraffic, threads: int, seconds: float, ends: int
) -> UpdateFigures:
    work = partial(update.on_cpu, threads)
    parameters_per_s = alone(work, seconds)

    # In a step AdamW and the copies share the bandwidth of RAM, so they are measured together as well.
    shared = at_once({"update": work, "to_gpu": copies.to_gpu, "to_ram": copies.to_ram}, seconds)
    copied = shared["to_gpu"] + shared["to_ram"]
    return UpdateFigures(
        threads=threads,
        parameters_per_s=parameters_per_s,
        memory_bytes_per_s=parameters_per_s * UPDATE_BYTES,
        shared_parameters_per_s=shared["update"],
        shared_to_gpu_bytes_per_s=shared["to_gpu"],
        shared_to_ram_bytes_per_s=shared["to_ram"],
        shared_memory_bytes_per_s=shared["update"] * UPDATE_BYTES + copied * ends,
    )


def link_notes(gpu: Gpu | None) -> tuple[str, ...]:
    """Return remarks on the figures, which are those of a GPU, or of the CPU without one."""
    if gpu is None:
        return (
            "no GPU: the native memory copy stands for the link, AdamW on the CPU for AdamW on the GPU",
            "flops_per_s: of a large fp32 product; layers reach less",
        )
    share = LAYER_EFFICIENCY["cuda"]
    notes = [f"flops_per_s: {share} of a sustained bf16 product, as measured for layers of 8B shape on an H200"]
    if gpu.is_unified:
        notes.append("unified memory: a copy stays within it, and each byte counts twice in what RAM carries")
    if gpu.is_coherent:
        notes.append("the link of the GPU is NVLink-C2C")
    return tuple(notes)


def link_flags(figures: LinkFigures) -> tuple[str, ...]:
    """Return the figures that no machine reaches."""
    flags = []
    for copies in figures.copies:
        for rate in (copies.to_gpu_bytes_per_s, copies.to_ram_bytes_per_s):
            if rate > COPY_LIMIT_BYTES_PER_S:
                flags.append(f"{copies.device}: copies at {rate / 1e9:.0f} GB/s, more than any link carries")
    return tuple(flags)
