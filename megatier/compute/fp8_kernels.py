"""The transpose of FP8 matrices on a GPU, in Triton: reads and writes are both along lines of memory.

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
