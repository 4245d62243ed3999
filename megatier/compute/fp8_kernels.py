"""A Triton kernel that transposes a matrix to FP8, and optionally scales and rounds its rows first.

A transpose that the compiler fuses into another kernel reads or writes single bytes, a row's length apart. Here both
reads and writes go along rows of memory. `fp8.transpose_fp8` is the caller.

Import it only if CUDA is available: Triton comes with torch's CUDA builds alone. Launches go to the current stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

BLOCK = 128
"""The side of one program's block: 16 KiB of FP8."""
_NUM_WARPS = 8

_jit: Callable[[Callable[..., Any]], Any] = triton.jit(do_not_specialize=["rows"])
"""Not specialised on the number of rows, which is the number of tokens of a batch."""


def transpose(matrix: Tensor, factor: Tensor | None, padded: int) -> Tensor:
    """Transpose a matrix to FP8, padded with zeros.

    Args:
        matrix: contiguous [M, N], e4m3; or, with a factor, bf16 too.
        factor: fp32 [M], by which each row is multiplied before it is rounded.
        padded: the length of the result's rows, at least M.

    Returns:
        e4m3 [N, padded].
    """
    rows, columns = matrix.shape
    result = torch.empty(columns, padded, dtype=torch.float8_e4m3fn, device=matrix.device)

    # Without a factor the numbers stay the same, so they are moved as bytes.
    has_factor = factor is not None
    source, target = matrix, result
    if not has_factor:
        source = matrix.view(torch.uint8)
        target = result.view(torch.uint8)

    grid = triton.cdiv(padded, BLOCK), triton.cdiv(columns, BLOCK)
    launch = _transpose_block[grid]
    launch(source, factor, target, rows, columns, padded, has_factor, BLOCK, num_warps=_NUM_WARPS)
    return result


@_jit
def _transpose_block(
    source: tl.tensor,
    factor: tl.tensor,
    target: tl.tensor,
    rows: tl.int64,
    columns: tl.int32,
    padded: tl.int32,
    has_factor: tl.constexpr,
    size: tl.constexpr,
) -> None:
    """Transpose one block."""
    # In 64 bits, since a matrix may have more than 2^31 elements.
    first_row = tl.program_id(0).to(tl.int64) * size
    row = first_row + tl.arange(0, size)
    first_column = tl.program_id(1).to(tl.int64) * size
    column = first_column + tl.arange(0, size)

    is_there = (row[:, None] < rows) & (column[None, :] < columns)
    read_from = source + row[:, None] * columns + column[None, :]
    block = tl.load(read_from, mask=is_there)

    if has_factor:
        of_rows = tl.load(factor + row, mask=row < rows, other=0)
        block = block.to(tl.float32) * of_rows[:, None]
        block = block.to(target.dtype.element_ty)

    # Transposed after rounding, so that threads exchange half as many bytes.
    is_wanted = (column[:, None] < columns) & (row[None, :] < padded)
    block = tl.where(is_there, block, tl.zeros_like(block))
    write_to = target + column[:, None] * padded + row[None, :]
    tl.store(write_to, tl.trans(block), mask=is_wanted)
