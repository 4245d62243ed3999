"""A kernel of our own turns FP8 matrices on a GPU: its bits are those of torch on the CPU."""

from __future__ import annotations

import pytest
import torch

from megatier.compute.fp8 import FP8_DTYPE, transpose_fp8


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 16), (21, 32), (64, 48), (128, 128), (200, 272), (4097, 80)])
@pytest.mark.parametrize("kind", ["as it is", "multiplied", "rounded"])
def test_fp8_transpose_on_a_gpu_has_the_bits_that_it_has_on_the_cpu(kind: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    numbers = torch.randn(shape).to(torch.bfloat16)
    matrix = numbers if kind == "rounded" else (numbers.float() * 64).to(FP8_DTYPE)
    # Some are so small that numbers become subnormal, or 0. None is above 1, since products never leave FP8's range,
    # behind which a GPU gives the largest number and a CPU NaN.
    factor = None if kind == "as it is" else 2.0 ** (torch.arange(shape[0])[:, None] % 19 - 18)
    wanted = transpose_fp8(matrix, factor)
    found = transpose_fp8(matrix.cuda(), None if factor is None else factor.cuda())
    assert torch.equal(found.cpu().view(torch.uint8), wanted.view(torch.uint8))
