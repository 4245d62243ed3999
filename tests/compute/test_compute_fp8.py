"""Products of FP8 numbers: what they are, what they depend on, and what numbers that are not finite come to."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.compilers import nop
from torch._functorch.partitioners import default_partition
from torch.fx import GraphModule
from torch.nn.functional import cosine_similarity, linear

from megatier.compute import fp8
from megatier.compute.compilation import Compilation
from megatier.compute.fp8 import FP8_DTYPE, fits_fp8, set_fp8


def layer_of(inputs: int, outputs: int, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, bias=bias, dtype=torch.bfloat16)
    set_fp8(layer)
    return layer


def rows_of(count: int, width: int, scale: float = 1.0) -> Tensor:
    torch.manual_seed(1)
    return (scale * torch.randn(count, width)).to(torch.bfloat16)


def gradients(layer: nn.Linear, rows: Tensor, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and the gradients of rows and weight."""
    rows = rows.detach().requires_grad_()
    result = layer(rows)
    of_rows, of_weight = torch.autograd.grad(result, [rows, layer.weight], slope)
    return result.detach(), of_rows, of_weight


@pytest.mark.parametrize("count", [32, 21, 1])
def test_fp8_products_are_nearly_those_of_the_same_numbers_in_fp32(count: int) -> None:
    layer, rows, slope = layer_of(64, 48, bias=True), rows_of(count, 64), rows_of(count, 48)
    exact = layer.weight.detach().float(), rows.float(), slope.float()
    expected = linear(exact[1], exact[0], layer.bias.detach().float()), exact[2] @ exact[0], exact[2].t() @ exact[1]
    for found, wanted in zip(gradients(layer, rows, slope), expected, strict=True):
        assert cosine_similarity(found.float().flatten(), wanted.flatten(), 0) > 0.998
        assert float(found.float().norm()) == pytest.approx(float(wanted.norm()), rel=0.02)


def test_fp8_products_are_those_of_numbers_that_fp8_holds_exactly() -> None:
    layer, rows = layer_of(32, 16), torch.randint(-8, 8, (48, 32)).to(torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(torch.randint(-4, 4, (16, 32)))
    slope = torch.randint(-4, 4, (48, 16)).to(torch.bfloat16)
    result, of_rows, of_weight = gradients(layer, rows, slope)
    assert torch.equal(result, linear(rows.float(), layer.weight.float()).to(torch.bfloat16))
    assert torch.equal(of_rows, (slope.float() @ layer.weight.float()).to(torch.bfloat16))
    assert torch.equal(of_weight, (slope.float().t() @ rows.float()).to(torch.bfloat16))


def test_fp8_result_and_gradient_of_a_row_do_not_depend_on_other_rows() -> None:
    layer, rows, slope = layer_of(64, 48), rows_of(32, 64), rows_of(32, 48)
    factor = torch.where(torch.arange(32)[:, None] >= 16, 1e6, 1.0).to(torch.bfloat16)
    result, of_rows, _ = gradients(layer, rows, slope)
    others, of_others, _ = gradients(layer, rows * factor, slope * factor)
    assert torch.equal(result[:16], others[:16])
    assert torch.equal(of_rows[:16], of_others[:16])


def test_fp8_products_take_rows_one_after_the_other_though_inputs_and_gradients_come_by_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The kernels of GPUs refuse anything else; the CPU's takes it.
    layer, product = layer_of(64, 48), torch._scaled_mm
    strides = []

    def multiply(left: Tensor, right: Tensor, *args: Any, **names: Any) -> Tensor:
        strides.append((left.stride(1), right.stride(0)))
        return product(left, right, *args, **names)

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    rows, slope = rows_of(64, 32).t(), rows_of(48, 32).t()
    found = gradients(layer, rows, slope)
    assert strides == [(1, 1)] * 3
    assert all(map(torch.equal, found, gradients(layer, rows.contiguous(), slope.contiguous())))


def test_fp8_gradient_of_a_weight_is_nearly_exact_though_rows_differ_in_size() -> None:
    layer, rows, slope = layer_of(64, 48), rows_of(512, 64), rows_of(512, 48)
    sizes = 2.0 ** torch.arange(-20, 12, dtype=torch.bfloat16).repeat(16)[:, None]
    same = torch.ones_like(sizes)
    for left, right in [(sizes, same), (same, sizes), (sizes, 1 / sizes), (sizes, sizes)]:
        found = gradients(layer, rows * left, slope * right)[2].float()
        wanted = (slope * right).float().t() @ (rows * left).float()
        assert cosine_similarity(found.flatten(), wanted.flatten(), 0) > 0.998
        assert float(found.norm()) == pytest.approx(float(wanted.norm()), rel=0.02)


@pytest.mark.parametrize("scales", [48, 1])
def test_fp8_result_of_a_single_row_over_stored_codes_is_that_among_others(scales: int) -> None:
    codes, rows = rows_of(48, 32, 100).to(FP8_DTYPE), rows_of(16, 32)
    scale = torch.rand(scales, 1) + 0.1
    together = fp8.linear_of_codes(rows, codes, scale, None)
    for number in range(16):
        assert torch.equal(fp8.linear_of_codes(rows[number : number + 1], codes, scale, None)[0], together[number])


def test_fp8_rows_that_fill_up_a_product_change_nothing() -> None:
    layer, rows, slope = layer_of(64, 48), rows_of(32, 64), rows_of(32, 48)
    rows[21:], slope[21:] = 0, 0
    whole, part = gradients(layer, rows, slope)[2], gradients(layer, rows[:21], slope[:21])[2]
    assert torch.equal(whole, part)


@pytest.mark.parametrize("largest", [2.9e38, 448.0, 450.0, 447.0, 1.0, 2.0**-100, 2.0**-120, 1e-39, 0.0])
def test_fp8_scale_is_a_power_of_two_that_makes_the_largest_number_fit(largest: float) -> None:
    rows = torch.tensor([[largest, -largest / 2, 0.0, largest / 64]], dtype=torch.bfloat16)
    codes, scale = fp8.quantise_rows(rows)
    assert math.frexp(scale.item())[0] == 0.5
    top, code = torch.finfo(FP8_DTYPE).max, codes.float().abs().max().item()
    assert code <= top
    if scale.item() > fp8.SCALE_MIN:
        assert code >= top / 2
        assert torch.allclose(codes.float() * scale, rows.float(), rtol=2.0**-3, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_fp8_rows_that_are_not_finite_give_nothing_finite_and_other_rows_do(bad: float) -> None:
    layer, rows, slope = layer_of(64, 48), rows_of(32, 64), rows_of(32, 48)
    rows[3, 5] = bad
    result, of_rows, of_weight = gradients(layer, rows, slope)
    assert not result[3].isfinite().any()
    assert result[torch.arange(32) != 3].isfinite().all()
    assert of_rows.isfinite().all()
    assert not of_weight[:, 5].isfinite().any()

    slope[4, 7] = bad
    _, of_rows, of_weight = gradients(layer, rows_of(32, 64), slope)
    assert not of_rows[4].isfinite().any()
    assert not of_weight[7].isfinite().any()

    with torch.no_grad():
        layer.weight[2, 2] = bad
    assert not layer(rows_of(32, 64))[:, 2].isfinite().any()


def test_fp8_products_of_zeros_no_rows_and_numbers_at_either_end_are_finite() -> None:
    layer = layer_of(64, 48)
    for rows in (torch.zeros(4, 64), rows_of(4, 64, 1e-38), rows_of(4, 64, 5e37), torch.zeros(0, 64)):
        found = gradients(layer, rows.to(torch.bfloat16), torch.ones(len(rows), 48, dtype=torch.bfloat16))
        assert all(part.isfinite().all() for part in found)
        assert found[0].shape == (len(rows), 48)


def test_fp8_layer_under_autocast_takes_inputs_of_another_dtype_and_refuses_them_elsewhere() -> None:
    layer, rows = layer_of(64, 48), rows_of(4, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(rows.float()), layer(rows))
    with pytest.raises(RuntimeError, match="same dtype"):
        layer(rows.float())


@pytest.mark.parametrize(("inputs", "outputs"), [(24, 32), (32, 24), (32, 1)])
def test_fp8_layer_with_sizes_that_are_no_multiples_of_sixteen_is_not_meant(inputs: int, outputs: int) -> None:
    assert fits_fp8(nn.Linear(32, 48, device="meta"))
    assert not fits_fp8(nn.Linear(inputs, outputs, device="meta"))


def test_fp8_scales_of_inputs_and_weights_are_found_in_a_graph_as_fp32_numbers() -> None:
    layer, found = layer_of(32, 48), list[Tensor]()

    def partition(graph: GraphModule, *args: Any, **kwargs: Any) -> Any:
        found.extend(node.meta["val"] for node in fp8.find_scales(graph.graph))
        return default_partition(graph, *args, **kwargs)

    def run(rows: Tensor, weight: Tensor) -> Tensor:
        given = {"weight": weight}
        result: Tensor = torch.func.functional_call(layer, given, nn.functional.rms_norm(rows, (32,)))
        return result

    traced = aot_function(run, fw_compiler=nop, partition_fn=partition)
    traced(rows_of(64, 32).requires_grad_(), layer.weight).sum().backward()
    # None is that of the gradient, which the backward takes.
    assert {(x.dtype, tuple(x.shape)) for x in found} == {(torch.float32, (64, 1)), (torch.float32, (48, 1))}


@pytest.mark.gpu
def test_fp8_compiled_layer_on_cuda_is_as_near_to_fp32_as_an_uncompiled_one() -> None:
    torch.manual_seed(0)
    width, tokens = 768, 4096
    first, last = (layer_of(width, width).cuda() for _ in range(2))
    weight = torch.randn(width, dtype=torch.bfloat16, device="cuda")
    rows, slope = (torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda") for _ in range(2))

    # Rounded to bf16, many of these rows' largest numbers pass from one power of two to the next.
    rows[:, 0] = (1.75 * 2 - 2**-9) / weight[0] * rows[:, 1:].float().square().mean(1).sqrt()

    def run(rows: Tensor) -> Tensor:
        normed = nn.functional.rms_norm(rows, (width,), weight)
        result: Tensor = last(nn.functional.silu(first(normed)))
        return result

    def errors(function: Callable[[Tensor], Tensor]) -> list[float]:
        leaf = rows.detach().requires_grad_()
        result = function(leaf)
        grads = torch.autograd.grad(result, [leaf, first.weight, last.weight], slope)
        pairs = zip((result.detach(), *grads), exact, strict=True)
        return [float((x.float() - y).norm() / y.norm()) for x, y in pairs]

    leaves = [x.detach().float().requires_grad_() for x in (rows, first.weight, last.weight)]
    normed = nn.functional.rms_norm(leaves[0], (width,), weight.float())
    result = linear(nn.functional.silu(linear(normed, leaves[1])), leaves[2])
    exact = (result.detach(), *torch.autograd.grad(result, leaves, slope.float()))
    uncompiled = errors(run)
    for share in (1.0, 0.5):
        assert all(x < 1.1 * y for x, y in zip(errors(Compilation(share)(run, "a layer")), uncompiled, strict=True))


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("share", [1.0, 0.8])
def test_fp8_compiled_layer_saves_no_weight_in_fp8_and_gives_the_same_bits(share: float) -> None:
    first, last = layer_of(32, 48), layer_of(48, 32)

    def run(rows: Tensor) -> Tensor:
        result: Tensor = last(nn.functional.silu(first(nn.functional.rms_norm(rows, (32,)))))
        return rows + result

    found, saved = [], list[Tensor]()
    for function in (run, Compilation(share)(run, "a layer")):
        saved.clear()
        found.append(_kept(function, rows_of(64, 32), saved, [first.weight, last.weight]))
    assert all(map(torch.equal, *found))
    shapes = {(48, 32), (32, 48)}
    assert all(x.dtype is torch.bfloat16 for x in saved if tuple(x.shape) in shapes)


def _kept(
    function: Callable[[Tensor], Tensor], rows: Tensor, saved: list[Tensor], weights: list[Tensor]
) -> tuple[Tensor, ...]:
    """The result and gradients of a function, which saves these tensors."""

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    rows.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = function(rows)
    return result, *torch.autograd.grad(result.float().square().sum(), [rows, *weights])


@pytest.mark.parametrize("scales", [48, 1])
def test_fp8_products_with_a_stored_matrix_read_its_codes_and_keep_nothing_else(scales: int) -> None:
    codes, scale = rows_of(48, 32, 100).to(FP8_DTYPE), torch.rand(scales, 1) + 0.1
    weight, rows, slope = codes.float() * scale, rows_of(21, 32).requires_grad_(), rows_of(21, 48)
    saved = list[Tensor]()

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = fp8.linear_of_codes(rows.view(3, 7, 32), codes, scale, None)
    [grad] = torch.autograd.grad(result, rows, slope.view(3, 7, 48))
    expected = linear(rows.detach().float(), weight), slope.float() @ weight
    for found, wanted in zip((result.detach().flatten(0, 1), grad), expected, strict=True):
        assert cosine_similarity(found.float().flatten(), wanted.flatten(), 0) > 0.998
        assert float(found.float().norm()) == pytest.approx(float(wanted.norm()), rel=0.02)
    assert {tensor.data_ptr() for tensor in saved} == {codes.data_ptr(), scale.data_ptr()}
    assert fp8.linear_of_codes(rows[:0], codes, scale, None).shape == (0, 48)


@pytest.mark.usefixtures("traced")
def test_fp8_compiled_product_with_a_stored_matrix_gives_the_same_bits() -> None:
    codes, scale, slope = rows_of(48, 32, 100).to(FP8_DTYPE), torch.rand(48, 1) + 0.1, rows_of(21, 48)

    def run(rows: Tensor) -> Tensor:
        return fp8.linear_of_codes(nn.functional.rms_norm(rows, (32,)), codes, scale, None)

    found = []
    for function in (run, Compilation(0.8)(run, "a layer")):
        rows = rows_of(21, 32).requires_grad_()
        result = function(rows)
        found.append((result.detach(), *torch.autograd.grad(result, rows, slope)))
    assert all(map(torch.equal, *found))
