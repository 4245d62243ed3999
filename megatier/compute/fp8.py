"""FP8 linear layers with dynamic per-row scaling.

Scales are powers of two, computed from the tensors themselves, so results depend neither on slices nor on ranks.

The rows of x (tokens), of w (outputs) and of the gradient g have one scale each. For y = x w^T:

    y  = sx sw (x8 w8^T)        x8 = x / sx, w8 = w / sw, rounded to e4m3
    dx = sg s (g8 v8)           g8 = g / sg, v8 = w / s, rounded to e4m3, where s is the largest sw
    dw = t (g8^T z8)            z8 = x8 sx sg / t, rounded to e4m3, where t is the largest sx sg

The forward saves only x8 of an input, and the backward quantises a gradient once for both of its products.

A token's y and dx do not depend on other tokens, so not on slices, tiles of tokens or neighbours in a batch. dw is a
sum over tokens, so scales cannot be applied after it. They are applied to x8 before it, as shifts of the exponent: z8.
A number in x8 loses bits there only if its token has far smaller numbers than another one, beside which they hardly
count.

Dividing by a power of two is exact, and so is multiplying a rounded result by one. A maximum does not depend on the
order. So scales depend on no placement, kernel or rank.

A tensor with NaN or infinity has an infinite scale, which makes every product with it NaN or infinite.
`models.products` decides which layers use this.

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
"""A layer's input and output sizes must be multiples of this, as cuBLAS requires."""
FP8_DTYPE = torch.float8_e4m3fn
"""The dtype of both factors of a product. It has 3 mantissa bits."""
FP8_FROM = (8, 9)
"""The compute capability of the first GPUs with FP8 products."""
EXPONENT_BITS = 0x7F800000
"""The exponent bits of an fp32 number."""
RECIPROCAL_BITS = 0x7F000000
"""The sum of the bits of a power of two and of its reciprocal."""
SCALE_MIN = 2.0**-112
"""The least scale. In a row that has it, numbers far below it become 0."""


class Fp8Linear(nn.Linear):
    """A linear layer that multiplies in FP8. Its weight, gradients and results are bf16."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the product with the weight, plus the bias."""
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias

        # As autocast does for torch's own layers, since it does not know this product.
        differs = input.dtype is not weight.dtype
        if differs and torch.is_autocast_enabled(input.device.type):
            input = input.to(weight.dtype)

        # torch's own layer raises the error about a wrong dtype, and handles empty inputs, for which amax would fail.
        sizes = input.shape[:-1]
        if input.dtype is not weight.dtype or sizes.numel() == 0:
            return functional.linear(input, weight, bias)

        rows = input.reshape(-1, input.shape[-1])
        products = _multiply(rows, weight)
        shaped = products.view(*sizes, weight.shape[0])
        return _with_bias(shaped, bias)


def linear_of_codes(input: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a linear layer whose frozen weight is stored in FP8.

    Args:
        input: [..., K].
        codes: e4m3 [N, K].
        scale: fp32 [N, 1] or [1, 1], the factor of the codes. It need not be a power of two, so a result is rounded
            twice: as a sum, and when it is scaled.
        bias: [N].
    """
    sizes = input.shape[:-1]
    if sizes.numel() == 0:
        return functional.linear(input, codes.to(input.dtype), bias)

    rows = input.reshape(-1, input.shape[-1])
    products = _multiply_codes(rows, codes, scale)
    result = products.view(*sizes, codes.shape[0])
    return _with_bias(result, bias)


def _with_bias(result: Tensor, bias: Tensor | None) -> Tensor:
    """Add the bias of a layer, if it has one."""
    if bias is None:
        return result
    return result + bias


def set_fp8(layer: nn.Linear, *, is_fp8: bool = True) -> None:
    """Make a plain linear layer multiply in FP8, or in its own dtype again."""
    assert type(layer) in (nn.Linear, Fp8Linear)
    layer.__class__ = Fp8Linear if is_fp8 else nn.Linear


def fits_fp8(layer: nn.Linear) -> bool:
    """Return whether a layer's sizes allow FP8 products on every device."""
    return layer.in_features % ALIGNED == 0 and layer.out_features % ALIGNED == 0


class _Product(torch.autograd.Function):
    """The product of rows with a weight, [M, K] and [N, K]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:  # noqa: ANN401
        rows8, row_scale = quantise_rows(rows)
        weight8, weight_scale = quantise_rows(weight)

        # The weight itself is saved, since that is only an address, while its FP8 copy would take memory.
        kept = (rows8, row_scale) if ctx.needs_input_grad[1] else (None, None)
        ctx.save_for_backward(*kept, weight, weight_scale)
        return _result(rows8, row_scale, weight8, weight_scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:  # noqa: ANN401
        rows8, row_scale, weight, weight_scale = ctx.saved_tensors
        grad8, grad_scale = quantise_rows(grads[0])
        of_rows = of_weight = None

        if ctx.needs_input_grad[0]:
            largest = weight_scale.amax().view(1, 1)
            weight8 = transpose_fp8(weight, reciprocal(largest).expand(len(weight), 1))
            of_rows = _grad_of_rows(grad8, grad_scale * largest, weight8)
        if ctx.needs_input_grad[1]:
            scale = row_scale * grad_scale
            # Below the smallest normal number there is no exponent to negate.
            largest = scale.amax().clamp(min=torch.finfo(torch.float32).tiny).view(1, 1)
            shifted = transpose_fp8(rows8, scale * reciprocal(largest))
            of_weight = _product(transpose_fp8(grad8), shifted, largest)
        return of_rows, of_weight


class _CodesProduct(torch.autograd.Function):
    """The product of rows with a frozen FP8 matrix, [M, K] and [N, K]. Only the matrix is saved."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, codes: Tensor, scale: Tensor) -> Tensor:  # noqa: ANN401
        rows8, row_scale = quantise_rows(rows)
        ctx.save_for_backward(codes, scale)
        return _result(rows8, row_scale, codes, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        codes, scale = ctx.saved_tensors

        # The scales of stored rows may differ too much to be applied to the codes, so they are applied to the gradient.
        grad8, grad_scale = quantise_rows(grads[0].float() * scale.t())
        of_rows = _grad_of_rows(grad8, grad_scale, transpose_fp8(codes))
        return of_rows, None, None


def _apply(rows: Tensor, weight: Tensor) -> Tensor:
    """Return the product of rows with a weight."""
    result: Tensor = _Product.apply(rows, weight)  # type: ignore[no-untyped-call]
    return result


# The compiler treats it as one call, and traces into it only when it builds the joint graph. If it traced into it
# earlier, it would instantiate the class, which torch warns about.
_multiply: Callable[[Tensor, Tensor], Tensor] = torch.compiler.allow_in_graph(_apply)


def _apply_codes(rows: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Return the product of rows with a frozen matrix."""
    result: Tensor = _CodesProduct.apply(rows, codes, scale)  # type: ignore[no-untyped-call]
    return result


_multiply_codes: Callable[[Tensor, Tensor, Tensor], Tensor] = torch.compiler.allow_in_graph(_apply_codes)


def quantise_rows(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a matrix or a stack to FP8. Return it with one fp32 scale per row."""
    # The maximum must be fp32. A compiler computes it from unrounded values; if it were bf16, the kernel that quantises
    # would see it before rounding and the one that applies the scale after rounding. Where rounding passes a power of
    # two, the two scales would differ by a factor of 2.
    scale = amax_to_scale(tensor.float().abs().amax(-1, keepdim=True))
    return quantise(tensor, scale), scale


def amax_to_scale(amax: Tensor) -> Tensor:
    """Return the least powers of two by which the maxima, in fp32, fit into FP8, or twice these."""
    bounded = (amax * (2 / torch.finfo(FP8_DTYPE).max)).clamp(min=SCALE_MIN)
    # Without its mantissa a number is a power of two.
    return (bounded.view(torch.int32) & EXPONENT_BITS).view(torch.float32)


def quantise(tensor: Tensor, scale: Tensor) -> Tensor:
    """Quantise a matrix to FP8 by scales that are powers of two."""
    return (tensor.float() * reciprocal(scale)).to(FP8_DTYPE)


def reciprocal(scale: Tensor) -> Tensor:
    """Return reciprocals of powers of two. That of 0 is finite; that of infinity makes all products infinite."""
    # By bits, since a division need not be exact on a GPU.
    return (RECIPROCAL_BITS - scale.view(torch.int32)).view(torch.float32)


def _result(rows8: Tensor, row_scale: Tensor, weight8: Tensor, weight_scale: Tensor) -> Tensor:
    """Return rows weight^T in bf16: FP8 [M, K] and [N, K], with fp32 scales [M, 1] and [N, 1] or [1, 1].

    Accumulation uses fewer bits, as is usual in a forward.
    """
    one = _one_on(rows8.device)
    raw = torch._scaled_mm(rows8.contiguous(), weight8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    # The kernel could apply the scale of a single row. It is applied here all the same, so that a single row has the
    # same bits as among others, also where the scale of stored codes is not a power of two.
    result = raw.float()
    result = result * (row_scale * weight_scale.t())
    return result.to(torch.bfloat16)


def _grad_of_rows(grad8: Tensor, scale: Tensor, weight8: Tensor) -> Tensor:
    """Return the gradient of rows in bf16: FP8 [M, N] and [K, N], with fp32 scales [M, 1]."""
    one = _one_on(grad8.device)
    result = _product(grad8, weight8, one).float()
    result = result * scale
    return result.to(torch.bfloat16)


def _product(left: Tensor, right: Tensor, scale: Tensor) -> Tensor:
    """Return left right^T in bf16, times one scale: FP8 [M, K] and [N, K]. Sums are taken with all bits of fp32."""
    one = _one_on(left.device)
    # GPU kernels need contiguous rows, and the gradient of one sequence may be a transposed view.
    left = left.contiguous()
    return torch._scaled_mm(left, right.t(), scale.view(()), one, out_dtype=torch.bfloat16, use_fast_accum=False)


def _one_on(device: torch.device) -> Tensor:
    """Return the scale 1, for a factor without its own scale."""
    return torch.ones((), dtype=torch.float32, device=device)


@torch.library.custom_op("megatier::fp8_transpose", mutates_args=())
def transpose_fp8(matrix: Tensor, factor: Tensor | None = None) -> Tensor:
    """Transpose [M, N] to a contiguous FP8 matrix, padded with zeros to a length that products allow.

    It is a custom operator, so that a compiler does not fuse it with other kernels; see `compute.fp8_kernels`.

    Args:
        matrix: FP8; or, with a factor, bf16 too.
        factor: fp32 [M, 1], by which rows are multiplied before they are rounded.
    """
    padded = _aligned(len(matrix))
    if matrix.is_cuda:
        kernels = importlib.import_module("megatier.compute.fp8_kernels")
        if factor is not None:
            factor = factor.contiguous()
        on_gpu: Tensor = kernels.transpose(matrix.contiguous(), factor, padded)
        return on_gpu

    codes = matrix
    if factor is not None:
        codes = (matrix.float() * factor).to(FP8_DTYPE)

    # As bytes, since not every version of torch can fill FP8.
    result = torch.zeros(codes.shape[1], padded, dtype=torch.uint8, device=codes.device)
    result[:, : len(codes)] = codes.t().view(torch.uint8)
    return result.view(FP8_DTYPE)


@transpose_fp8.register_fake
def _(matrix: Tensor, factor: Tensor | None = None) -> Tensor:
    return matrix.new_empty((matrix.shape[1], _aligned(matrix.shape[0])), dtype=FP8_DTYPE)


def _aligned(count: int) -> int:
    """Round a size up to a multiple that products allow."""
    return (count + ALIGNED - 1) // ALIGNED * ALIGNED


def find_quantised_weights(graph: Graph) -> list[Node]:
    """Return the nodes of a joint graph that quantise only one of its inputs, such as a weight.

    The compiler would save the FP8 weight for the backward, since it is half as large as the weight. But the weight
    itself stays on its tier meanwhile, and takes no GPU memory.
    """
    quantised = []
    only: dict[Node, Node | None] = {}
    for node in graph.nodes:
        sources = {only[source] for source in node.all_input_nodes}
        only[node] = node if node.op == "placeholder" else next(iter(sources)) if len(sources) == 1 else None
        if _is_fp8(node) and only[node] and not any(map(_is_fp8, node.all_input_nodes)):
            quantised.append(node)
    return quantised


def find_scales(graph: Graph) -> list[Node]:
    """Return the nodes of a joint graph that compute the maxima of rows of its inputs.

    The forward must save them. If the backward recomputed them from an input that was rounded meanwhile, they might not
    match the saved FP8 numbers.
    """
    forward = set[Node]()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and node.name.startswith("tangents")
        if not is_tangent and forward.issuperset(node.all_input_nodes):
            forward.add(node)

    # Go back from the product that becomes FP8 along nodes with one number per row, which are its scale.
    scales = []
    seen: set[Node] = set()
    waiting = [source for node in forward if _is_fp8(node) for source in node.all_input_nodes]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source in seen or not _has_one_column(source):
                continue
            seen.add(source)
            if source.target is torch.ops.aten.amax.default:
                scales.append(source)
            else:
                waiting.append(source)
    return scales


def _has_one_column(node: Node) -> bool:
    """Return whether a graph node has one number for each row."""
    value = node.meta.get("val")
    return torch.is_tensor(value) and value.dim() > 1 and value.shape[-1] == 1


def _is_fp8(node: Node) -> bool:
    """Return whether a graph node has an FP8 result."""
    value = node.meta.get("val")
    return torch.is_tensor(value) and value.dtype is FP8_DTYPE
