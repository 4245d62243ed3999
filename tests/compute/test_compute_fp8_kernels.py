"""A kernel of our own turns FP8 matrices on a GPU: its bits are those of torch on the CPU."""

from __future__ import annotations

import pytest
import torch

from megatier.compute.fp8 import CODES, columns


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 16), (21, 32), (64, 48), (128, 128), (200, 272), (4097, 80)])
@pytest.mark.parametrize("kind", ["as it is", "multiplied", "rounded"])
def test_fp8_columns_on_a_gpu_have_the_bits_that_they_have_on_the_cpu(kind: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    numbers = torch.randn(shape).to(torch.bfloat16)
    matrix = numbers if kind == "rounded" else (numbers.float() * 64).to(CODES)
    # Some are so small that numbers become subnormal, or 0.
    factor = None if kind == "as it is" else 2.0 ** (torch.arange(shape[0])[:, None] % 23 - 18)
    wanted = columns(matrix, factor)
    found = columns(matrix.cuda(), None if factor is None else factor.cuda())
    assert torch.equal(found.cpu().view(torch.uint8), wanted.view(torch.uint8))
