"""Triton kernels for what Muon does element by element: its momentum, the norm, and the change of the master.

They read and write each plane once or twice, where torch's operations would pass over memory more than twice as often,
and hold fp32 copies of the matrix. Each matrix of a stack has programs of its own, so its bits do not depend on others.

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
"""Elements of one program, and of one partial sum of squares."""
_NUM_WARPS = 8
SUMS_AT_ONCE = 1024
"""Partial sums that are added side by side."""


def begin_step(grad: Tensor, momentum: Tensor, shape: tuple[int, ...], grad_scale: float, decay: float) -> Tensor:
    """Update momentum in place, and return what is made orthogonal.

    Args:
        grad: flat bf16 or fp32, of one matrix or of a stack.
        momentum: flat fp32, of the same elements.
        shape: rows and columns, after the number of experts if there are several.
        grad_scale: by which gradients are multiplied.
        decay: of the momentum.

    Returns:
        fp16 [.., rows, columns], each matrix of norm `SCALE`, with rows and columns of zeros up to multiples of `SIDE`.
    """
    *stack, rows, columns = shape
    num_matrices = math.prod(stack)
    count = rows * columns
    num_blocks = triton.cdiv(count, ELEMENTS_AT_ONCE)
    grid = num_blocks, num_matrices
    scalars = grad_scale, decay, 1 - decay
    # No operation is fused with another one, so that both kernels compute the same numbers.
    options = {"num_warps": _NUM_WARPS, "enable_fp_fusion": False}

    # Each program has a place of its own: atomic additions come in any order, which would change bits.
    sums = torch.empty(num_matrices, num_blocks, dtype=torch.float32, device=grad.device)
    _step_momentum[grid](grad, momentum, sums, count, num_blocks, scalars, ELEMENTS_AT_ONCE, **options)

    factors = torch.empty(num_matrices, dtype=torch.float32, device=grad.device)
    _invert_norm[(num_matrices,)](sums, factors, num_blocks, SCALE, EPS, SUMS_AT_ONCE)

    sides = [-(-side // SIDE) * SIDE for side in (rows, columns)]
    is_padded = sides != [rows, columns]

    # The kernel never writes the padding, so that has to be zero before.
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
        x: fp16 [.., rows, columns], with rows and columns up to multiples of `SIDE`.
        weight: flat bf16 with a remainder, else the fp32 master.
        remainder: flat int16.
        shape: as in `begin_step`.
        decay: by which the master is multiplied.
        rate: see above.
    """
    *stack, rows, columns = shape
    count = rows * columns
    sides = tuple(x.shape[-2:])
    grid = triton.cdiv(count, ELEMENTS_AT_ONCE), math.prod(stack)

    # A bf16 weight is the upper half of a master, so its bits are taken, and not its number.
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
    """Update a block of momentum, and sum the squares of what comes of it."""
    grad_scale, decay, growth = scalars
    first, elements = _elements(count, block)
    inside = elements < count
    g = tl.load(grad + first + elements, inside, 0).to(tl.float32) * grad_scale
    m = _between(tl.load(momentum + first + elements, inside, 0), g, growth)
    tl.store(momentum + first + elements, m, inside)

    u = _between(g, m, decay)
    place = sums + tl.program_id(1) * num_blocks + tl.program_id(0)
    tl.store(place, tl.sum(u * u))


@_jit
def _invert_norm(
    sums: tl.tensor,
    factors: tl.tensor,
    num_blocks: tl.int32,
    scale: tl.float32,
    least: tl.float32,
    at_once: tl.constexpr,
) -> None:
    """Add up the sums of squares of one matrix, and store the scale over its norm."""
    matrix = tl.program_id(0)

    # In fp64, since a large matrix has thousands of partial sums.
    total = tl.zeros((at_once,), tl.float64)
    for start in range(0, num_blocks, at_once):
        index = start + tl.arange(0, at_once)
        total += tl.load(sums + matrix * num_blocks + index, index < num_blocks, 0).to(tl.float64)

    # Both are rounded to nearest, as IEEE says: Triton's plain root and division are approximate.
    norm = tl.sqrt_rn(tl.sum(total).to(tl.float32))
    tl.store(factors + matrix, tl.div_rn(scale, tl.maximum(norm, least)))


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
    """Compute again what `_step_momentum` summed the squares of, and write it with the norm that is wanted."""
    grad_scale, decay, _ = scalars
    first, elements = _elements(count, block)
    inside = elements < count
    g = tl.load(grad + first + elements, inside, 0).to(tl.float32) * grad_scale
    m = tl.load(momentum + first + elements, inside, 0)

    # Made again, since to hold it in fp32 would take as much memory as the momentum.
    u = _between(g, m, decay) * tl.load(factors + tl.program_id(1))
    place = _place(elements, columns, rows_of_x, columns_of_x, is_padded)
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
    place = _place(elements, columns, rows_of_x, columns_of_x, is_padded)
    direction = tl.load(x + place, inside, 0).to(tl.float32)

    master = tl.load(weight + first + elements, inside, 0)
    if remainder is not None:
        # It has a sign, since the weight was rounded to nearest and may be larger than the master.
        rest = tl.load(remainder + first + elements, inside, 0)
        low = rest.to(tl.int32).to(tl.uint32, bitcast=True)
        master = ((master.to(tl.uint32) << 16) + low).to(tl.float32, bitcast=True)

    master = master * decay - rate * direction
    bits = one_nan(master.to(tl.uint32, bitcast=True))
    if remainder is None:
        tl.store(weight + first + elements, bits.to(tl.float32, bitcast=True), inside)
    else:
        tl.store(weight + first + elements, ((bits + 0x8000) >> 16).to(tl.uint16), inside)
        tl.store(remainder + first + elements, bits.to(tl.uint16).to(tl.int16, bitcast=True), inside)


@_jit
def _elements(count: tl.int64, block: tl.constexpr) -> tl.tuple:
    """Return the first element of a program's matrix in the planes, and the elements of its block in the matrix."""
    # In 64 bits: a stack of experts may have more than 2**31 elements.
    first = tl.program_id(1).to(tl.int64) * count
    start = tl.program_id(0).to(tl.int64) * block
    return first, start + tl.arange(0, block)


@_jit
def _place(
    elements: tl.tensor,
    columns: tl.int32,
    rows_of_x: tl.int32,
    columns_of_x: tl.int32,
    is_padded: tl.constexpr,
) -> tl.tensor:
    """Return where elements of a matrix lie in X, whose rows may be longer."""
    first = tl.program_id(1).to(tl.int64) * rows_of_x * columns_of_x
    if is_padded:
        return first + elements // columns * columns_of_x + elements % columns
    else:  # noqa: RET505  Triton decides at compile time, so it needs both branches
        return first + elements


@_jit
def _between(start: tl.tensor, end: tl.tensor, share: tl.tensor) -> tl.tensor:
    """Return what lies so far on the way from one number to another, computed as torch's `lerp` does."""
    # Each form begins at the nearer end, so that a share of 1 gives exactly the end.
    way = end - start
    return tl.where(share < 0.5, start + share * way, end - way * (1 - share))
