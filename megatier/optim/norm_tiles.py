"""Cuts units into tiles, and sums squares of gradients: one sum for each tensor and each tile that it lies in.

The norm is the exact sum of these partial sums, so it does not matter where a unit is cut between tiles.
`gradient_sums` and the kernels share these borders.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from megatier import _native
from megatier.address import address_of
from megatier.layout import TensorSlice

TILE_ELEMENTS = 65_536
"""The elements of a tile of a unit. Each tensor has one partial sum of squares per tile."""
PIECE_ELEMENTS = 64 * TILE_ELEMENTS
"""The elements of one call if several threads share a gradient in RAM: whole tiles, so no partial sum is cut."""


def sum_squares(piece: Tensor) -> Tensor:
    """Return the sum of squares of each tile of a flat bf16 or fp32 tensor, in fp64 on its device."""
    if piece.is_cuda:
        from megatier.optim import kernels  # Triton comes with torch's CUDA builds alone

        return kernels.sum_squares_on_gpu(piece)

    count = piece.numel()
    is_bf16 = piece.dtype is torch.bfloat16
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    source = address_of(piece, dtype, count)
    sums = torch.empty(-(-count // TILE_ELEMENTS), dtype=torch.float64, device="cpu")
    target = address_of(sums, torch.float64, sums.numel())
    _native.sum_squares(source, count, is_bf16, target)
    return sums


def num_tiles(tensor: TensorSlice, origin: int) -> int:
    """Return the number of tiles that a tensor lies in, counted from the element `origin` of its unit."""
    if not tensor.num_elements:
        return 0
    first = (tensor.start - origin) // TILE_ELEMENTS
    end = -(-(tensor.stop - origin) // TILE_ELEMENTS)
    return end - first


def cut_at_tiles(tensor: TensorSlice, origin: int, max_elements: int) -> Iterator[tuple[int, int]]:
    """Cut a tensor into a head up to the first tile border, and runs of whole tiles of at most `max_elements`.

    The head may be empty, and the last run may end inside of a tile.
    """
    # The first tile border at or after the tensor's start. The negated floor division rounds up.
    tiles_before = -((origin - tensor.start) // TILE_ELEMENTS)
    border = origin + tiles_before * TILE_ELEMENTS
    borders = range(border, tensor.stop, max_elements)
    bounds = [tensor.start, *borders, tensor.stop]
    return pairwise(bounds)
