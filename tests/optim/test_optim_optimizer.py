from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatier.layout import Layout
from megatier.optim.gradient_sums import GradientSums
from megatier.optim.optimizer import RunOptimizer
from megatier.optim.rules import Hyperparameters
from megatier.tier import Kind

LAYOUT = Layout.of([("norm", (70,)), ("weight", (5, 13)), ("bias", (3,)), ("other", (200,))])
"""Padding lies between all of them and behind the last."""


def sums() -> GradientSums:
    return GradientSums({"unit": LAYOUT}, groups=1, num_threads=1, ranks=None)


def planes(count: int) -> dict[Kind, Tensor]:
    """Of a bf16 unit: random where there are parameters, zero where there is padding."""
    generator = torch.Generator().manual_seed(0)
    used = torch.zeros(count)
    for tensor in LAYOUT.tensors:
        used[tensor.start : tensor.stop] = 1
    return {
        Kind.WEIGHT: (torch.randn(count, generator=generator) * used).bfloat16(),
        Kind.REMAINDER: (torch.randint(-99, 99, (count,), generator=generator) * used).to(torch.int16),
        Kind.EXP_AVG: torch.randn(count, generator=generator) * used,
        Kind.EXP_AVG_SQ: torch.rand(count, generator=generator) * used,
    }


@pytest.mark.parametrize("elements", [(0, LAYOUT.num_elements), (64, 256), (128, LAYOUT.num_elements), (70, 100)])
def test_update_into_other_planes_leaves_no_byte_of_them_as_it_was(elements: tuple[int, int]) -> None:
    """Padding too, whatever decays beside it."""
    start, stop = elements
    optimizer = RunOptimizer(
        {"unit": LAYOUT},
        frozenset({"weight", "other"}),
        Hyperparameters(weight_decay=0.1),
        sums(),
        num_threads=2,
    )
    optimizer.begin_step(1, 1e-2)
    optimizer.clip(0.5)
    before = {kind: plane[start:stop] for kind, plane in planes(LAYOUT.num_elements).items()}
    grad = before[Kind.WEIGHT] * 3
    expected = {kind: plane.clone() for kind, plane in before.items()}
    found = {kind: torch.full_like(plane, 77) for kind, plane in before.items()}
    for target, sources in ((expected, {}), (found, before)):
        work = optimizer.apply("unit", elements, target, grad, sources)
        assert work is not None
        assert work.wait()
    optimizer.close()
    optimizer.sums.close()
    assert all(torch.equal(found[kind], expected[kind]) for kind in found)


def test_clip_scales_a_longer_gradient_down_and_a_shorter_one_never_up() -> None:
    optimizer = RunOptimizer({"unit": LAYOUT}, frozenset(), Hyperparameters(clip=1.0), sums(), num_threads=1)
    optimizer.begin_step(1, 1e-2)
    assert [optimizer.clip(norm) for norm in (0.0, 0.5, 4.0)] == [1.0, 1.0, 1 / (4 + 1e-6)]
    optimizer.close()
    optimizer.sums.close()
