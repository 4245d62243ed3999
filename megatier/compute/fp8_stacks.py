"""Stacks of experts whose products are taken of FP8 numbers, by the recipe of `compute.fp8`.

A module of transformers holds the matrices of all experts of a layer in parameters of three dimensions. Each token goes
to several experts: it makes as many pairs. The rows of an expert's pairs are laid together, and one grouped product
multiplies each group with a matrix of its own.

Rows and outputs have scales of their own, as anywhere. What is largest, of a matrix or of the rows that a sum runs
along, is so within an expert: what other tokens or other experts have changes nothing there.

Groups are filled up with rows of zeros to a multiple of 16, by at least one, since the kernel of GPUs takes no others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from megatier.compute.fp8 import ALIGNED, CODES, columns, divided, inverse, rounded
from megatier.readback import on_host

FIRST = ("gate_up_proj", "up_proj")
"""What the first matrices of experts are called, with a gate and without."""
LAST = "down_proj"
"""What the last ones are called."""
GROUPED = 9
"""The major compute capability of GPUs whose kernel takes all groups at once. On others each has a product."""
GROUPS_MAX = 1023
"""The most groups that it takes."""


class Fp8Experts(nn.Module):
    """What stands before a class of experts, and computes as it does, with FP8 products."""

    num_experts: int

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of what the chosen experts give, [tokens, hidden].

        Args:
            hidden_states: [tokens, hidden].
            top_k_index: the experts of each token, [tokens, chosen]; the number of experts: one that is elsewhere.
            top_k_weights: their weights.
        """
        experts: Any = self
        num_tokens, copies = top_k_index.shape
        if num_tokens == 0:
            # Scales are maxima, of which no rows have none, so the class's own forward gives the empty result.
            nothing: Tensor = super().forward(hidden_states, top_k_index, top_k_weights)
            return nothing

        groups = _groups(top_k_index.reshape(-1).long(), self.num_experts)
        has_gate = getattr(experts, "has_gate", True)
        first = FIRST[0] if has_gate else FIRST[1]
        inside = self._product(first, hidden_states, groups, copies)
        # Some models override the gate of the class, such as gpt-oss, which clamps it.
        inside = experts._apply_gate(inside) if has_gate else experts.act_fn(inside)
        # Each pair has a row of its own by now, so a row is that of one pair alone.
        found = self._product(LAST, inside, groups, 1)
        if getattr(experts, "has_post_expert_norm", False):
            found = experts.post_expert_norm(found)

        # In the order of a token's experts, and not of all of them.
        weighted = found * top_k_weights.reshape(-1, 1)
        return weighted.view(num_tokens, copies, -1).sum(1).to(hidden_states.dtype)

    def _product(self, name: str, rows: Tensor, groups: Groups, copies: int) -> Tensor:
        """Return the product of each pair's row with a matrix of its expert, plus the bias; 0 for experts elsewhere."""
        weight: Tensor = getattr(self, name)
        if getattr(self, "is_transposed", False):
            weight = weight.transpose(1, 2)
        result = _multiplied(rows.to(weight.dtype), weight, copies, *groups)
        bias: Tensor | None = getattr(self, f"{name}_bias", None)
        if bias is not None:
            result = result + bias[groups.expert]
        # Selected and not multiplied by 0: what lies behind all groups may be NaN, which a product would keep.
        return result.where(groups.is_own, 0)


class Groups(NamedTuple):
    """Where the rows of pairs lie when those of each expert are together."""

    expert: Tensor
    """The expert of each pair, [pairs]."""
    is_own: Tensor
    """Whether this expert is here, [pairs, 1]. Else another one stands in its place."""
    place: Tensor
    """Where each pair lies, [pairs]. Behind all groups, if its expert is elsewhere."""
    pair: Tensor
    """The pair that lies in each place, [places]; their number: none."""
    ends: Tensor
    """The place behind each group, int32 [experts]."""


_classes: dict[type[nn.Module], type[nn.Module]] = {}
"""Classes of experts with FP8 products, which have the names of those that they are made of."""


def adopt_experts(module: nn.Module, *, is_fp8: bool = True) -> None:
    """Let a stack of experts take its products of FP8 numbers from now on, or those of its own dtype again."""
    kind = type(module)
    if is_fp8 and not isinstance(module, Fp8Experts):
        # One for all layers, so that they share what is compiled.
        if kind not in _classes:
            _classes[kind] = type(kind.__name__, (Fp8Experts, kind), {"__module__": kind.__module__})
        module.__class__ = _classes[kind]
    elif not is_fp8 and isinstance(module, Fp8Experts):
        _, module.__class__ = kind.__bases__


def takes_experts(module: nn.Module) -> bool:
    """Return whether a module is one that `Fp8Experts` knows how to compute."""
    # transformers marks those whose forward may be replaced by this attribute.
    names = {name for name, parameter in module.named_parameters(recurse=False) if parameter.dim() == 3}
    return hasattr(module, "is_transposed") and "forward" not in vars(module) and names <= {*FIRST, LAST}


def takes_sizes(module: nn.Module) -> bool:
    """Return whether the sizes of a stack's matrices are those that FP8 products take on every device."""
    matrices = [parameter.shape[1:] for parameter in module.parameters(recurse=False) if parameter.dim() == 3]
    return all(size % ALIGNED == 0 for shape in matrices for size in shape)


def _groups(chosen: Tensor, count: int) -> Groups:
    """Return where the pairs of each expert lie, of the expert of each pair and the number of experts."""
    num_pairs = chosen.shape[0]
    # An expert's gradient is a sum over its pairs, so these have to lie in the same order every time.
    ordered, order = chosen.sort(stable=True)
    stops = torch.searchsorted(ordered, torch.arange(count, dtype=torch.int64, device=chosen.device), right=True)
    sizes = stops.diff(prepend=stops.new_zeros(1))
    # One more than needed even where a size is a multiple, since no group may be without rows (`_by_kernel`).
    filled = (sizes // ALIGNED + 1) * ALIGNED
    ends = filled.cumsum(0)

    # By how many places a pair lies further back than in order. Pairs that are elsewhere come last.
    shifts = torch.cat([ends - filled - stops + sizes, ends[-1:] - stops[-1:]])
    numbers = torch.arange(num_pairs, dtype=torch.int64, device=chosen.device)
    place = torch.zeros_like(order).index_copy(0, order, numbers + shifts[ordered])
    # An upper bound that depends on shapes alone. The exact number is on the GPU, and the host would have to wait for
    # it.
    num_places = (num_pairs // ALIGNED + 1 + count) * ALIGNED
    pair = numbers.new_full((num_places,), num_pairs).index_copy(0, place, numbers)
    return Groups(chosen.clamp(max=count - 1), (chosen < count)[:, None], place, pair, ends.int())


class _StackProduct(torch.autograd.Function):
    """The product of rows [pairs / copies, K] with matrices [experts, N, K], [pairs, N]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, copies: int, *groups: Tensor) -> Tensor:  # noqa: ANN401
        _, _, place, pair, ends = groups
        rows8, row_scale = rounded(rows, -1)
        weight8, weight_scale = rounded(weight, -1)
        ctx.copies = copies
        # Rows serve the gradient of the weight alone. They are kept as they came, once for all experts of a token.
        kept = (rows8, row_scale) if ctx.needs_input_grad[1] else (None, None)
        ctx.save_for_backward(*kept, weight, weight_scale, *groups)

        # A transposed stack lies by columns, and the kernels take rows alone.
        if not weight8.is_contiguous():
            weight8 = _turned(weight8.transpose(1, 2))
        laid = _laid(rows8, pair, copies)
        raw: Tensor = _grouped(laid, weight8, weight_scale.squeeze(2), ends, True)
        return (raw[place].float() * _copied(row_scale, copies)).to(torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        rows8, row_scale, weight, weight_scale, expert, is_own, place, pair, ends = ctx.saved_tensors
        copies = ctx.copies
        grad8, grad_scale = rounded(grads[0], -1)
        laid_grad = _laid(grad8, pair, 1)
        of_rows = of_weight = None

        if ctx.needs_input_grad[0]:
            # Sums run over the outputs here, so their scales cannot be applied afterwards: the weight is rounded again
            # with one scale for each expert.
            largest = weight_scale.amax(1, keepdim=True)
            turned = weight.transpose(1, 2)
            weight8 = divided(turned, largest) if turned.is_contiguous() else _turned(weight, inverse(largest))
            raw = _grouped(laid_grad, weight8, weight_scale.new_ones(weight8.shape[:2]), ends, False)
            scaled = (raw[place].float() * (grad_scale * largest[expert, 0])).to(torch.bfloat16)
            # A token's gradient adds up all of its pairs, of which those elsewhere may be NaN here.
            of_pairs = scaled.where(is_own, 0)
            of_rows = of_pairs.view(-1, copies, of_pairs.shape[1]).sum(1)
        if ctx.needs_input_grad[1]:
            # Sums run over tokens here, so the scales of both factors move into the rows, as far as they differ from
            # the largest.
            scale = (_copied(row_scale, copies) * grad_scale).where(is_own, 0)
            largest = _largest(scale, expert, ends.shape[0])
            factor = (scale * inverse(largest)[expert])[pair.clamp(max=expert.shape[0] - 1)]
            # Where no pair lies, rows of zeros stay so, whatever another pair's numbers are.
            factor = factor.where((pair < expert.shape[0])[:, None], 1)
            laid_rows = columns(_laid(rows8, pair, copies), factor)
            of_weight = _grouped(columns(laid_grad), laid_rows, largest.expand(-1, laid_rows.shape[0]), ends, False)
        return of_rows, of_weight, None, *(None for _ in Groups._fields)


def _apply(rows: Tensor, weight: Tensor, copies: int, *groups: Tensor) -> Tensor:
    """Return the product of each pair's row with the matrix of its expert."""
    result: Tensor = _StackProduct.apply(rows, weight, copies, *groups)  # type: ignore[no-untyped-call]
    return result


# As in `compute.fp8`.
_multiplied: Callable[..., Tensor] = torch.compiler.allow_in_graph(_apply)


def _copied(rows: Tensor, copies: int) -> Tensor:
    """Return each row so many times, one after the other."""
    return rows[:, None].expand(-1, copies, -1).reshape(-1, rows.shape[1])


def _laid(codes: Tensor, pair: Tensor, copies: int) -> Tensor:
    """Return FP8 rows in the places of their pairs, and zeros in all others. A row is that of so many pairs."""
    num_pairs = codes.shape[0] * copies
    # As bytes, since not every version gathers FP8.
    rows = codes.view(torch.uint8)[pair.clamp(max=num_pairs - 1) // copies]
    return rows.where((pair < num_pairs)[:, None], 0).view(CODES)


def _turned(stack: Tensor, factor: Tensor | None = None) -> Tensor:
    """Return matrices [experts, M, N], whose rows are multiplied with factors [experts, 1, 1], as [experts, N, M]."""
    count, num_rows, num_columns = stack.shape
    rows = None if factor is None else factor.expand(count, num_rows, 1).reshape(-1, 1)
    turned: Tensor = columns(stack.reshape(-1, num_columns), rows)
    return turned.view(num_columns, count, num_rows).transpose(0, 1)


def _largest(scale: Tensor, expert: Tensor, count: int) -> Tensor:
    """Return the largest scale among the pairs of each expert, [experts, 1]; of no pairs the least normal number."""
    # Each pair beside each expert, since a maximum that is scattered would have to be found by atomic operations.
    is_of = expert[:, None] == torch.arange(count, dtype=torch.int64, device=expert.device)
    return scale.where(is_of, 0).amax(0).clamp(min=torch.finfo(torch.float32).tiny)[:, None]


@torch.library.custom_op("megatier::fp8_groups", mutates_args=())
def _grouped(left: Tensor, right: Tensor, scale: Tensor, ends: Tensor, is_fast: bool) -> Tensor:
    """Return the products of groups in bf16, whose columns are multiplied with scales [groups, columns].

    Args:
        left: FP8 [M, K], in rows of which each group ends; or, with `right` as columns of the same groups, [M, K].
        right: FP8 [groups, N, K], for [M, N]; or [N, K], for [groups, M, N].
        scale: fp32, powers of two.
        ends: where the groups end. What is behind the last one has any numbers.
        is_fast: whether sums are taken with fewer bits, as is usual in a forward.
    """
    if _has_kernel(left.device, ends.shape[0]):
        return _by_kernel(left, right, scale, ends, is_fast=is_fast)

    # Without that kernel each group is a product of its own, whose bounds the host has to know: it waits for the
    # device.
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


def _by_kernel(left: Tensor, right: Tensor, scale: Tensor, ends: Tensor, *, is_fast: bool) -> Tensor:
    """Return the products of all groups by one kernel.

    It may not be asked for groups without rows, or of a number of rows that is no multiple of 16.
    """
    is_stack = right.dim() == 3
    num_rows = left.shape[0] * (1 if is_stack else ends.shape[0])
    ones = torch.ones(num_rows, dtype=torch.float32, device=left.device)
    return torch._scaled_grouped_mm(
        left,
        right.transpose(-2, -1),
        ones,
        scale.contiguous() if is_stack else scale.flatten(),
        offs=ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=is_fast,
    )


@_grouped.register_fake
def _(left: Tensor, right: Tensor, scale: Tensor, ends: Tensor, is_fast: bool) -> Tensor:
    shape = (left.shape[0], right.shape[1]) if right.dim() == 3 else (ends.shape[0], left.shape[0], right.shape[0])
    return left.new_empty(shape, dtype=torch.bfloat16)


# A compiler weighs products by their operations when it chooses what to save.
@register_flop_formula(torch.ops.megatier.fp8_groups)
def _(left: Sequence[int], right: Sequence[int], *_: object, **__: object) -> int:
    return 2 * math.prod(left) * right[-2]


def _has_kernel(device: torch.device, num_groups: int) -> bool:
    """Return whether a kernel takes all groups at once."""
    if device.type != "cuda" or num_groups > GROUPS_MAX:
        return False
    major, _ = torch.cuda.get_device_capability(device)
    return major == GROUPED
