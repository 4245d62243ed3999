"""Checksums of GPU memory by a Triton kernel, with the same bits as native/checksum.c.

A CRC is linear: flipping a bit of a granule flips bits of its checksum that depend only on how far the bit lies from
the end. So words are summed up like the digits of a number (Horner's rule). This goes row by row, 4 KiB at a time, with
a sum for each column. The sum of a column, times a factor for its distance from the end, is its part of the checksum.
Numbers here are polynomials over GF(2) modulo that of the CRC. Their bits are reversed as in C: bit 31 is the number 1,
and addition is xor.

Import this file only if CUDA is available, because only the CUDA builds of torch include Triton. Kernels run on the
current stream.
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
"""Lengths are not compiled in, so one kernel serves all of them."""

ROW_WORDS = tl.constexpr(PAGE_BYTES // 4)
"""The words that are taken at a time, one for each column."""
ROW_WARPS = 4
"""The warps of a program: each of their 128 threads has eight words of a row."""
POLYNOMIAL = tl.constexpr(0x82F63B78)
"""The polynomial of CRC32C."""


def _power(exponent: int) -> int:
    """Return x to the power of `exponent`, as a polynomial: 1, multiplied by x so many times."""
    number = 1 << 31
    for _ in range(exponent):
        # Bits are reversed, so a product with x is a shift to the right.
        number = number >> 1 ^ (POLYNOMIAL.value if number & 1 else 0)
    return number


ROW_STEP = tl.constexpr(_power(8 * PAGE_BYTES // 4))
"""The factor of a word for each row that follows it. native/checksum.c deals the words of a granule to four lanes with
a CRC each, so a lane sees a quarter of every row."""


def checksums(region: torch.Tensor, granule_bytes: int) -> npt.NDArray[np.uint32]:
    """Return the checksum of each granule, as `_native.checksum` gives it. This waits for the current stream.

    Args:
        region: uint8 [n] on the GPU. n is a multiple of 4,096.
        granule_bytes: a multiple of 4,096. The last granule may be shorter.
    """
    num_granules = triton.cdiv(region.numel(), granule_bytes)
    words = region.view(torch.int32)
    granule_words = granule_bytes // 4
    distances = _distances(region.device)
    on_gpu = torch.empty(num_granules, dtype=torch.int32, device=region.device)
    grid = (num_granules,)
    _check[grid](
        words,
        distances,
        on_gpu,
        words.numel(),
        granule_words,
        num_warps=ROW_WARPS,
    )

    # The sums leave out the checksum of zeros, which depends on the length alone.
    on_host = on_gpu.cpu().numpy()
    flipped: npt.NDArray[np.uint32] = on_host.view(np.uint32)
    of_zeros = zero_checksums(region.numel(), granule_bytes)
    return flipped ^ of_zeros


@functools.cache
def _distances(device: torch.device) -> torch.Tensor:
    """Return the factor of each word of a granule's last row.

    It is the checksum of a row in which only bit 31 of that word is set, without the checksum of zeros.
    """
    # Bit by bit, because without that of zeros the checksum of a row is the xor of those of its bits.
    row = np.zeros(ROW_WORDS.value, dtype=np.uint32)
    zero = _native.checksum(row.ctypes.data, row.nbytes)
    distances = np.empty_like(row)
    for word in range(row.size):
        row[word] = 1 << 31
        checksum = _native.checksum(row.ctypes.data, row.nbytes)
        distances[word] = checksum ^ zero
        row[word] = 0

    signed = distances.view(np.int32)
    return torch.from_numpy(signed).to(device)


@_jit
def _check(
    words: tl.tensor, distances: tl.tensor, checksums_out: tl.tensor, count: tl.int64, granule_words: tl.int32
) -> None:
    """Store the checksum of one granule, without the checksum of as many zeros."""
    # 64 bits, because words of a large unit may be more than an int32 counts.
    granule = tl.program_id(0).to(tl.int64)
    start = granule * granule_words
    columns = tl.arange(0, ROW_WORDS)
    step = tl.full([1], ROW_STEP, tl.uint32)
    sums = tl.zeros([ROW_WORDS], tl.uint32)

    # The last granule may be shorter.
    num_words = tl.minimum(count - start, granule_words).to(tl.int32)
    for row in range(0, num_words, ROW_WORDS):
        word = tl.load(words + start + row + columns)
        shifted = _product(sums, step)
        sums = shifted ^ word.to(tl.uint32, bitcast=True)

    # Addition is xor here, so the order in which Triton adds the columns up does not matter.
    factors = tl.load(distances + columns).to(tl.uint32, bitcast=True)
    parts = _product(sums, factors).to(tl.int32, bitcast=True)
    tl.store(checksums_out + granule, tl.xor_sum(parts, 0))


@_jit
def _product(first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """Multiply two polynomials. If one is constant, it should come second: the compiler then computes its powers."""
    total = first ^ first
    for bit in tl.static_range(32):
        total ^= tl.where(((first >> (31 - bit)) & 1) != 0, second, 0)
        second = (second >> 1) ^ ((second & 1) * POLYNOMIAL)
    return total
