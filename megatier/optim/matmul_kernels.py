"""A Triton kernel that multiplies fp16 matrices, and only the upper half of symmetric products.

A symmetric product is computed in square tiles on and above its diagonal. Each tile is stored twice, at its place and
mirrored, so the result is symmetric in every bit at half the work. Sums are fp32, in the order of the inner dimension
only. So the bits of a product depend only on its two factors, not on the tile of an element or on how many products
share a launch.

Import it only if CUDA is available: Triton comes with torch's CUDA builds alone. Launches go to the current stream.

Source: Zhang, Amsel, Chen, Dao, Gram Newton-Schulz, https://dao-lab.ai/blog/2026/gram-newton-schulz/, whose symmetric
products are in another language.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-not-found]

PANEL = tl.constexpr(8)
"""The width of a panel: columns of tiles that are processed row by row, so that their factors stay in the L2 cache."""

_jit: Callable[[Callable[..., Any]], Any] = triton.jit


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tiling of a product: the rows, columns and inner elements of a tile, pipeline stages, and warps."""

    rows: int = 128
    columns: int = 128
    inner: int = 64
    stages: int = 3
    warps: int = 8


SYMMETRIC = Tiling()
"""For symmetric products, whose tiles are square. Two tiles of 96 KiB each share a multiprocessor."""
GENERAL = Tiling(columns=256)
"""For all other products."""


def launch_symmetric_matmul(
    left: Tensor,
    right: Tensor,
    scale: float,
    *,
    added: Sequence[tuple[float, Tensor]] = (),
    diagonal: float = 0.0,
    columns: bool = False,
    tiling: Tiling = SYMMETRIC,
) -> Tensor:
    """Compute `fp16_matmul.symmetric_matmul` on the GPU. All sides are multiples of `SIDE`."""
    num_products, rows, inner = _sides(left, columns)
    result = left.new_empty(*left.shape[:-2], rows, rows)
    num_tiles = rows // tiling.rows
    grid = num_tiles * (num_tiles + 1) // 2, num_products
    transposed = columns, columns
    _launch(grid, (left, right, result), added, transposed, (rows, rows, inner), (scale, diagonal), tiling)
    return result


def launch_matmul(left: Tensor, right: Tensor, scale: float, tiling: Tiling | None = None) -> Tensor:
    """Compute `fp16_matmul.matmul` on the GPU. All sides are multiples of `SIDE`."""
    num_products, rows, inner = _sides(left, False)
    columns = right.shape[-1]
    result = left.new_empty(*left.shape[:-1], columns)
    if tiling is None:
        tiling = SYMMETRIC if columns % GENERAL.columns else GENERAL
    grid = rows // tiling.rows * (columns // tiling.columns), num_products
    _launch(grid, (left, right, result), (), (False, True), (rows, columns, inner), (scale, None), tiling)
    return result


def _sides(factor: Tensor, transposed: bool) -> tuple[int, int, int]:
    """Return the number of matrices in a factor, and their outer and inner sides."""
    *stack, outer, inner = factor.shape
    num_products = math.prod(stack)
    return (num_products, inner, outer) if transposed else (num_products, outer, inner)


def _launch(
    grid: tuple[int, int],
    tensors: tuple[Tensor, Tensor, Tensor],
    added: Sequence[tuple[float, Tensor]],
    transposed: tuple[bool, bool],
    sides: tuple[int, int, int],
    scalars: tuple[float, float | None],
    tiling: Tiling,
) -> None:
    """Launch the kernel for all tiles of all products. They are symmetric if the scalars have a diagonal."""
    left, right, result = tensors
    tile = tiling.rows, tiling.columns
    # At most two matrices are added. The kernel skips those that are None.
    factors = [factor for factor, _ in added] + [None, None]
    others = [_described(tensor, tile) for _, tensor in added] + [None, None]
    scale, diagonal = scalars
    _multiply[grid](
        _described(left, (tiling.rows, tiling.inner), transposed[0]),
        _described(right, (tiling.columns, tiling.inner), transposed[1]),
        *others[:2],
        _described(result, tile),
        *sides,
        (scale, *factors[:2], diagonal),
        transposed,
        *(*tile, tiling.inner),
        num_stages=tiling.stages,
        num_warps=tiling.warps,
    )


def _described(tensor: Tensor, block: tuple[int, int], transposed: bool = False) -> Any:  # noqa: ANN401 - Triton has no types
    """Return a descriptor of a stack's rows, one matrix below the other, for loads and stores of blocks."""
    return TensorDescriptor.from_tensor(tensor.view(-1, tensor.shape[-1]), list(block[::-1] if transposed else block))


@_jit
def _multiply(
    left: tl.tensor_descriptor,
    right: tl.tensor_descriptor,
    added: tl.tensor_descriptor | None,
    also_added: tl.tensor_descriptor | None,
    result: tl.tensor_descriptor,
    rows: tl.int32,
    columns: tl.int32,
    inner: tl.int32,
    scalars: tl.tuple,
    transposed: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_inner: tl.constexpr,
) -> None:
    """Compute one tile of one product, and store it, mirrored too if the product is symmetric."""
    scale, factor, other_factor, diagonal = scalars
    is_symmetric: tl.constexpr = diagonal is not None
    matrix = tl.program_id(1)
    if is_symmetric:
        tile_row, tile_column = _upper_tile(tl.program_id(0), rows // tile_rows)
    else:
        tile_row, tile_column = _tile(tl.program_id(0), rows // tile_rows, columns // tile_columns)
    row = tile_row * tile_rows
    column = tile_column * tile_columns

    total = tl.zeros((tile_rows, tile_columns), tl.float32)
    for k in range(0, inner, tile_inner):
        of_left = _block(left, matrix, row, rows, k, inner, transposed[0])
        of_right = _block(right, matrix, column, columns, k, inner, transposed[1])
        total = tl.dot(of_left, of_right.T, total)

    total *= scale
    if added is not None:
        total += factor * added.load([matrix * rows + row, column]).to(tl.float32)
    if also_added is not None:
        total += other_factor * also_added.load([matrix * rows + row, column]).to(tl.float32)
    # Nested, since the outer condition is evaluated by the compiler.
    if is_symmetric:  # noqa: SIM102
        if tile_row == tile_column:
            total = _on_diagonal(total, diagonal, tile_rows)

    numbers = total.to(tl.float16)
    result.store([matrix * rows + row, column], numbers)
    if is_symmetric:  # noqa: SIM102
        if tile_row != tile_column:
            result.store([matrix * rows + column, row], numbers.T)


@_jit
def _block(
    factor: tl.tensor_descriptor,
    matrix: tl.tensor,
    outer: tl.tensor,
    num_outer: tl.int32,
    inner: tl.tensor,
    num_inner: tl.int32,
    transposed: tl.constexpr,
) -> tl.tensor:
    """Load a block of a factor, with its outer side first."""
    if transposed:
        return factor.load([matrix * num_inner + inner, outer]).T
    else:  # noqa: RET505  Triton decides at compile time, so it needs both branches
        return factor.load([matrix * num_outer + outer, inner])


@_jit
def _on_diagonal(total: tl.tensor, diagonal: tl.tensor, side: tl.constexpr) -> tl.tensor:
    """Mirror the upper half of a tile on the diagonal, whose halves may be rounded differently, and add to it."""
    row = tl.arange(0, side)[:, None]
    column = tl.arange(0, side)[None, :]
    total = tl.where(row <= column, total, total.T)
    return total + tl.where(row == column, diagonal, 0.0)


@_jit
def _tile(index: tl.tensor, num_rows: tl.int32, num_columns: tl.int32) -> tl.tuple:
    """Return the row and column of a tile of a general product: panel by panel, row by row in each."""
    panel = index // (num_rows * PANEL)
    width = tl.minimum(PANEL, num_columns - panel * PANEL)
    index -= panel * num_rows * PANEL
    return index // width, panel * PANEL + index % width


@_jit
def _upper_tile(index: tl.tensor, num_rows: tl.int32) -> tl.tuple:
    """Return the row and column of a tile on or above the diagonal: panel by panel, rows first, then a triangle."""
    # The panel is estimated from the number of tiles before it. The estimate may be one too high.
    panel = (tl.sqrt(index * 2.0 / (PANEL * PANEL)) + 0.5).to(tl.int32)
    panel = tl.where(index < _tiles_before(panel), panel - 1, panel)
    index -= _tiles_before(panel)

    width = tl.minimum(PANEL, num_rows - panel * PANEL)
    num_above = panel * PANEL * width
    if index < num_above:
        row = index // width
        column = index % width
    else:
        # The columns of the triangle, each one tile longer than the last.
        index -= num_above
        column = ((tl.sqrt(index * 8.0 + 1.0) - 1.0) * 0.5 + 0.01).to(tl.int32)
        row = panel * PANEL + index - column * (column + 1) // 2
    return row, panel * PANEL + column


@_jit
def _tiles_before(panel: tl.tensor) -> tl.tensor:
    """Return the number of tiles on or above the diagonal in all panels before this one."""
    return panel * (panel - 1) // 2 * (PANEL * PANEL) + panel * (PANEL * (PANEL + 1) // 2)
