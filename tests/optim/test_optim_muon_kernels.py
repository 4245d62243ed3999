"""The Triton kernels of Muon's elements against torch's operations on the CPU.

`TRITON_INTERPRET=1 pytest -m gpu -W ignore tests/optim/test_optim_muon_kernels.py` runs them without a GPU.
"""

from __future__ import annotations

import importlib
import math
import os
from types import ModuleType

import pytest
import torch

from megatier.optim import muon
from megatier.optim.masters import join_master, split_master
from megatier.optim.newton_schulz import SCALE

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device"),
]
SHAPES = [(128, 256), (30, 70), (3, 50, 90), (2, 256, 128), (1, 7)]


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return importlib.import_module("megatier.optim.muon_kernels")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("decay", [0.95, 0.3])
def test_step_begins_as_on_the_cpu(
    kernels: ModuleType, shape: tuple[int, ...], dtype: torch.dtype, decay: float
) -> None:
    torch.manual_seed(0)
    grad, momentum = torch.randn(math.prod(shape)).to(dtype), torch.randn(math.prod(shape))
    there = momentum.clone().to(DEVICE)
    found = kernels.begin_step(grad.to(DEVICE), there, shape, 0.5, decay).cpu()
    wanted = muon._begin_step(grad, momentum, shape, 0.5, decay)

    # torch fuses a product and a sum.
    torch.testing.assert_close(there.cpu(), momentum, rtol=1e-6, atol=1e-7)
    rows, columns = shape[-2:]
    torch.testing.assert_close(found[..., :rows, :columns], wanted, rtol=2**-10, atol=1e-6)
    norms = found.float().norm(dim=(-2, -1))
    assert ((norms - SCALE).abs() < 0.1).all()
    assert not found[..., rows:, :].any()
    assert not found[..., columns:].any()
    assert all(side % 128 == 0 for side in found.shape[-2:])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("is_split", [True, False], ids=["split", "whole"])
def test_step_ends_with_the_bits_of_the_cpu(kernels: ModuleType, shape: tuple[int, ...], is_split: bool) -> None:
    torch.manual_seed(0)
    *stack, rows, columns = shape
    x = torch.zeros(*stack, 256, 256, dtype=torch.float16)
    x[..., :rows, :columns] = torch.randn(shape).half()
    master = torch.randn(math.prod(shape))
    master[:3] = torch.tensor([math.nan, math.inf, -math.inf])
    weight, remainder = master.clone(), None
    if is_split:
        weight, remainder = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
        split_master(master, weight, remainder)

    found = weight.clone().to(DEVICE), None if remainder is None else remainder.clone().to(DEVICE)
    # Powers of two, so that no rounding differs if a product and a sum are fused.
    kernels.end_step(x.to(DEVICE), *found, shape, 0.5, 0.25)
    muon._end_step(x[..., :rows, :columns].contiguous(), weight, remainder, shape, 0.5, 0.25)
    if remainder is None or found[1] is None:
        assert torch.equal(found[0].cpu().nan_to_num(7.0), weight.nan_to_num(7.0))
        return
    masters = [torch.empty_like(master), torch.empty_like(master)]
    join_master(found[0].cpu(), found[1].cpu(), masters[0])
    join_master(weight, remainder, masters[1])
    assert torch.equal(masters[0].view(torch.int32), masters[1].view(torch.int32))


def test_matrix_of_a_stack_has_the_bits_that_it_has_alone(kernels: ModuleType) -> None:
    torch.manual_seed(0)
    shape = (3, 50, 90)
    grad, momentum = torch.randn(13500).to(DEVICE), torch.randn(13500).to(DEVICE)
    one_momentum = momentum[4500:9000].clone()
    x = kernels.begin_step(grad, momentum, shape, 0.5, 0.95)
    one = kernels.begin_step(grad[4500:9000].clone(), one_momentum, shape[1:], 0.5, 0.95)
    assert torch.equal(x[1], one)
    assert torch.equal(momentum[4500:9000], one_momentum)
