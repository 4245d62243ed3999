"""The Triton kernel's products against those of the CPU, for every tile of the upper half.

Without a GPU, Triton's interpreter shows which tiles are computed and where they go:
`TRITON_INTERPRET=1 pytest -m gpu -W ignore tests/optim/test_optim_matmul_kernels.py`.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest
import torch
from torch import Tensor

from megatier.optim import fp16_matmul

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
ROWS = [128, 384] if INTERPRETED else [128, 384, 1024, 1152, 4096]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return importlib.import_module("megatier.optim.matmul_kernels")


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).half()


def assert_near(found: Tensor, wanted: Tensor) -> None:
    # Sums in another order may be rounded to the neighbour.
    torch.testing.assert_close(found.cpu().float(), wanted.float(), rtol=2**-10, atol=2e-3)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_symmetric_product_has_all_tiles_and_is_symmetric(kernels: ModuleType, rows: int, columns: bool) -> None:
    x = random(2, 256, rows) if columns else random(2, rows, 256)
    given = x.to(DEVICE)
    gram = kernels.launch_symmetric_matmul(given, given, 0.01, columns=columns)
    assert torch.equal(gram, gram.mT)
    assert_near(gram, fp16_matmul.symmetric_matmul(x, x, 0.01, columns=columns))
    assert torch.equal(kernels.launch_symmetric_matmul(given[1], given[1], 0.01, columns=columns), gram[1])

    other = kernels.launch_symmetric_matmul(gram, gram, 0.05)
    for added in ([(-2.0, gram)], [(-2.0, gram), (3.0, other)]):
        found = kernels.launch_symmetric_matmul(gram, gram, 0.1, added=added, diagonal=3.0)
        assert torch.equal(found, found.mT)
        before = gram.cpu()
        there = [(factor, tensor.cpu()) for factor, tensor in added]
        assert_near(found, fp16_matmul.symmetric_matmul(before, before, 0.1, added=there, diagonal=3.0))


@pytest.mark.parametrize("side", [14, 40])
def test_tiles_of_every_panel_are_computed_once(kernels: ModuleType, side: int) -> None:
    if INTERPRETED and side > 14:
        pytest.skip("too slow")
    x = random(side * 64, 64).to(DEVICE)
    gram = kernels.launch_symmetric_matmul(x, x, 0.1, tiling=kernels.Tiling(rows=64, columns=64, warps=4))
    assert_near(gram, (x.float() @ x.float().mT * 0.1).half().cpu())


@pytest.mark.parametrize("sides", [(128, 384), (256, 256), (384, 128)], ids=str)
def test_product_has_all_tiles(kernels: ModuleType, sides: tuple[int, int]) -> None:
    rows, columns = sides
    left, right = random(2, rows, 256), random(2, 256, columns)
    found = kernels.launch_matmul(left.to(DEVICE), right.to(DEVICE), 0.01)
    assert_near(found, fp16_matmul.matmul(left, right, 0.01))
    assert torch.equal(kernels.launch_matmul(left[1].to(DEVICE), right[1].to(DEVICE), 0.01), found[1])
