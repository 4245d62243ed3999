"""Checksums in Triton against the C definition, bit for bit.

Without a GPU, Triton's interpreter shows the arithmetic, not what the compiler does:
`TRITON_INTERPRET=1 pytest -m gpu -W ignore tests/drives/test_drives_gpu_checksums.py`.
"""

import importlib
import os
from types import ModuleType

import numpy as np
import pytest
import torch
from from_outside import granule_checksums, pattern

from megatier.tier import PAGE_BYTES

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    pytest.importorskip("triton", reason="needs Triton, which torch's CUDA builds bring")
    return importlib.import_module("megatier.drives.gpu_checksums")


@pytest.mark.parametrize("granule_pages", [1, 2, 16])
@pytest.mark.parametrize("pages", [1, 2, 15, 16, 17, 40])
def test_checksums_equal_those_of_c(kernels: ModuleType, pages: int, granule_pages: int) -> None:
    source = pattern(pages, pages * PAGE_BYTES)
    found = kernels.checksums(source.to(DEVICE), granule_pages * PAGE_BYTES)
    assert np.array_equal(found, granule_checksums(source, granule_pages * PAGE_BYTES))


@pytest.mark.parametrize("byte", [0, 1, 7, 8, 31, 4095, 4096, 65535])
@pytest.mark.parametrize("bit", [0, 7])
def test_checksums_change_with_any_bit(kernels: ModuleType, byte: int, bit: int) -> None:
    source = torch.zeros(16 * PAGE_BYTES, dtype=torch.uint8)
    source[byte] = 1 << bit
    found = kernels.checksums(source.to(DEVICE), source.numel())
    assert np.array_equal(found, granule_checksums(source, source.numel()))
    assert found != kernels.checksums(torch.zeros_like(source).to(DEVICE), source.numel())


def test_checksums_of_a_view_inside_an_arena(kernels: ModuleType) -> None:
    arena = pattern(3, 12 * PAGE_BYTES)
    view = arena[3 * PAGE_BYTES : 9 * PAGE_BYTES]
    found = kernels.checksums(arena.to(DEVICE)[3 * PAGE_BYTES : 9 * PAGE_BYTES], 4 * PAGE_BYTES)
    assert np.array_equal(found, granule_checksums(view, 4 * PAGE_BYTES))


@pytest.mark.skipif(INTERPRETED, reason="too slow interpreted")
def test_checksums_of_a_large_region(kernels: ModuleType) -> None:
    source = pattern(4, 300 << 20)
    found = kernels.checksums(source.to(DEVICE), 64 << 10)
    assert np.array_equal(found, granule_checksums(source, 64 << 10))
