"""Muon on one matrix is torch's, but for the iterations, in any part of a unit's planes.

And a master is split as the C code splits it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from muon_reference import let_torch_iterate_as_we_do
from torch import Tensor

from megatier.layout import Layout
from megatier.optim import muon as optim_muon
from megatier.optim.adamw import Scalars
from megatier.optim.masters import join_master, split_by_torch, split_master
from megatier.optim.muon import Muon, matrices_of
from megatier.optim.newton_schulz import flops
from megatier.state import ADAMW_FP32, MUON
from megatier.tier import Kind

SHAPES = [(24, 40), (40, 24), (32, 32), (1, 7), (300, 20)]
RATE, DECAY, MOMENTUM = 3e-3, 0.1, 0.9


def scalars(grad_scale: float = 1.0) -> Scalars:
    return Scalars(1 - RATE * DECAY, 1, RATE, MOMENTUM, (0.0,) * 7 + (grad_scale,))


def layout_of(shapes: dict[str, tuple[int, ...]], compute_dtype: str) -> Layout:
    made = Layout.of(shapes.items())
    return Layout(made.tensors, made.num_elements, made.num_trained, MUON[compute_dtype])


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("compute_dtype", ["bf16", "fp32"])
def test_update_of_a_matrix_in_a_unit_is_that_of_torchs_muon_with_our_iterations(
    shape: tuple[int, int], compute_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_torch_iterate_as_we_do(monkeypatch)
    torch.manual_seed(0)
    layout = layout_of({"first": (3, 5), "matrix": shape, "last": (2, 2)}, compute_dtype)
    place = layout.tensors[1]
    master = torch.randn(shape)
    planes = {
        kind: torch.zeros(layout.num_elements * MUON[compute_dtype].width(kind), dtype=torch.uint8)
        for kind in MUON[compute_dtype].kinds
    }
    weight = planes[Kind.WEIGHT].view(torch.bfloat16 if compute_dtype == "bf16" else torch.float32)
    run = slice(place.start, place.stop)
    if compute_dtype == "bf16":
        split_master(master.flatten(), weight[run], planes[Kind.REMAINDER].view(torch.int16)[run])
    else:
        weight[run] = master.flatten()

    expected = torch.nn.Parameter(master.clone())
    options: dict[str, Any] = {"momentum": MOMENTUM, "adjust_lr_fn": "match_rms_adamw"}
    theirs = torch.optim.Muon([expected], lr=RATE, weight_decay=DECAY, **options)
    muon = Muon({"unit": layout})
    for _ in range(3):
        grad = torch.zeros(layout.num_elements, dtype=weight.dtype)
        grad[run] = torch.randn(place.num_elements)
        expected.grad = grad[run].float().view(shape) * 0.5
        theirs.step()
        before = grad.clone()
        muon.apply("unit", (0, layout.num_elements), planes, as_bytes(grad), scalars(0.5))
        assert torch.equal(grad, before)

    found = weight[run].float()
    if compute_dtype == "bf16":
        join_master(weight[run], planes[Kind.REMAINDER].view(torch.int16)[run], found)
    assert torch.equal(found.view(shape), expected.detach())
    buffer = theirs.state[expected]["momentum_buffer"]
    assert torch.equal(planes[Kind.MOMENTUM].view(torch.float32)[run].view(shape), buffer)
    rest = torch.ones(layout.num_elements, dtype=torch.bool)
    rest[run] = False
    assert not weight[rest].any()


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_experts_of_a_stack_are_updated_as_matrices_of_their_own_however_many_at_once(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optim_muon, "BATCH_ELEMENTS", at_once * 350)
    torch.manual_seed(0)
    stacked = layout_of({"experts": (3, 5, 70)}, "fp32")
    single = layout_of({"expert": (1, 5, 70)}, "fp32")
    grads, weights = torch.randn(3, 350), torch.randn(3, 350)
    planes = {kind: torch.zeros(stacked.num_elements) for kind in MUON["fp32"].kinds}
    planes[Kind.WEIGHT][:1050] = weights.flatten()
    grad = torch.zeros(stacked.num_elements)
    grad[:1050] = grads.flatten()
    muon = Muon({"stack": stacked, "one": single})
    muon.apply("stack", (0, stacked.num_elements), planes, grad, scalars())

    for index in range(3):
        own = {kind: torch.zeros(single.num_elements) for kind in MUON["fp32"].kinds}
        own[Kind.WEIGHT][:350] = weights[index]
        own_grad = torch.zeros(single.num_elements)
        own_grad[:350] = grads[index]
        muon.apply("one", (0, single.num_elements), own, own_grad, scalars())
        for kind, plane in own.items():
            assert torch.equal(planes[kind][350 * index : 350 * index + 350], plane[:350])


def test_runs_are_matrices_with_the_padding_behind_them_and_cover_the_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim_muon, "BATCH_ELEMENTS", 24)
    shapes = {"a": (3, 5), "stack": (2, 4, 6), "b": (30, 70)}
    layout = layout_of(shapes, "bf16")
    muon = Muon({"layer": layout, "head": Layout(layout.tensors, layout.num_elements, 2048, ADAMW_FP32)})
    assert muon.runs("layer") == [(0, 128), (128, 152), (152, 256), (256, layout.num_elements)]
    assert muon.runs("head") == []
    assert [found.shape for found in matrices_of(layout)] == [(3, 5), (1, 4, 6), (1, 4, 6), (30, 70)]


def test_flops_are_those_of_newton_schulz() -> None:
    [matrix] = matrices_of(layout_of({"matrix": (300, 20)}, "bf16"))
    [stack] = matrices_of(layout_of({"stack": (4, 300, 20)}, "bf16"))
    assert matrix.flops == flops((300, 20))
    assert stack.flops == flops((4, 300, 20))


def test_split_by_torch_is_that_of_the_c_code() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), generator=generator).int()
    special = torch.tensor(
        [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 3.4e38, 1e-45, 1.00390625, -1.01171875]
    )
    master = torch.cat([bits.view(torch.float32), special])
    expected = torch.empty(len(master), dtype=torch.bfloat16), torch.empty(len(master), dtype=torch.int16)
    found = torch.empty_like(expected[0]), torch.empty_like(expected[1])
    split_master(master, *expected)
    split_by_torch(master, *found)
    assert torch.equal(as_bytes(found[0]), as_bytes(expected[0]))
    assert torch.equal(found[1], expected[1])
