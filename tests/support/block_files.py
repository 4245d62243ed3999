"""Small block files, and memory to write them from."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatier.config.values import MountBudget
from megatier.drives.blockfile import BlockFiles, IoOptions
from megatier.drives.extent import Extent

GRANULE_BYTES = 4096
NUM_BYTES = 10 * GRANULE_BYTES
MIB = 1 << 20


def memory(num_bytes: int, seed: int | None = None) -> npt.NDArray[np.uint8]:
    """Page-aligned bytes, random or zero."""
    area = np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)
    if seed is not None:
        area[:] = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
    return area


def open_files(*directories: Path, budget: int | None = MIB, run_id: str = "run", **options: Any) -> BlockFiles:
    mounts = [MountBudget(directory, budget) for directory in directories]
    return BlockFiles(mounts, run_id, IoOptions(**{"num_threads": 2, "granule_bytes": GRANULE_BYTES, **options}))


def prepared(files: BlockFiles, *sizes: int) -> list[Extent]:
    extents = [files.reserve(size) for size in sizes]
    files.allocate()
    files.fill()
    return extents


def write(files: BlockFiles, extent: Extent, source: npt.NDArray[np.uint8], start: int = 0) -> None:
    files.write("block", extent, start, start + len(source), source.ctypes.data).wait()


def read(files: BlockFiles, extent: Extent, start: int, stop: int) -> npt.NDArray[np.uint8]:
    target = memory(stop - start)
    files.read("block", extent, start, stop, target.ctypes.data).wait()
    return target
