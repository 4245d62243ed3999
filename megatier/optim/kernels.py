"""Triton kernels for AdamW and sums of squares, with the same bits as native/adamw.c and native/reduce.c.

Four things keep the bits of AdamW equal. No operations are fused (`enable_fp_fusion=False`). Square root and division
round to nearest (plain `/` and `tl.sqrt` are approximate). Subnormals are kept (by Triton from 3.6 on; 3.5 flushes
those of roots and quotients). Master, weight and remainder are joined and split as integers. Sums of squares follow the
summation tree of the C code, lane by lane.

Import it only if CUDA is available: Triton comes with torch's CUDA builds alone. Launches go to the current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from megatier.optim import norm_tiles
from megatier.optim.adamw import Rounding

_jit: Callable[[Callable[..., Any]], Any] = triton.jit(do_not_specialize=["count", "key_low", "key_high", "first"])
"""Lengths and keys are not compiled in, so one kernel serves all. Only the last block needs the length."""

BLOCK_ELEMENTS = 1024
"""The elements of one program of the AdamW kernel."""
BLOCK_WARPS = 8
"""4 elements per thread: 16 bytes of an fp32 plane and 8 of a 16-bit one, so no data moves between threads."""

TILE_ELEMENTS = tl.constexpr(norm_tiles.TILE_ELEMENTS)
"""The elements under one partial sum of squares, as a constant for kernels."""
LANES = tl.constexpr(256)
"""The running sums of each tile, as in native/reduce.h."""
LANE_WARPS = 4
"""The warps of a tile's program. Each of their 128 threads has two lanes."""
ROWS_AHEAD = tl.constexpr(16)
"""Rows of lanes that are loaded before the first one is added."""

EXP_AVG_OFFSET = tl.constexpr(399)
"""An 8-bit code of a first moment plus this is the exponent and the upper 2 mantissa bits of its fp32 number."""
EXP_AVG_SQ_OFFSET = tl.constexpr(291)
"""The same of a second moment."""
LEAST_EXP_AVG_BITS = tl.constexpr(0x32000000)
"""The fp32 bits of 2^-27, the smallest first moment that has a code."""
LEAST_EXP_AVG_PART = tl.constexpr(2.0**-43)
"""That number divided by the 65,536 values of 16 random bits. Multiplying by a power of two is exact."""

KernelPlanes = tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor]
KernelScalars = tuple[float, float, float, float, float, float, float, float]
HALF = 0xFFFF_FFFF
"""The mask of 32 bits, for the halves of a key and for element numbers."""


# Hop 5 of a byte's journey if the update runs on the GPU; the mark is in optimizer.py.
def adamw(
    planes: KernelPlanes,
    segments: Sequence[tuple[int, int, float]],
    scalars: KernelScalars,
    rounding: Rounding | None = None,
) -> None:
    """Run AdamW in place, with one launch per segment. native/adamw.h has the definition.

    Args:
        planes: weight, remainder, exp_avg, exp_avg_sq and grad, flat uint8 on the GPU. With a remainder, weight and
            grad are bf16. Without one, weight is the fp32 master and grad is fp32. Without exp_avg_sq this is Lion, and
            exp_avg its momentum.
        segments: (start, stop, decay) in elements, not overlapping. Starts at multiples of 128 elements are fast.
        scalars: see `_native.ThreadPool.submit_adamw`; these and decay are rounded to fp32.
        rounding: as in `begin_adamw`; None: moments are fp32.
    """
    weight, remainder, exp_avg, exp_avg_sq, grad = planes
    number = torch.float32 if remainder is None else torch.uint16
    width, key, first = rounding or (4, 0, 0)
    moment = {4: torch.float32, 2: torch.uint16, 1: torch.uint8}[width]
    views = (
        weight.view(number),
        None if remainder is None else remainder.view(torch.int16),
        exp_avg.view(moment),
        None if exp_avg_sq is None else exp_avg_sq.view(moment),
        grad.view(number),
    )

    # One launch per decay, since a decay per element would be another plane to read.
    for start, stop, decay in segments:
        pieces = tuple(None if view is None else view[start:stop] for view in views)
        count = stop - start
        # Elements are numbered in 32 bits from the unit's first one, as in native/adamw.h, so random bits do not depend
        # on where a segment or launch begins.
        launch = _update[(triton.cdiv(count, BLOCK_ELEMENTS),)]
        launch(
            pieces,
            count,
            decay,
            scalars,
            key & HALF,
            key >> 32,
            (first + start) & HALF,
            BLOCK_ELEMENTS,
            num_warps=BLOCK_WARPS,
            # A fused multiply-add would round once where the C code rounds twice.
            enable_fp_fusion=False,
        )


def sum_squares_on_gpu(piece: Tensor, first: int = 0) -> Tensor:
    """Compute partial sums of squares, one per tile, in the order of `_native.sum_squares`.

    Args:
        piece: flat bf16 or fp32 on the GPU.
        first: the index of its first element, counted from where tiles begin. Multiples of 16 are fast.

    Returns:
        fp64 [tiles that it has elements in], on the same device. They equal the CPU's bit for bit, except the payload
        of a NaN.
    """
    tile = TILE_ELEMENTS.value
    count = piece.numel()
    skipped = first % tile
    # Without elements there is no tile, even if the skipped elements reach into one.
    num_tiles = triton.cdiv(skipped + count, tile) if count else 0
    partials = torch.empty(num_tiles, dtype=torch.float64, device=piece.device)

    launch = _sum_tiles[(num_tiles,)]
    launch(_numbers(piece), skipped, count, partials, num_warps=LANE_WARPS)
    return partials


def sum_runs(values: Tensor, runs: Tensor, *, aligned: bool) -> Tensor:
    """Compute a sum of squares for each run of elements in one launch. No run is longer than a tile.

    Args:
        values: flat bf16 or fp32 on the GPU.
        runs: int64 [runs, 2] on the same device: the first element of each run, and its length, above 0.
        aligned: whether all first elements are multiples of 16, which is fast.

    Returns:
        fp64 [runs], of which each equals that of `sum_squares_on_gpu` over its run.
    """
    sums = torch.empty(len(runs), dtype=torch.float64, device=values.device)
    launch = _sum_runs[(len(runs),)]
    launch(_numbers(values), runs, sums, aligned, num_warps=LANE_WARPS)
    return sums


def _numbers(values: Tensor) -> Tensor:
    """View bf16 as integers, which the kernel widens to fp32 itself (`_float_of`)."""
    return values.view(torch.uint16) if values.dtype is torch.bfloat16 else values


# ---------------------------------------------------------------------- AdamW


@_jit
def _update(
    planes: tl.tuple,
    count: tl.int64,
    decay: tl.float32,
    scalars: tl.tuple,
    key_low: tl.uint32,
    key_high: tl.uint32,
    first: tl.uint32,
    block: tl.constexpr,
) -> None:
    """Update one block of a segment. A full block has no mask, which would make Triton load element by element."""
    # In 64 bits, since a unit may have more than 2^31 elements.
    start = tl.program_id(0).to(tl.int64) * block
    elements = start + tl.arange(0, block)
    rounding = (key_low, key_high, first)
    if start + block <= count:
        _update_elements(planes, elements, None, decay, scalars, rounding)
    else:
        _update_elements(planes, elements, elements < count, decay, scalars, rounding)


@_jit
def _update_elements(
    planes: tl.tuple,
    elements: tl.tensor,
    inside: tl.tensor | None,
    decay: tl.tensor,
    scalars: tl.tuple,
    rounding: tl.tuple,
) -> None:
    """Run AdamW or Lion on some elements, in exactly the order of operations of native/adamw.h."""
    weight, remainder, exp_avg, exp_avg_sq, grad = planes
    beta1, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, sqrt_bias2, grad_scale = scalars
    x = tl.load(weight + elements, inside)
    m = tl.load(exp_avg + elements, inside)
    v = None if exp_avg_sq is None else tl.load(exp_avg_sq + elements, inside)
    g = tl.load(grad + elements, inside)
    if remainder is not None:
        x = _join_master(x, tl.load(remainder + elements, inside))

    g = _float_of(g) * grad_scale
    if exp_avg_sq is None:
        # Lion steps by the sign of a mean weighted by beta1, and stores one weighted by beta2. Two comparisons give the
        # sign 0 for 0 and for NaN.
        mean = beta1 * m + one_minus_beta1 * g
        x = x * decay
        sign = (mean > 0).to(tl.float32) - (mean < 0).to(tl.float32)
        x = x - step_size * sign
        m = _flush_subnormals(beta2 * m + one_minus_beta2 * g)
        tl.store(exp_avg + elements, m, inside)
    else:
        if exp_avg.dtype.element_ty == tl.uint8:
            m, v = _decode_exp_avg(m), _decode_exp_avg_sq(v)
        m = _flush_subnormals(beta1 * _float_of(m) + one_minus_beta1 * g)
        v = _flush_subnormals(beta2 * _float_of(v) + one_minus_beta2 * (g * g))
        x = x * decay
        root = tl.div_rn(tl.sqrt_rn(v), sqrt_bias2)
        x = x - step_size * tl.div_rn(m, root + eps)
        # The step above used both moments in fp32, so rounding only changes what is stored.
        if exp_avg.dtype.element_ty != tl.float32:
            # One hash serves both moments. m takes its lower half and v its upper half, so that they round
            # independently.
            random = _random_bits(elements, rounding)
            if exp_avg.dtype.element_ty == tl.uint8:
                m = _encode_exp_avg(m, random & 0xFFFF)
                v = _encode_exp_avg_sq(v, random >> 16)
            else:
                m = _round_to_bf16(m, random & 0xFFFF)
                v = _round_to_bf16(v, random >> 16)
        tl.store(exp_avg + elements, m, inside)
        tl.store(exp_avg_sq + elements, v, inside)

    _store_master(weight, remainder, elements, x, inside)


@_jit
def _join_master(weight: tl.tensor, remainder: tl.tensor) -> tl.tensor:
    """Return the fp32 master of a bf16 weight and its remainder: its bits are (weight << 16) + remainder."""
    # Unsigned, so that the sum wraps around as in C.
    high = weight.to(tl.uint32) << 16
    low = remainder.to(tl.int32).to(tl.uint32, bitcast=True)
    return (high + low).to(tl.float32, bitcast=True)


@_jit
def _store_master(
    weight: tl.tensor,
    remainder: tl.tensor | None,
    elements: tl.tensor,
    master: tl.tensor,
    inside: tl.tensor | None,
) -> None:
    """Store an fp32 master: as it is, or split into a bf16 weight and its remainder."""
    bits = one_nan(master.to(tl.uint32, bitcast=True))
    if remainder is None:
        tl.store(weight + elements, bits.to(tl.float32, bitcast=True), inside)
    else:
        # Rounded half away from zero. The remainder, bits - (weight << 16), is the lower half of the bits.
        tl.store(weight + elements, ((bits + 0x8000) >> 16).to(tl.uint16), inside)
        tl.store(remainder + elements, bits.to(tl.uint16).to(tl.int16, bitcast=True), inside)


@_jit
def _flush_subnormals(moment: tl.tensor) -> tl.tensor:
    """Flush a subnormal moment to +0, and make every NaN the same one, on the bits as in native/adamw.c."""
    bits = moment.to(tl.uint32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) < 0x00800000, 0, bits)
    return one_nan(bits).to(tl.float32, bitcast=True)


@_jit
def one_nan(bits: tl.tensor) -> tl.tensor:
    """Replace every NaN by the quiet one. Payloads differ between processors, and stored bits must not."""
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)


@_jit
def _random_bits(elements: tl.tensor, rounding: tl.tuple) -> tl.tensor:
    """Return 32 random bits for each element, by the hash of native/adamw.h."""
    key_low, key_high, first = rounding
    # lowbias32 by Chris Wellons, with the key added twice. It has no state, so programs need no order.
    number = first.to(tl.uint32) + elements.to(tl.uint32)
    bits = number ^ key_low.to(tl.uint32)
    bits = bits ^ (bits >> 16)
    bits = bits * 0x7FEB352D
    bits = bits ^ (bits >> 15)
    bits = bits + key_high.to(tl.uint32)
    bits = bits * 0x846CA68B
    return bits ^ (bits >> 16)


@_jit
def _round_to_bf16(moment: tl.tensor, random: tl.tensor) -> tl.tensor:
    """Round moments stochastically to the bits of bf16, with 16 random bits each."""
    # The probability of a carry into the upper half is proportional to what is cut off, so the stored number is right
    # on average.
    return ((moment.to(tl.uint32, bitcast=True) + random) >> 16).to(tl.uint16)


# Moments in 8 bits, with the constants of native/adamw.c.


@_jit
def _decode_exp_avg(byte: tl.tensor) -> tl.tensor:
    """Decode first moments from 8-bit codes."""
    byte = byte.to(tl.uint32)
    code = byte & 0x7F
    # The code 0 stands for 0.
    bits = tl.where(code == 0, 0, (code + EXP_AVG_OFFSET) << 21)
    bits = tl.where(code > 126, 0x7FC00000, bits)
    sign = (byte & 0x80) << 24
    return (bits | sign).to(tl.float32, bitcast=True)


@_jit
def _decode_exp_avg_sq(byte: tl.tensor) -> tl.tensor:
    """Decode second moments from 8-bit codes."""
    code = byte.to(tl.uint32)
    bits = tl.where(code == 0, 0, (code + EXP_AVG_SQ_OFFSET) << 21)
    bits = tl.where(code > 254, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@_jit
def _encode_exp_avg(moment: tl.tensor, random: tl.tensor) -> tl.tensor:
    """Round first moments to codes with 16 random bits each. Below the range they become 0 or the smallest code."""
    bits = moment.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # The 16 random bits, times 32, span the 21 bits that are cut off, so a carry rounds up in proportion to them.
    number = (magnitude + (random << 5)) >> 21
    # Below the range a moment is kept with a probability that is its part of the smallest one.
    size = magnitude.to(tl.float32, bitcast=True)
    is_kept = size > random.to(tl.float32) * LEAST_EXP_AVG_PART
    code = tl.where(magnitude < LEAST_EXP_AVG_BITS, is_kept.to(tl.uint32), number - EXP_AVG_OFFSET)
    code = tl.where(magnitude < 0x7F800000, tl.minimum(code, 126), 127)
    sign = (bits >> 31) << 7
    return (code | sign).to(tl.uint8)


@_jit
def _encode_exp_avg_sq(moment: tl.tensor, random: tl.tensor) -> tl.tensor:
    """Round second moments to codes with 16 random bits each. A positive one stays positive."""
    bits = moment.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    number = (magnitude + (random << 5)) >> 21
    # Below the range they become the smallest number instead of 0: a step divides by the root of v, and would explode.
    code = tl.where(number > EXP_AVG_SQ_OFFSET, tl.minimum(number - EXP_AVG_SQ_OFFSET, 254), 1)
    code = tl.where(magnitude == 0, 0, code)
    code = tl.where(magnitude < 0x7F800000, code, 255)
    return code.to(tl.uint8)


@_jit
def _float_of(values: tl.tensor) -> tl.tensor:
    """Return loaded numbers as fp32. bf16 arrives as uint16, which is the upper half of an fp32 number."""
    if values.dtype == tl.uint16:
        return (values.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:  # noqa: RET505  Triton decides at compile time, so it needs both branches
        return values


# ---------------------------------------------------------------------- sums of squares


@_jit
def _sum_tiles(values: tl.tensor, skipped: tl.int32, count: tl.int64, partials: tl.tensor) -> None:
    """Sum the squares of one tile's elements. The first tile lacks the skipped elements."""
    # In 64 bits, since a unit may have more elements than an int32 counts.
    tile = tl.program_id(0).to(tl.int64)
    first = tile * TILE_ELEMENTS - skipped
    start = tl.maximum(first, 0)
    stop = tl.minimum(first + TILE_ELEMENTS, count)
    left = (stop - start).to(tl.int32)
    total = _sum_of(values + start, left)

    # A sum is a block of one element, so it is stored to a block of one element.
    place = partials + tile + tl.arange(0, 1)
    tl.store(place, total)


@_jit
def _sum_runs(values: tl.tensor, runs: tl.tensor, sums: tl.tensor, aligned: tl.constexpr) -> None:
    """Sum the squares of one run."""
    run = tl.program_id(0).to(tl.int64)
    bounds = runs + 2 * run
    start = tl.load(bounds)
    if aligned:
        # Triton vectorises loads only from starts that it knows to be aligned, and these come from memory.
        start = tl.multiple_of(start, 16)
    left = tl.load(bounds + 1).to(tl.int32)
    total = _sum_of(values + start, left)
    place = sums + run + tl.arange(0, 1)
    tl.store(place, total)


@_jit
def _sum_of(values: tl.tensor, left: tl.tensor) -> tl.tensor:
    """Sum the squares of the next `left` elements, at most a tile.

    Missing elements of the last row count as +0, which changes no sum of squares.
    """
    lanes = tl.zeros([LANES], tl.float64)

    for row in range(0, left, LANES * ROWS_AHEAD):
        # Full rows are loaded without a mask, which would make Triton load element by element.
        if left - row >= LANES * ROWS_AHEAD:
            lanes = _add_rows(lanes, values + row, None)
        else:
            lanes = _add_rows(lanes, values + row, left - row)

    return _fold(lanes)


@_jit
def _add_rows(lanes: tl.tensor, values: tl.tensor, left: tl.tensor | None) -> tl.tensor:
    """Add the squares of elements l, l + 256, ... of the next rows to lane l, in turn.

    The square of an fp32 number is exact in fp64, so fusing product and sum changes nothing.
    """
    for row in tl.static_range(ROWS_AHEAD):
        elements = row * LANES + tl.arange(0, LANES)
        loaded = tl.load(values + elements) if left is None else tl.load(values + elements, elements < left, 0)
        number = _float_of(loaded).to(tl.float64)
        lanes += number * number
    return lanes


@_jit
def _fold(lanes: tl.tensor) -> tl.tensor:
    """Add lane l + 128 to lane l, then lane l + 64, ... l + 1, as the C code does.

    Each sum has two terms, since the order in which Triton adds more of them is not fixed.
    """
    for half in tl.static_range(8):
        lanes = tl.sum(tl.reshape(lanes, [2, LANES >> (half + 1)]), 0)
    return lanes
