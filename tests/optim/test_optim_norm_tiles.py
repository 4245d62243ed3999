"""Sums of squares by tiles, and how a tensor is cut at them. Kernels are compared in test_optim_kernels.py."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from megatier.errors import AddressError
from megatier.layout import TensorSlice
from megatier.optim.norm_tiles import TILE_ELEMENTS, cut_at_tiles, num_tiles, sum_squares


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32])
def test_sum_squares_of_numbers_that_the_code_does_not_read_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(AddressError):
        sum_squares(torch.ones(8, dtype=dtype))


@pytest.mark.parametrize("start", [0, 5, TILE_ELEMENTS, TILE_ELEMENTS + 5])
@pytest.mark.parametrize("origin", [0, 5])
def test_tensor_is_cut_where_tiles_begin_and_nowhere_else(start: int, origin: int) -> None:
    tensor = TensorSlice("weight", (2 * TILE_ELEMENTS + 7,), start)
    runs = [run for run in cut_at_tiles(tensor, origin, TILE_ELEMENTS) if run[0] < run[1]]
    assert [runs[0][0], runs[-1][1]] == [tensor.start, tensor.stop]
    assert all(stop == begin for (_, stop), (begin, _) in pairwise(runs))
    assert all((begin - origin) % TILE_ELEMENTS == 0 for begin, _ in runs[1:])
    assert len(runs) == num_tiles(tensor, origin)
