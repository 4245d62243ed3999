"""Checksums of GPU memory, in Triton: the bits of native/checksum.c.

A CRC is linear: flipping a bit of a chunk flips bits of its checksum that depend only on how far from the end the bit
lies. So words are summed up like the digits of a number (Horner's rule), a row of 4 KiB at a time, each column by
itself; a column's sum, times its distance from the end, is its part. Numbers here are polynomials over GF(2) modulo the
CRC's, with bits reversed as in C: bit 31 is 1, addition is xor.

Import it only where CUDA is available: Triton comes with torch's CUDA builds alone. Launches go to the current stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

from megatier import _native
from megatier.drives.extent import zero_checksums
from megatier.tier import PAGE_BYTES

_jit: Callable[[Callable[..., Any]], Any] = triton.jit(do_not_specialize=["count"])
"""Lengths are not compiled in: one kernel for all."""

ROW_WORDS = tl.constexpr(PAGE_BYTES // 4)
"""Words that are taken at a time, a column each."""
ROW_WARPS = 4
POLYNOMIAL = tl.constexpr(0x82F63B78)
"""The polynomial of CRC32C."""


def _power(exponent: int) -> int:
    """Multiply 1 by x so many times."""
    number = 1 << 31
    for _ in range(exponent):
        number = number >> 1 ^ (POLYNOMIAL.value if number & 1 else 0)
    return number


ROW_STEP = tl.constexpr(_power(8 * PAGE_BYTES // 4))
"""A word is multiplied by this for each row that follows it. A chunk has four lanes, each with a CRC of its own."""


def checksums(region: torch.Tensor, chunk_bytes: int) -> npt.NDArray[np.uint32]:
    """Take `_native.checksum` of each chunk. It waits for the current stream.

    Args:
        region: uint8 [n] on the GPU; n is a multiple of 4,096.
        chunk_bytes: a multiple of 4,096; the last chunk may be shorter.
    """
    chunks = triton.cdiv(region.numel(), chunk_bytes)
    found = torch.empty(chunks, dtype=torch.int32, device=region.device)
    words = region.view(torch.int32)
    distances = _distances(region.device)
    _check[(chunks,)](words, distances, found, words.numel(), chunk_bytes // 4, num_warps=ROW_WARPS)

    # The sums leave out the checksum of zeros, which depends on the length alone.
    flipped: npt.NDArray[np.uint32] = found.cpu().numpy().view(np.uint32)
    return flipped ^ zero_checksums(region.numel(), chunk_bytes)


@functools.cache
def _distances(device: torch.device) -> torch.Tensor:
    """The factor of each word of a chunk's last row: the checksum of its bit 31 alone, less that of zeros."""
    row = np.zeros(ROW_WORDS.value, dtype=np.uint32)
    zero = _native.checksum(row.ctypes.data, row.nbytes)
    distances = np.empty_like(row)
    for word in range(row.size):
        row[word] = 1 << 31
        distances[word] = _native.checksum(row.ctypes.data, row.nbytes) ^ zero
        row[word] = 0
    return torch.from_numpy(distances.view(np.int32)).to(device)


@_jit
def _check(words: tl.tensor, distances: tl.tensor, found: tl.tensor, count: tl.int64, chunk_words: tl.int32) -> None:
    """Store one chunk's checksum, less that of as many zeros."""
    chunk = tl.program_id(0).to(tl.int64)
    start = chunk * chunk_words
    columns = tl.arange(0, ROW_WORDS)
    step = tl.full([1], ROW_STEP, tl.uint32)
    sums = tl.zeros([ROW_WORDS], tl.uint32)

    for row in range(0, tl.minimum(count - start, chunk_words).to(tl.int32), ROW_WORDS):
        word = tl.load(words + start + row + columns)
        sums = _product(sums, step) ^ word.to(tl.uint32, bitcast=True)

    parts = _product(sums, tl.load(distances + columns).to(tl.uint32, bitcast=True))
    tl.store(found + chunk, tl.xor_sum(parts.to(tl.int32, bitcast=True), 0))


@_jit
def _product(first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """Multiply two polynomials. A constant one belongs second: its powers are then computed by the compiler."""
    total = first ^ first
    for bit in tl.static_range(32):
        total ^= tl.where(((first >> (31 - bit)) & 1) != 0, second, 0)
        second = (second >> 1) ^ ((second & 1) * POLYNOMIAL)
    return total
