"""FP8 products of stacked experts, by the recipe of `compute.fp8`.

A transformers module holds the matrices of all experts of a layer in three-dimensional parameters. Each token goes to
several experts, and makes one pair with each. The rows of each expert's pairs are gathered next to each other, so that
one grouped product multiplies each expert's rows with its own matrix.

Rows and outputs have one scale each, as in `compute.fp8`. A maximum over scales covers one expert's rows or outputs
only, so an expert's results do not depend on what went to others.

Each expert's rows are padded with zeros to a multiple of 16, by at least one row, as the GPU kernel requires.

| letter | number of |
|---|---|
| T | tokens |
| P | pairs: T times the experts of a token |
| M | rows that come in: T before the first matrices (a row for several pairs), P before the last |
| E | experts |
| R | places: rows of all experts, with padding |
| K, N | inputs and outputs of a matrix |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from megatier.compute.fp8 import ALIGNED, FP8_DTYPE, quantise, quantise_rows, reciprocal, transpose_fp8
from megatier.readback import on_host

FIRST_MATRICES = ("gate_up_proj", "up_proj")
"""The names of an expert's first matrices, with a gate and without."""
LAST_MATRIX = "down_proj"
"""The name of its last matrix."""
GROUPED_MM_MAJOR = 9
"""The major compute capability of GPUs with a grouped kernel. On others each expert has its own product."""
EXPERTS_MAX = 1023
"""The most experts that the grouped kernel supports."""


class Fp8Experts(nn.Module):
    """A mixin that makes a class of experts multiply in FP8."""

    num_experts: int

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' results, [tokens, hidden].

        Args:
            hidden_states: [tokens, hidden].
            top_k_index: the experts of each token, [tokens, chosen]. The number of experts stands for an expert
                elsewhere.
            top_k_weights: their weights.
        """
        experts: Any = self
        num_tokens, copies = top_k_index.shape
        if num_tokens == 0:
            # amax fails on empty inputs, so the class's own forward gives the empty result.
            nothing: Tensor = super().forward(hidden_states, top_k_index, top_k_weights)
            return nothing

        layout = _lay_out(top_k_index.reshape(-1).long(), self.num_experts)
        has_gate = getattr(experts, "has_gate", True)
        first = FIRST_MATRICES[0] if has_gate else FIRST_MATRICES[1]
        inside = self._product(first, hidden_states, layout, copies)
        # Some models override the gate, such as gpt-oss, which clamps it.
        inside = experts._apply_gate(inside) if has_gate else experts.act_fn(inside)
        # By now each pair has its own row.
        results = self._product(LAST_MATRIX, inside, layout, 1)
        if getattr(experts, "has_post_expert_norm", False):
            results = experts.post_expert_norm(results)

        # Summed in the order of a token's own experts.
        weighted = results * top_k_weights.reshape(-1, 1)
        return weighted.view(num_tokens, copies, -1).sum(1).to(hidden_states.dtype)

    def _product(self, name: str, rows: Tensor, layout: ExpertRows, copies: int) -> Tensor:
        """Return the product of each pair's row with a matrix of its expert, plus the bias; 0 for experts elsewhere."""
        weight: Tensor = getattr(self, name)
        if getattr(self, "is_transposed", False):
            weight = weight.transpose(1, 2)
        result = _multiply(rows.to(weight.dtype), weight, copies, *layout)
        bias: Tensor | None = getattr(self, f"{name}_bias", None)
        if bias is not None:
            result = result + bias[layout.expert]
        # `where` instead of a product with 0, which would keep NaN: rows after those of all experts may be anything.
        return result.where(layout.is_own, 0)


class ExpertRows(NamedTuple):
    """The places of the pairs' rows, with those of each expert next to each other."""

    expert: Tensor
    """The expert of each pair, [P]."""
    is_own: Tensor
    """Whether this expert is here, [P, 1]. Otherwise `expert` names another one."""
    place: Tensor
    """The place of each pair, [P]: after the rows of all experts, if its expert is elsewhere."""
    pair: Tensor
    """The pair in each place, [R]; P where there is none."""
    ends: Tensor
    """The end of each expert's rows, int32 [E]."""


_classes: dict[type[nn.Module], type[nn.Module]] = {}
"""Classes of experts with FP8 products, by the classes that they derive from."""


def set_fp8_experts(module: nn.Module, *, is_fp8: bool = True) -> None:
    """Make a stack of experts multiply in FP8, or in its own dtype again."""
    kind = type(module)
    if is_fp8 and not isinstance(module, Fp8Experts):
        # One class for all layers, so that they share compiled code.
        if kind not in _classes:
            _classes[kind] = type(kind.__name__, (Fp8Experts, kind), {"__module__": kind.__module__})
        module.__class__ = _classes[kind]
    elif not is_fp8 and isinstance(module, Fp8Experts):
        _, module.__class__ = kind.__bases__


def supports_fp8(module: nn.Module) -> bool:
    """Return whether `Fp8Experts` knows how a module computes."""
    # transformers marks modules whose forward may be replaced by this attribute.
    names = {name for name, parameter in module.named_parameters(recurse=False) if parameter.dim() == 3}
    return (
        hasattr(module, "is_transposed") and "forward" not in vars(module) and names <= {*FIRST_MATRICES, LAST_MATRIX}
    )


def fits_fp8_experts(module: nn.Module) -> bool:
    """Return whether a stack's sizes allow FP8 products on every device."""
    matrices = [parameter.shape[1:] for parameter in module.parameters(recurse=False) if parameter.dim() == 3]
    return all(size % ALIGNED == 0 for shape in matrices for size in shape)


def _lay_out(chosen: Tensor, num_experts: int) -> ExpertRows:
    """Compute the places of each expert's rows, from the expert of each pair, [P]."""
    num_pairs = chosen.shape[0]
    # A stable sort, since an expert's gradient is a sum over its pairs, whose order must not vary.
    ordered, order = chosen.sort(stable=True)  # [P], [P]
    experts = torch.arange(num_experts, dtype=torch.int64, device=chosen.device)  # [E]
    stops = torch.searchsorted(ordered, experts, right=True)  # [E]
    sizes = stops.diff(prepend=stops.new_zeros(1))  # [E]

    # A multiple of 16 gets 16 more rows, so that no expert is without rows (`_grouped_mm_on_gpu`).
    padded = (sizes // ALIGNED + 1) * ALIGNED  # [E]
    ends = padded.cumsum(0)  # [E]

    # A pair's place is its index in sorted order plus the padding before it. Pairs that are elsewhere come last.
    shifts = ends - padded - stops + sizes  # [E]
    last_shift = ends[-1:] - stops[-1:]  # [1]
    shifts = torch.cat([shifts, last_shift])  # [E + 1]
    numbers = torch.arange(num_pairs, dtype=torch.int64, device=chosen.device)  # [P]
    places = numbers + shifts[ordered]  # [P]
    place = torch.zeros_like(order).index_copy(0, order, places)  # [P]

    # R is an upper bound that depends only on shapes. The exact number is on the GPU, and the host would have to wait
    # for it.
    num_places = (num_pairs // ALIGNED + 1 + num_experts) * ALIGNED
    none = numbers.new_full((num_places,), num_pairs)  # [R]
    pair = none.index_copy(0, place, numbers)  # [R]

    return ExpertRows(
        expert=chosen.clamp(max=num_experts - 1),
        is_own=(chosen < num_experts)[:, None],
        place=place,
        pair=pair,
        ends=ends.int(),
    )


class _StackProduct(torch.autograd.Function):
    """The product of rows [M, K] with a stack [E, N, K], for each pair: [P, N]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, copies: int, *layout: Tensor) -> Tensor:  # noqa: ANN401
        _, _, place, pair, ends = layout
        rows8, row_scale = quantise_rows(rows)  # [M, K], [M, 1]
        weight8, weight_scale = quantise_rows(weight)  # [E, N, K], [E, N, 1]
        ctx.copies = copies
        # Only the gradient of the weight needs rows. They are saved before gathering, once for each token.
        kept = (rows8, row_scale) if ctx.needs_input_grad[1] else (None, None)
        ctx.save_for_backward(*kept, weight, weight_scale, *layout)

        # The kernels need contiguous rows, which a stack that is stored as [E, K, N] does not have.
        if not weight8.is_contiguous():
            weight8 = _transpose_stack(weight8.transpose(1, 2))  # [E, N, K]
        gathered = _gather_rows(rows8, pair, copies)  # [R, K]
        raw: Tensor = _grouped_mm(gathered, weight8, weight_scale.squeeze(2), ends, True)  # [R, N]
        return (raw[place].float() * _repeat_rows(row_scale, copies)).to(torch.bfloat16)  # [P, N]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        rows8, row_scale, weight, weight_scale, expert, is_own, place, pair, ends = ctx.saved_tensors
        copies = ctx.copies
        grad8, grad_scale = quantise_rows(grads[0])  # [P, N], [P, 1]
        gathered_grad = _gather_rows(grad8, pair, 1)  # [R, N]
        of_rows = of_weight = None

        if ctx.needs_input_grad[0]:
            # The sum is over outputs, so their scales cannot be applied after it. The weight is quantised again with
            # one scale per expert.
            largest = weight_scale.amax(1, keepdim=True)  # [E, 1, 1]
            weight8 = _quantise_transposed(weight, largest)  # [E, K, N]
            ones = weight_scale.new_ones(weight8.shape[:2])  # [E, K]
            raw = _grouped_mm(gathered_grad, weight8, ones, ends, False)  # [R, K]
            scaled = raw[place].float()  # [P, K]
            scaled = scaled * (grad_scale * largest[expert, 0])  # [P, K]
            scaled = scaled.to(torch.bfloat16)  # [P, K]
            # A token's gradient is the sum over its pairs. Those of experts elsewhere may be NaN.
            of_pairs = scaled.where(is_own, 0)  # [P, K]
            of_rows = of_pairs.view(-1, copies, of_pairs.shape[1]).sum(1)  # [M, K]
        if ctx.needs_input_grad[1]:
            # The sum is over tokens, so the scales of both factors are applied to the rows before it, relative to the
            # largest scale of the expert.
            num_pairs = expert.shape[0]
            scale = _repeat_rows(row_scale, copies) * grad_scale  # [P, 1]
            scale = scale.where(is_own, 0)  # [P, 1]
            largest = _amax_of_experts(scale, expert, ends.shape[0])  # [E, 1]
            relative = scale * reciprocal(largest)[expert]  # [P, 1]

            # Padding must stay zero, whatever pair the clamp assigns to it.
            factor = relative[pair.clamp(max=num_pairs - 1)]  # [R, 1]
            factor = factor.where((pair < num_pairs)[:, None], 1)  # [R, 1]
            columns = transpose_fp8(_gather_rows(rows8, pair, copies), factor)  # [K, R]
            grad_columns = transpose_fp8(gathered_grad)  # [N, R]

            scales = largest.expand(-1, len(columns))  # [E, K]
            of_weight = _grouped_mm(grad_columns, columns, scales, ends, False)  # [E, N, K]
        return of_rows, of_weight, None, *(None for _ in ExpertRows._fields)


def _apply(rows: Tensor, weight: Tensor, copies: int, *layout: Tensor) -> Tensor:
    """Return the product of each pair's row with the matrix of its expert."""
    result: Tensor = _StackProduct.apply(rows, weight, copies, *layout)  # type: ignore[no-untyped-call]
    return result


# As in `compute.fp8`.
_multiply: Callable[..., Tensor] = torch.compiler.allow_in_graph(_apply)


def _repeat_rows(rows: Tensor, copies: int) -> Tensor:
    """Repeat each row so many times, one after the other: [M, columns] to [P, columns]."""
    return rows[:, None].expand(-1, copies, -1).reshape(-1, rows.shape[1])


def _gather_rows(codes: Tensor, pair: Tensor, copies: int) -> Tensor:
    """Gather FP8 rows [M, columns] into the places of their pairs, [R, columns], with zeros in all others."""
    num_pairs = codes.shape[0] * copies
    # Not every version of torch gathers FP8, so these are bytes.
    in_bytes = codes.view(torch.uint8)
    row = pair.clamp(max=num_pairs - 1) // copies  # [R]
    rows = in_bytes[row]

    has_pair = (pair < num_pairs)[:, None]  # [R, 1]
    return rows.where(has_pair, 0).view(FP8_DTYPE)


def _quantise_transposed(weight: Tensor, scale: Tensor) -> Tensor:
    """Quantise a stack [E, N, K] by scales [E, 1, 1], to a contiguous one [E, K, N]."""
    transposed = weight.transpose(1, 2)
    if transposed.is_contiguous():
        return quantise(transposed, scale)
    return _transpose_stack(weight, reciprocal(scale))


def _transpose_stack(stack: Tensor, factor: Tensor | None = None) -> Tensor:
    """Transpose a stack [E, N, K] to FP8, [E, K, N], after multiplying by factors [E, 1, 1]."""
    num_experts, num_rows, num_columns = stack.shape
    of_rows = None
    if factor is not None:
        factor = factor.expand(num_experts, num_rows, 1)
        of_rows = factor.reshape(-1, 1)  # [E N, 1]

    rows = stack.reshape(-1, num_columns)  # [E N, K]
    columns: Tensor = transpose_fp8(rows, of_rows)  # [K, E N]
    by_expert = columns.view(num_columns, num_experts, num_rows)
    return by_expert.transpose(0, 1)


def _amax_of_experts(scale: Tensor, expert: Tensor, num_experts: int) -> Tensor:
    """Return the largest scale among the pairs of each expert, [E, 1]; without pairs the least normal number."""
    # A scattered maximum would need atomic operations, so each pair is compared with each expert.
    experts = torch.arange(num_experts, dtype=torch.int64, device=expert.device)
    is_of = expert[:, None] == experts  # [P, E]
    scales = scale.where(is_of, 0)  # [P, E]
    largest = scales.amax(0)  # [E]
    least = torch.finfo(torch.float32).tiny
    return largest.clamp(min=least)[:, None]


@torch.library.custom_op("megatier::fp8_grouped_mm", mutates_args=())
def _grouped_mm(left: Tensor, right: Tensor, scale: Tensor, ends: Tensor, is_fast: bool) -> Tensor:
    """Multiply the rows, or the columns, of each expert by a matrix. Return the products in bf16.

    Args:
        left: FP8 [R, K], for a result [R, N]; or [N, R], for a result [E, N, K].
        right: FP8 [E, N, K]; or [K, R].
        scale: fp32 [E, N], or [E, K], by which the columns of the result are multiplied: powers of two.
        ends: int32 [E], the end of each expert's places. Values after the last one are unspecified.
        is_fast: whether accumulation uses fewer bits, as is usual in a forward.
    """
    if _has_kernel(left.device, ends.shape[0]):
        return _grouped_mm_on_gpu(left, right, scale, ends, is_fast=is_fast)

    # Without the grouped kernel the host must know the bounds of each product, so it waits for the device.
    one = torch.ones((), dtype=torch.float32, device=left.device)
    products = []
    start = 0
    for number, end in enumerate(on_host(ends).tolist()):
        if right.dim() == 3:
            rows, matrix = left[start:end], right[number].contiguous()
        else:
            rows, matrix = left[:, start:end].contiguous(), right[:, start:end].contiguous()
        raw = torch._scaled_mm(rows, matrix.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=is_fast)
        products.append((raw.float() * scale[number]).to(torch.bfloat16))
        start = end
    if right.dim() == 2:
        return torch.stack(products)
    return torch.cat([*products, left.new_zeros(left.shape[0] - start, right.shape[1], dtype=torch.bfloat16)])


def _grouped_mm_on_gpu(left: Tensor, right: Tensor, scale: Tensor, ends: Tensor, *, is_fast: bool) -> Tensor:
    """Multiply for all experts in one kernel.

    Each expert must have rows, in a multiple of 16.
    """
    is_stack = right.dim() == 3
    num_rows = left.shape[0] * (1 if is_stack else ends.shape[0])
    ones = torch.ones(num_rows, dtype=torch.float32, device=left.device)
    # Contiguous, since flattening alone would keep the expanded scale of a single expert without a stride.
    scale = scale.contiguous()
    return torch._scaled_grouped_mm(
        left,
        right.transpose(-2, -1),
        ones,
        scale if is_stack else scale.view(-1),
        offs=ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=is_fast,
    )


@_grouped_mm.register_fake
def _(left: Tensor, right: Tensor, scale: Tensor, ends: Tensor, is_fast: bool) -> Tensor:
    shape = (left.shape[0], right.shape[1]) if right.dim() == 3 else (ends.shape[0], left.shape[0], right.shape[0])
    return left.new_empty(shape, dtype=torch.bfloat16)


# The compiler weighs products by their FLOPs when it chooses what to save.
@register_flop_formula(torch.ops.megatier.fp8_grouped_mm)
def _(left: Sequence[int], right: Sequence[int], *_: object, **__: object) -> int:
    return 2 * math.prod(left) * right[-2]


def _has_kernel(device: torch.device, num_experts: int) -> bool:
    """Return whether the device has a grouped kernel for this number of experts."""
    if device.type != "cuda" or num_experts > EXPERTS_MAX:
        return False
    major, _ = torch.cuda.get_device_capability(device)
    return major == GROUPED_MM_MAJOR
