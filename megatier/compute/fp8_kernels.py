"""FP8 matrices on a GPU, in Triton: their transpose, and gradients that are rounded as rows and as columns at once.

Reads and writes are along lines of memory, whichever way a matrix is turned.

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
"""Rows and columns of what one program turns: 16 KiB."""
HALF = 64
"""Rows of what one program rounds both ways."""
WARPS = 8

_jit: Callable[[Callable[..., Any]], Any] = triton.jit(do_not_specialize=["rows"])


def transpose(codes: Tensor, padded: int) -> Tensor:
    """Return FP8 [M, N] as [N, padded], with zeros beyond M."""
    rows, columns = codes.shape
    result = torch.empty(columns, padded, dtype=torch.uint8, device=codes.device)
    grid = triton.cdiv(padded, BLOCK), triton.cdiv(columns, BLOCK)
    _transpose[grid](codes.view(torch.uint8), result, rows, columns, padded, BLOCK, num_warps=WARPS)
    return result.view(codes.dtype)


@_jit
def _transpose(source: Any, target: Any, rows: Any, columns: Any, padded: Any, size: tl.constexpr) -> None:  # noqa: ANN401
    """Turn one block."""
    # 64 bits: a matrix may have more than 2^31 elements.
    row = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    column = tl.program_id(1).to(tl.int64) * size + tl.arange(0, size)
    is_there = (row[:, None] < rows) & (column[None, :] < columns)
    block = tl.load(source + row[:, None] * columns + column[None, :], mask=is_there, other=0)
    is_wanted = (column[:, None] < columns) & (row[None, :] < padded)
    tl.store(target + column[:, None] * padded + row[None, :], tl.trans(block), mask=is_wanted)


def both_ways(grad: Tensor, column_factor: Tensor, row_factor: Tensor, dtype: torch.dtype, padded: int) -> list[Tensor]:
    """Return bf16 [M, N] in FP8 twice: times a factor for each column, and turned, times one for each row.

    Args:
        grad: the matrix.
        column_factor: fp32 [N].
        row_factor: fp32 [M].
        dtype: e4m3 or e5m2.
        padded: length of a turned row, with zeros beyond M.
    """
    rows, columns = grad.shape
    straight = torch.empty(rows, columns, dtype=dtype, device=grad.device)
    turned = torch.empty(columns, padded, dtype=dtype, device=grad.device)
    grid = triton.cdiv(padded, HALF), triton.cdiv(columns, BLOCK)
    _both[grid](grad, column_factor, row_factor, straight, turned, rows, columns, padded, HALF, BLOCK, num_warps=WARPS)
    return [straight, turned]


@_jit
def _both(
    grad: Any,  # noqa: ANN401
    column_factor: Any,  # noqa: ANN401
    row_factor: Any,  # noqa: ANN401
    straight: Any,  # noqa: ANN401
    turned: Any,  # noqa: ANN401
    rows: Any,  # noqa: ANN401
    columns: Any,  # noqa: ANN401
    padded: Any,  # noqa: ANN401
    height: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """Round one block both ways."""
    row = tl.program_id(0).to(tl.int64) * height + tl.arange(0, height)
    column = tl.program_id(1).to(tl.int64) * width + tl.arange(0, width)
    is_there = (row[:, None] < rows) & (column[None, :] < columns)
    place = row[:, None] * columns + column[None, :]
    block = tl.load(grad + place, mask=is_there, other=0).to(tl.float32)
    of_columns = tl.load(column_factor + column, mask=column < columns, other=0)
    of_rows = tl.load(row_factor + row, mask=row < rows, other=0)
    tl.store(straight + place, (block * of_columns[None, :]).to(straight.dtype.element_ty), mask=is_there)
    other = (block * of_rows[:, None]).to(turned.dtype.element_ty)
    is_wanted = (column[:, None] < columns) & (row[None, :] < padded)
    tl.store(turned + column[:, None] * padded + row[None, :], tl.trans(other), mask=is_wanted)
