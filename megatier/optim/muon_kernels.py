"""Triton kernels for Muon's elementwise parts: its momentum, the norm, and the change of the master.

They read and write each plane once or twice, where torch's operations would go over memory more than twice as often and
hold fp32 copies of the matrix. Each matrix of a stack has its own programs, so its bits do not depend on others.

Import it only if CUDA is available: Triton comes with torch's CUDA builds alone. Launches go to the current stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from megatier.optim.fp16_matmul import SIDE
from megatier.optim.kernels import one_nan
from megatier.optim.newton_schulz import EPS, SCALE

_jit: Callable[[Callable[..., Any]], Any] = triton.jit

ELEMENTS_AT_ONCE = 2048
"""The elements of one program, and of one partial sum of squares."""
_NUM_WARPS = 8
SUMS_AT_ONCE = 1024
"""The number of partial sums that are added side by side."""


def begin_step(grad: Tensor, momentum: Tensor, shape: tuple[int, ...], grad_scale: float, decay: float) -> Tensor:
    """Update momentum in place, and return the input of `orthogonal`.

    Args:
        grad: flat bf16 or fp32, of one matrix or of a stack.
        momentum: flat fp32, of the same elements.
        shape: rows and columns, after the number of experts if there are several.
        grad_scale: the factor on the gradient.
        decay: the decay of the momentum.

    Returns:
        fp16 [.., rows, columns], each matrix with norm `SCALE`, padded with zeros to multiples of `SIDE`.
    """
    *stack, rows, columns = shape
    num_matrices = math.prod(stack)
    count = rows * columns
    num_blocks = triton.cdiv(count, ELEMENTS_AT_ONCE)
    grid = num_blocks, num_matrices
    scalars = grad_scale, decay, 1 - decay
    # Without fused operations both kernels compute the same numbers.
    options = {"num_warps": _NUM_WARPS, "enable_fp_fusion": False}

    # Each program stores its own sum, since atomic additions come in any order, which would change bits.
    sums = torch.empty(num_matrices, num_blocks, dtype=torch.float32, device=grad.device)
    _step_momentum[grid](grad, momentum, sums, count, num_blocks, scalars, ELEMENTS_AT_ONCE, **options)

    factors = torch.empty(num_matrices, dtype=torch.float32, device=grad.device)
    _invert_norm[(num_matrices,)](sums, factors, num_blocks, SCALE, EPS, SUMS_AT_ONCE)

    sides = [-(-side // SIDE) * SIDE for side in (rows, columns)]
    is_padded = sides != [rows, columns]

    # The kernel never writes the padding, which must be zero.
    x = (torch.zeros if is_padded else torch.empty)(*stack, *sides, dtype=torch.float16, device=grad.device)
    _normalise[grid](
        grad, momentum, factors, x, count, columns, *sides, scalars, is_padded, ELEMENTS_AT_ONCE, **options
    )
    return x


def end_step(
    x: Tensor, weight: Tensor, remainder: Tensor | None, shape: tuple[int, ...], decay: float, rate: float
) -> None:
    """Change the master in place: master * decay - rate * x.

    Args:
        x: fp16 [.., rows, columns], padded to multiples of `SIDE`.
        weight: flat bf16 with a remainder, else the fp32 master.
        remainder: flat int16.
        shape: as in `begin_step`.
        decay: the factor on the master.
        rate: the factor on `x`.
    """
    *stack, rows, columns = shape
    count = rows * columns
    sides = tuple(x.shape[-2:])
    grid = triton.cdiv(count, ELEMENTS_AT_ONCE), math.prod(stack)

    # A bf16 weight is the upper half of a master, so its bits are used, not its value.
    number = torch.float32 if remainder is None else torch.uint16
    planes = weight.view(number), remainder
    is_padded = sides != (rows, columns)
    _change_master[grid](
        x,
        planes,
        count,
        columns,
        *sides,
        (decay, rate),
        is_padded,
        ELEMENTS_AT_ONCE,
        num_warps=_NUM_WARPS,
        enable_fp_fusion=False,
    )


@_jit
def _step_momentum(
    grad: tl.tensor,
    momentum: tl.tensor,
    sums: tl.tensor,
    count: tl.int64,
    num_blocks: tl.int32,
    scalars: tl.tuple,
    block: tl.constexpr,
) -> None:
    """Update a block of momentum, and sum the squares of the resulting direction."""
    grad_scale, decay, growth = scalars
    first, elements = _elements(count, block)
    inside = elements < count
    grads = grad + first + elements
    momenta = momentum + first + elements

    g = tl.load(grads, inside, 0).to(tl.float32)
    g = g * grad_scale
    m = tl.load(momenta, inside, 0)
    m = _lerp(m, g, growth)
    tl.store(momenta, m, inside)

    u = _lerp(g, m, decay)
    total = tl.sum(u * u)
    place = sums + tl.program_id(1) * num_blocks + tl.program_id(0)
    tl.store(place, total)


@_jit
def _invert_norm(
    sums: tl.tensor,
    factors: tl.tensor,
    num_blocks: tl.int32,
    scale: tl.float32,
    least: tl.float32,
    at_once: tl.constexpr,
) -> None:
    """Add up one matrix's sums of squares, and store the scale over its norm."""
    matrix = tl.program_id(0)

    # In fp64, since a large matrix has thousands of partial sums.
    total = tl.zeros((at_once,), tl.float64)
    for start in range(0, num_blocks, at_once):
        index = start + tl.arange(0, at_once)
        partials = tl.load(sums + matrix * num_blocks + index, index < num_blocks, 0)
        total += partials.to(tl.float64)

    # Rounded to nearest as IEEE requires, since Triton's plain root and division are approximate.
    squares = tl.sum(total).to(tl.float32)
    norm = tl.sqrt_rn(squares)
    norm = tl.maximum(norm, least)
    tl.store(factors + matrix, tl.div_rn(scale, norm))


@_jit
def _normalise(
    grad: tl.tensor,
    momentum: tl.tensor,
    factors: tl.tensor,
    x: tl.tensor,
    count: tl.int64,
    columns: tl.int32,
    rows_of_x: tl.int32,
    columns_of_x: tl.int32,
    scalars: tl.tuple,
    is_padded: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Recompute the direction of `_step_momentum`, and write it normalised."""
    grad_scale, decay, _ = scalars
    first, elements = _elements(count, block)
    inside = elements < count
    g = tl.load(grad + first + elements, inside, 0).to(tl.float32)
    g = g * grad_scale
    m = tl.load(momentum + first + elements, inside, 0)

    # Recomputed, since holding it in fp32 would take as much memory as the momentum.
    factor = tl.load(factors + tl.program_id(1))
    u = _lerp(g, m, decay) * factor
    place = _offset_in_x(elements, columns, rows_of_x, columns_of_x, is_padded)
    tl.store(x + place, u.to(tl.float16), inside)


@_jit
def _change_master(
    x: tl.tensor,
    planes: tl.tuple,
    count: tl.int64,
    columns: tl.int32,
    rows_of_x: tl.int32,
    columns_of_x: tl.int32,
    scalars: tl.tuple,
    is_padded: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Change a block of the master, which is joined and split as in `kernels`."""
    weight, remainder = planes
    decay, rate = scalars
    first, elements = _elements(count, block)
    inside = elements < count
    place = _offset_in_x(elements, columns, rows_of_x, columns_of_x, is_padded)
    direction = tl.load(x + place, inside, 0).to(tl.float32)
    weights = weight + first + elements

    master = tl.load(weights, inside, 0)
    if remainder is not None:
        # It has a sign, since the weight was rounded to nearest and may be larger than the master.
        rest = tl.load(remainder + first + elements, inside, 0)
        low = rest.to(tl.int32).to(tl.uint32, bitcast=True)
        high = master.to(tl.uint32) << 16
        master = (high + low).to(tl.float32, bitcast=True)

    master = master * decay - rate * direction
    bits = one_nan(master.to(tl.uint32, bitcast=True))
    if remainder is None:
        tl.store(weights, bits.to(tl.float32, bitcast=True), inside)
    else:
        rounded = (bits + 0x8000) >> 16
        low_half = bits.to(tl.uint16)
        tl.store(weights, rounded.to(tl.uint16), inside)
        tl.store(remainder + first + elements, low_half.to(tl.int16, bitcast=True), inside)


@_jit
def _elements(count: tl.int64, block: tl.constexpr) -> tl.tuple:
    """Return the first element of a program's matrix in the planes, and its block's elements in the matrix."""
    # In 64 bits: a stack of experts may have more than 2**31 elements.
    first = tl.program_id(1).to(tl.int64) * count
    start = tl.program_id(0).to(tl.int64) * block
    return first, start + tl.arange(0, block)


@_jit
def _offset_in_x(
    elements: tl.tensor,
    columns: tl.int32,
    rows_of_x: tl.int32,
    columns_of_x: tl.int32,
    is_padded: tl.constexpr,
) -> tl.tensor:
    """Return the places of a matrix's elements in X, whose rows may be padded."""
    first = tl.program_id(1).to(tl.int64) * rows_of_x * columns_of_x
    if is_padded:
        return first + elements // columns * columns_of_x + elements % columns
    else:  # noqa: RET505  Triton decides at compile time, so it needs both branches
        return first + elements


@_jit
def _lerp(start: tl.tensor, end: tl.tensor, weight: tl.tensor) -> tl.tensor:
    """Interpolate linearly between two numbers, as torch's `lerp` does."""
    # Each form starts at the nearer end, so that a weight of 1 gives exactly the end.
    way = end - start
    return tl.where(weight < 0.5, start + weight * way, end - way * (1 - weight))
