"""Figures of drives and links as a probe finds them, for tests."""

from __future__ import annotations

import dataclasses

from megatier.measure.drive_probe import DriveFigures
from megatier.measure.drive_traffic import BLOCK_BYTES, Flow
from megatier.measure.link_probe import CopyFigures, LinkFigures, UpdateFigures

SECONDS = 0.01
GB = 10**9


def flow(bytes_per_s: float = 2 * GB, counted: float | None = 1.0) -> Flow:
    return Flow(
        num_bytes=10 * GB,
        seconds=10 * GB / bytes_per_s,
        p50_ms=1.0,
        p99_ms=2.0,
        device_bytes=None if counted is None else int(10 * GB * counted),
    )


def figures(read: Flow | None = None, **other: object) -> DriveFigures:
    """A drive at 2 GB/s with nothing to say about it."""
    plain = DriveFigures(
        directory="/mnt/a",
        device="vda",
        logical_block_bytes=512,
        num_drives=1,
        file_system="ext4",
        is_direct=True,
        alignment_bytes=4096,
        size_bytes=1 << 33,
        block_bytes=BLOCK_BYTES,
        read=read or flow(),
        write=flow(),
        mixed=flow(),
        sustained_bytes_per_s=(),
        knee_bytes=None,
    )
    return dataclasses.replace(plain, **other)  # type: ignore[arg-type]


LINKS = LinkFigures(
    device="cpu",
    copies=(
        CopyFigures(
            device="cpu",
            to_gpu_bytes_per_s=1.0,
            to_ram_bytes_per_s=2.0,
            to_gpu_both_bytes_per_s=3.0,
            to_ram_both_bytes_per_s=4.0,
        ),
    ),
    updates=(
        UpdateFigures(
            threads=1,
            parameters_per_s=5.0,
            memory_bytes_per_s=130.0,
            shared_parameters_per_s=4.0,
            shared_to_gpu_bytes_per_s=1.0,
            shared_to_ram_bytes_per_s=1.0,
            shared_memory_bytes_per_s=106.0,
        ),
        UpdateFigures(
            threads=2,
            parameters_per_s=10.0,
            memory_bytes_per_s=260.0,
            shared_parameters_per_s=9.0,
            shared_to_gpu_bytes_per_s=2.0,
            shared_to_ram_bytes_per_s=3.0,
            shared_memory_bytes_per_s=239.0,
        ),
    ),
    gpu_update_parameters_per_s=11.0,
    matmul_flops_per_s=12.0,
    flops_per_s=13.0,
)
