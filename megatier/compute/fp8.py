"""Linear layers whose three products are taken of FP8 numbers, with scales from the very tensors that are multiplied.

Of y = x w^T, the rows of x (tokens) and those of w (outputs) have a scale each. The gradient takes on the scales of
what it is multiplied with, along the axis that is summed over, before it is rounded with one scale of its own:

    y  = sx sw (x8 w8^T)        x8 = x / sx, w8 = w / sw, rounded to e4m3
    dx = s (g8 w8)              g8 = g sw^T / s, rounded to e4m3
    dw = s (g8^T x8)            g8 = g sx / s, rounded to e4m3

So the two products of the backward read the very numbers that the forward read, and x8 is all that stays of an input.
A token's y depends on no other token: slices, tiles of tokens and neighbours in a batch do not matter to it. To its
gradient they matter as far as their largest number decides below which size numbers lose bits, and become 0.

Scales are powers of two, so that dividing by them is exact, and so is multiplying a rounded result. A maximum is the
same in any order. So scales depend on no placement, kernel or rank.

A tensor with NaN or infinity has an infinite scale, which makes whatever it is multiplied with NaN or infinite.

Source: float8 training with current scaling in torchao and Transformer Engine, which round an input once for each axis.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.nn import functional

ALIGNED = 16
"""The numbers of inputs and outputs of a layer have to be multiples of this, by a rule of cuBLAS."""
CODES = torch.float8_e4m3fn
"""The type of inputs and weights, 3 bits of which are mantissa."""
FP8_FROM = (8, 9)
"""Compute capability of the first GPUs that multiply FP8 numbers."""
EXPONENT = 0x7F800000
"""The bits of the exponent of an fp32 number."""
INVERSE = 0x7F000000
"""What the bits of a power of two and of its inverse add up to."""
LEAST = 2.0**-112
"""The least scale. What is below it in a tensor of such small numbers becomes 0."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How numbers are rounded. `bench/bench_fp8.py` compares recipes; a run has the default."""

    by_rows: bool = True
    """Whether each row of inputs and weights has a scale; else each of these tensors has one."""
    gradients_by_rows: bool = False
    """Whether each row of a gradient has a scale, and for the weight's gradient each column; else it has one."""
    gradients: torch.dtype = torch.float8_e4m3fn
    """The type of gradients: e4m3, or e5m2 with more range and 2 bits of mantissa."""
    scales_inside: bool = False
    """Whether the product's own kernel multiplies with scales of rows; else what follows it does, with equal bits."""
    transposes: bool = False
    """Whether a kernel of our own turns rows into columns on a GPU; else the compiler does."""
    rounds_both_ways: bool = False
    """Whether a kernel of our own rounds a gradient for both products at once; it has one scale for each then."""


recipe = Recipe()
"""The recipe of this process."""


class Fp8Linear(nn.Linear):
    """A linear layer whose products are taken of FP8 numbers. Its weight, its gradients and its results are bf16."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the product with the weight, plus the bias."""
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if input.dtype is not weight.dtype and torch.is_autocast_enabled(input.device.type):
            input = input.to(weight.dtype)

        # Of other dtypes torch's own layer says what is wrong; and of no rows there is no maximum.
        if input.dtype is not weight.dtype or input.shape[:-1].numel() == 0:
            return functional.linear(input, weight, bias)
        result = _multiplied(input.reshape(-1, input.shape[-1]), weight)
        result = result.view(*input.shape[:-1], weight.shape[0])
        return result if bias is None else result + bias


def linear_of_codes(input: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product of an input with a frozen matrix that is stored in FP8, plus the bias.

    Args:
        input: [..., K].
        codes: e4m3 [N, K].
        scale: fp32 [N, 1] or [1, 1]: what the codes are multiplied with. Others have chosen it, so a result is rounded
            twice: as a sum, and when it is multiplied.
        bias: [N].
    """
    if input.shape[:-1].numel() == 0:
        return functional.linear(input, codes.to(input.dtype), bias)
    result = _multiplied_codes(input.reshape(-1, input.shape[-1]), codes, scale)
    result = result.view(*input.shape[:-1], codes.shape[0])
    return result if bias is None else result + bias


def adopt(layer: nn.Linear, *, is_fp8: bool = True) -> None:
    """Let a plain linear layer take its products of FP8 numbers from now on, or those of its own dtype again."""
    assert type(layer) in (nn.Linear, Fp8Linear)
    layer.__class__ = Fp8Linear if is_fp8 else nn.Linear


def takes(layer: nn.Linear) -> bool:
    """Return whether the sizes of a layer's matrix are those that FP8 products take on every device."""
    return layer.in_features % ALIGNED == 0 and layer.out_features % ALIGNED == 0


class _Product(torch.autograd.Function):
    """The product of rows with a weight, [M, K] and [N, K]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:  # noqa: ANN401
        dim = 1 if recipe.by_rows else None
        rows8, row_scale = _rounded(rows, dim, CODES)
        weight8, weight_scale = _rounded(weight, dim, CODES)
        # The weight itself, of which an address is kept, and not what it was rounded to.
        kept = (rows8, row_scale) if ctx.needs_input_grad[1] else (None, None)
        ctx.save_for_backward(*kept, weight, weight_scale)
        return _product(rows8, weight8, row_scale, weight_scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:  # noqa: ANN401
        rows8, row_scale, weight, weight_scale = ctx.saved_tensors
        grad = grads[0].float()
        of_rows = of_weight = None
        along = recipe.gradients_by_rows
        if not (recipe.by_rows or along):
            # With one scale for all of a tensor, both products take the same numbers.
            grad8, scale = _rounded(grad, None, recipe.gradients)
            if ctx.needs_input_grad[0]:
                weight8 = _columns(_divided(weight, weight_scale, CODES))
                of_rows = _product(grad8, weight8, scale * weight_scale)
            if ctx.needs_input_grad[1]:
                of_weight = _product(_columns(grad8), _columns(rows8), scale * row_scale)
            return of_rows, of_weight

        if recipe.rounds_both_ways and all(ctx.needs_input_grad):
            scale = _scale_of(grad * weight_scale.t(), None, recipe.gradients)
            other = _scale_of(grad * row_scale, None, recipe.gradients)
            factors = (weight_scale * _inverse(scale)).view(-1), (row_scale * _inverse(other)).view(-1)
            straight, turned = torch.ops.megatier.fp8_both_ways(grads[0], *factors, recipe.gradients)
            of_rows = _product(straight, _columns(_divided(weight, weight_scale, CODES)), scale)
            return of_rows, _product(turned, _columns(rows8), other)

        if ctx.needs_input_grad[0]:
            grad8, scale = _rounded(grad * weight_scale.t(), 1 if along else None, recipe.gradients)
            of_rows = _product(grad8, _columns(_divided(weight, weight_scale, CODES)), scale)
        if ctx.needs_input_grad[1]:
            grad8, scale = _rounded(grad * row_scale, 0 if along else None, recipe.gradients)
            of_weight = _product(_columns(grad8), _columns(rows8), scale.view(-1, 1))
        return of_rows, of_weight


class _CodesProduct(torch.autograd.Function):
    """The product of rows with a frozen matrix in FP8, [M, K] and [N, K]. Nothing stays but the matrix."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, codes: Tensor, scale: Tensor) -> Tensor:  # noqa: ANN401
        rows8, row_scale = _rounded(rows, 1 if recipe.by_rows else None, CODES)
        ctx.save_for_backward(codes, scale)
        return _product(rows8, codes, row_scale, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        codes, scale = ctx.saved_tensors
        dim = 1 if recipe.gradients_by_rows else None
        grad8, own = _rounded(grads[0].float() * scale.t(), dim, recipe.gradients)
        return _product(grad8, _columns(codes), own), None, None


def _apply(rows: Tensor, weight: Tensor) -> Tensor:
    """Return the product of rows with a weight."""
    result: Tensor = _Product.apply(rows, weight)  # type: ignore[no-untyped-call]
    return result


# The compiler takes it as one call, and looks into it when it makes the graph of forward and backward. Were it to look
# into it before, it would make an object of the class, which torch itself warns of.
_multiplied: Callable[[Tensor, Tensor], Tensor] = torch.compiler.allow_in_graph(_apply)


def _apply_codes(rows: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Return the product of rows with a frozen matrix."""
    result: Tensor = _CodesProduct.apply(rows, codes, scale)  # type: ignore[no-untyped-call]
    return result


_multiplied_codes: Callable[[Tensor, Tensor, Tensor], Tensor] = torch.compiler.allow_in_graph(_apply_codes)


def _rounded(tensor: Tensor, dim: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a matrix in FP8, and the fp32 scales that it was divided by: one for each line along a dimension, or one.

    A scale is the least power of two that makes the largest number fit, or twice that.
    """
    scale = _scale_of(tensor, dim, dtype)
    return _divided(tensor, scale, dtype), scale


def _scale_of(tensor: Tensor, dim: int | None, dtype: torch.dtype) -> Tensor:
    """Return the scales of `_rounded`."""
    magnitudes = tensor.abs()
    largest = (magnitudes.amax().view(1, 1) if dim is None else magnitudes.amax(dim, keepdim=True)).float()
    bits = (largest * (2 / torch.finfo(dtype).max)).clamp(min=LEAST).view(torch.int32) & EXPONENT
    return bits.view(torch.float32)


def _inverse(scale: Tensor) -> Tensor:
    """Return the inverse of powers of two, which is exact. A division need not be, on a GPU."""
    return (INVERSE - scale.view(torch.int32)).view(torch.float32)


def _divided(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix in FP8, divided by its scales, which are powers of two."""
    return (tensor.float() * _inverse(scale)).to(dtype)


def _product(left: Tensor, right: Tensor, scale: Tensor, other: Tensor | None = None) -> Tensor:
    """Return left right^T in bf16, times the scales of rows of left and, if there are others, of right.

    Args:
        left: FP8 [M, K].
        right: FP8 [N, K].
        scale: fp32 [M, 1] or [1, 1].
        other: fp32 [N, 1] or [1, 1].
    """
    multiply = partial(torch._scaled_mm, out_dtype=torch.bfloat16, use_fast_accum=other is not None)
    one = torch.ones((), dtype=torch.float32, device=left.device)
    is_single = scale.numel() == 1 and (other is None or other.numel() == 1)
    if is_single:
        return multiply(left, right.t(), scale.view(()), one if other is None else other.view(()))

    if recipe.scales_inside:
        across = one if other is None else other.t()
        rows = scale.expand(left.shape[0], 1).contiguous()
        return multiply(left, right.t(), rows, across.expand(1, right.shape[0]).contiguous())

    raw = multiply(left, right.t(), one, one)
    return (raw.float() * (scale if other is None else scale * other.t())).to(torch.bfloat16)


def _columns(codes: Tensor) -> Tensor:
    """Return the columns of FP8 [M, N] as rows, contiguous, with zeros up to a length that a product takes."""
    if recipe.transposes:
        columns: Tensor = torch.ops.megatier.fp8_columns(codes)
        return columns
    return _turned(codes)


def _turned(codes: Tensor) -> Tensor:
    """Return the same by operations of torch."""
    spare = -codes.shape[0] % ALIGNED
    # As bytes, since not every version fills FP8.
    columns = functional.pad(codes.t().view(torch.uint8), (0, spare)) if spare else codes.t().contiguous()
    return columns.view(codes.dtype)


def _turned_here(codes: Tensor) -> Tensor:
    """Return the same by the kernel of the device."""
    if not codes.is_cuda:
        return _turned(codes)
    kernels = importlib.import_module("megatier.compute.fp8_kernels")
    result: Tensor = kernels.transpose(codes.contiguous(), codes.shape[0] + -codes.shape[0] % ALIGNED)
    return result


torch.library.custom_op(
    "megatier::fp8_columns", _turned_here, mutates_args=(), schema="(Tensor codes) -> Tensor"
).register_fake(lambda codes: codes.new_empty(codes.shape[1], codes.shape[0] + -codes.shape[0] % ALIGNED))


def _both_ways(grad: Tensor, column_factor: Tensor, row_factor: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return a gradient in FP8 twice: times a factor for each column, and times one for each row and in columns."""
    if grad.is_cuda:
        kernels = importlib.import_module("megatier.compute.fp8_kernels")
        padded = grad.shape[0] + -grad.shape[0] % ALIGNED
        found: list[Tensor] = kernels.both_ways(
            grad.contiguous(), column_factor.expand(grad.shape[1]).contiguous(), row_factor, dtype, padded
        )
        return found
    wide = grad.float()
    return [(wide * column_factor).to(dtype), _turned((wide * row_factor[:, None]).to(dtype))]


def _both_ways_like(grad: Tensor, column_factor: Tensor, row_factor: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return what that gives, without its numbers."""
    padded = grad.shape[0] + -grad.shape[0] % ALIGNED
    return [grad.new_empty(grad.shape, dtype=dtype), grad.new_empty((grad.shape[1], padded), dtype=dtype)]


torch.library.custom_op(
    "megatier::fp8_both_ways",
    _both_ways,
    mutates_args=(),
    schema="(Tensor grad, Tensor column_factor, Tensor row_factor, ScalarType dtype) -> Tensor[]",
).register_fake(_both_ways_like)


def rounded_weights(graph: Graph) -> list[Node]:
    """Return where a graph of forward and backward rounds what one of its inputs holds by itself, as a weight is.

    A compiler would save the FP8 weight from the forward to the backward, since it is half as large as the weight. But
    that stays on its tier meanwhile, and takes no room on the GPU.
    """
    found = []
    only: dict[Node, Node | None] = {}
    for node in graph.nodes:
        sources = {only[source] for source in node.all_input_nodes}
        only[node] = node if node.op == "placeholder" else next(iter(sources)) if len(sources) == 1 else None
        if _is_fp8(node) and only[node] and not any(map(_is_fp8, node.all_input_nodes)):
            found.append(node)
    return found


def _is_fp8(node: Node) -> bool:
    """Return whether a node of a graph gives a tensor of FP8 inputs or weights."""
    value = node.meta.get("val")
    return torch.is_tensor(value) and value.dtype is CODES
