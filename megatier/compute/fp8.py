"""Linear layers whose three products are taken of FP8 numbers, with scales from the very tensors that are multiplied.

Of y = x w^T, the rows of x (tokens) and those of w (outputs) have a scale each, and so have the rows of the gradient g:

    y  = sx sw (x8 w8^T)        x8 = x / sx, w8 = w / sw, rounded to e4m3
    dx = sg s (g8 v8)           g8 = g / sg, v8 = w / s, rounded to e4m3, where s is the largest sw
    dw = t (g8^T z8)            z8 = x8 sx sg / t, rounded to e4m3, where t is the largest sx sg

So x8 is all that stays of an input, and a gradient is rounded once for both of its products. A token's y and dx depend
on no other token: slices, tiles of tokens and neighbours in a batch do not matter to them. dw sums over tokens, so
their scales cannot be applied afterwards: they move to z8, by shifts of the exponent. A number of x8 loses bits there
if its token has far smaller numbers than another one, beside which they hardly count in the sum.

Scales are powers of two, so that dividing by them is exact, and so is multiplying a rounded result. A maximum is the
same in any order. So scales depend on no placement, kernel or rank.

A tensor with NaN or infinity has an infinite scale, which makes whatever it is multiplied with NaN or infinite.

Source: float8 training with current scaling in torchao and Transformer Engine, which round an input once for each axis.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.nn import functional

ALIGNED = 16
"""The numbers of inputs and outputs of a layer have to be multiples of this, by a rule of cuBLAS."""
CODES = torch.float8_e4m3fn
"""The type of what is multiplied, 3 bits of which are mantissa."""
FP8_FROM = (8, 9)
"""Compute capability of the first GPUs that multiply FP8 numbers."""
EXPONENT = 0x7F800000
"""The bits of the exponent of an fp32 number."""
INVERSE = 0x7F000000
"""What the bits of a power of two and of its inverse add up to."""
LEAST = 2.0**-112
"""The least scale. What is below it in a tensor of such small numbers becomes 0."""


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
        rows8, row_scale = rounded(rows, 1)
        weight8, weight_scale = rounded(weight, 1)

        # The weight itself, of which an address is kept, and not what it was rounded to.
        kept = (rows8, row_scale) if ctx.needs_input_grad[1] else (None, None)
        ctx.save_for_backward(*kept, weight, weight_scale)
        return _result(rows8, row_scale, weight8, weight_scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:  # noqa: ANN401
        rows8, row_scale, weight, weight_scale = ctx.saved_tensors
        grad8, grad_scale = rounded(grads[0], 1)
        of_rows = of_weight = None

        if ctx.needs_input_grad[0]:
            largest = weight_scale.amax().view(1, 1)
            weight8 = columns(weight, inverse(largest).expand(len(weight), 1))
            of_rows = _grad_of_rows(grad8, grad_scale * largest, weight8)
        if ctx.needs_input_grad[1]:
            scale = row_scale * grad_scale
            # Below the least normal number there is no exponent to invert.
            largest = scale.amax().clamp(min=torch.finfo(torch.float32).tiny).view(1, 1)
            shifted = columns(rows8, scale * inverse(largest))
            of_weight = _product(columns(grad8), shifted, largest)
        return of_rows, of_weight


class _CodesProduct(torch.autograd.Function):
    """The product of rows with a frozen matrix in FP8, [M, K] and [N, K]. Nothing stays but the matrix."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, codes: Tensor, scale: Tensor) -> Tensor:  # noqa: ANN401
        rows8, row_scale = rounded(rows, 1)
        ctx.save_for_backward(codes, scale)
        return _result(rows8, row_scale, codes, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        codes, scale = ctx.saved_tensors
        # Others have chosen the scale of a row: it may differ too much from the largest to be left to the codes.
        grad8, grad_scale = rounded(grads[0].float() * scale.t(), 1)
        return _grad_of_rows(grad8, grad_scale, columns(codes)), None, None


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


def rounded(tensor: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return a matrix or a stack in FP8, and its fp32 scales: one for each line along a dimension."""
    scale = scale_of(tensor.abs().amax(dim, keepdim=True))
    return divided(tensor, scale), scale


def scale_of(largest: Tensor) -> Tensor:
    """Return the least powers of two, in fp32, that make the largest numbers fit, or twice these."""
    bounded = (largest.float() * (2 / torch.finfo(CODES).max)).clamp(min=LEAST)
    # What is left without the mantissa is a power of two.
    return (bounded.view(torch.int32) & EXPONENT).view(torch.float32)


def divided(tensor: Tensor, scale: Tensor) -> Tensor:
    """Return a matrix in FP8, divided by its scales, which are powers of two."""
    return (tensor.float() * inverse(scale)).to(CODES)


def inverse(scale: Tensor) -> Tensor:
    """Return the inverses of powers of two. That of 0 is a number, and that of infinity makes all others infinite."""
    # It is exact. A division need not be, on a GPU.
    return (INVERSE - scale.view(torch.int32)).view(torch.float32)


def _result(rows8: Tensor, row_scale: Tensor, weight8: Tensor, weight_scale: Tensor) -> Tensor:
    """Return rows weight^T in bf16: FP8 [M, K] and [N, K], with fp32 scales [M, 1] and [N, 1] or [1, 1].

    Sums are taken with fewer bits, as is usual in a forward.
    """
    one = torch.ones((), dtype=torch.float32, device=rows8.device)
    raw = torch._scaled_mm(rows8.contiguous(), weight8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    # Behind the kernel, even where a single row would have a single scale, which kernels take: a row has the bits that
    # it has among others, also where the scale of stored codes is no power of two.
    return (raw.float() * (row_scale * weight_scale.t())).to(torch.bfloat16)


def _grad_of_rows(grad8: Tensor, scale: Tensor, weight8: Tensor) -> Tensor:
    """Return the gradient of rows in bf16: FP8 [M, N] and [K, N], with fp32 scales [M, 1]."""
    one = torch.ones((), dtype=torch.float32, device=grad8.device)
    return (_product(grad8, weight8, one).float() * scale).to(torch.bfloat16)


def _product(left: Tensor, right: Tensor, scale: Tensor) -> Tensor:
    """Return left right^T in bf16, times one scale: FP8 [M, K] and [N, K]. Sums are taken with all bits of fp32."""
    one = torch.ones((), dtype=torch.float32, device=left.device)
    # Kernels of GPUs take rows that lie one after the other, and a gradient of one sequence may come by its columns.
    left = left.contiguous()
    return torch._scaled_mm(left, right.t(), scale.view(()), one, out_dtype=torch.bfloat16, use_fast_accum=False)


@torch.library.custom_op("megatier::fp8_columns", mutates_args=())
def columns(matrix: Tensor, factor: Tensor | None = None) -> Tensor:
    """Return the columns of [M, N] as rows in FP8, with zeros up to a length that a product takes.

    It is an operation of its own, so that a compiler makes it no part of other kernels; see `compute.fp8_kernels`.

    Args:
        matrix: FP8; or, with a factor, bf16 too.
        factor: fp32 [M, 1]: what rows are multiplied with before they are rounded.
    """
    padded = _aligned(len(matrix))
    if matrix.is_cuda:
        kernels = importlib.import_module("megatier.compute.fp8_kernels")
        turned: Tensor = kernels.turned(matrix.contiguous(), None if factor is None else factor.contiguous(), padded)
        return turned

    codes = matrix if factor is None else (matrix.float() * factor).to(CODES)
    # As bytes, since not every version fills FP8.
    result = torch.zeros(codes.shape[1], padded, dtype=torch.uint8, device=codes.device)
    result[:, : len(codes)] = codes.t().view(torch.uint8)
    return result.view(CODES)


@columns.register_fake
def _(matrix: Tensor, factor: Tensor | None = None) -> Tensor:
    return matrix.new_empty((matrix.shape[1], _aligned(matrix.shape[0])), dtype=CODES)


def _aligned(count: int) -> int:
    """Return the next multiple of what a product takes."""
    return (count + ALIGNED - 1) // ALIGNED * ALIGNED


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
