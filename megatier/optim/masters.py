"""Converts planes to the fp32 numbers that they represent, and back: masters in two planes, moments in one."""

from __future__ import annotations

import torch
from torch import Tensor

from megatier import _native
from megatier.address import address_of
from megatier.state import StateSchema
from megatier.tier import Kind


def plane_dtype(schema: StateSchema, kind: Kind) -> torch.dtype:
    """Return the dtype of a plane's elements."""
    # Schemas name dtypes by text, since plans are made without torch.
    dtype = getattr(torch, schema.dtype(kind))
    assert isinstance(dtype, torch.dtype)
    return dtype


def weight_dtype(schema: StateSchema) -> torch.dtype:
    """Return the dtype in which a unit computes, which its weights and its final gradient have."""
    return plane_dtype(schema, Kind.WEIGHT)


def split_master(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Write fp32 [n] as weight bf16 [n] and remainder int16 [n], which are on one device; see `join_master`.

    The master lies on the CPU or, like the planes, on the GPU.
    """
    if master.is_cuda:
        split_by_torch(master, weight, remainder)
        return
    if weight.is_cuda:
        # Split on the CPU by the C code, so that there is one definition of the rounding.
        high = torch.empty_like(weight, device="cpu")
        low = torch.empty_like(remainder, device="cpu")
        split_master(master, high, low)
        weight.copy_(high)
        remainder.copy_(low)
        return

    count = master.numel()
    source = address_of(master, torch.float32, count)
    _native.split(source, *_addresses(weight, remainder, count), count)


def split_by_torch(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Split a master on any device, as `split_one` of native/reduce.h does."""
    # All NaNs become one whose upper half does not wrap around. In place from there, since matrices may be large.
    one_nan = torch.where(master.isnan(), torch.nan, master)
    bits = one_nan.view(torch.int32)
    high = bits.add(0x8000).bitwise_right_shift_(16)
    weight.copy_(high.to(torch.int16).view(torch.bfloat16))

    rounded = high.bitwise_left_shift_(16)
    remainder.copy_(bits.sub_(rounded))


def write_rounded(values: Tensor, plane: Tensor) -> None:
    """Write fp32 [n] on the CPU as a plane [n] on any device, rounded to nearest even as in torch.

    A value that is a bf16 already keeps its bits, even a NaN, since carriers of quantised codes may have any bits.
    """
    rounded = values.to(plane.dtype)
    if rounded.dtype is not values.dtype:
        # torch may turn all NaNs into one. The upper half of such an fp32 number is the original bf16.
        bits = values.view(torch.int32)
        is_bf16 = bits & 0xFFFF == 0
        is_lost = values.isnan() & is_bf16
        if is_lost.any():
            high = bits[is_lost] >> 16
            rounded.view(torch.int16)[is_lost] = high.to(torch.int16)
    plane.copy_(rounded)


def join_master(weight: Tensor, remainder: Tensor, master: Tensor) -> None:
    """Join two planes into their exact fp32 master, all flat [n]. The master lies on the CPU or beside the planes."""
    if weight.is_cuda:
        # The weight is the upper half of the master's bits. The sum wraps around in int32 as in C.
        high = weight.view(torch.int16).int().bitwise_left_shift_(16)
        bits = high.add_(remainder)
        master.copy_(bits.view(torch.float32))
        return

    count = weight.numel()
    target = address_of(master, torch.float32, count)
    _native.join(*_addresses(weight, remainder, count), target, count)


def _addresses(weight: Tensor, remainder: Tensor, count: int) -> tuple[int, int]:
    """Return the addresses of the two planes of a master."""
    return address_of(weight, torch.bfloat16, count), address_of(remainder, torch.int16, count)


CUT_BITS = 21
"""The number of low bits of an fp32 number that an 8-bit moment drops."""
OFFSETS = {Kind.EXP_AVG: 399, Kind.EXP_AVG_SQ: 291}
"""What is subtracted from the remaining bits, without the sign, to make an 8-bit code (native/adamw.h)."""


def widen(kind: Kind, plane: Tensor, target: Tensor) -> None:
    """Convert a plane of moments to fp32, exactly.

    Args:
        kind: the plane's kind.
        plane: [n] in fp32, bf16, or codes of 8 bits in uint8.
        target: fp32 [n].
    """
    if plane.dtype is not torch.uint8:
        target.copy_(plane)
        return

    # Only first moments have a sign, in the highest bit. The last code stands for values that are not finite.
    has_sign = kind is Kind.EXP_AVG
    not_finite = 127 if has_sign else 255
    bits = plane.int()
    code = bits & 0x7F if has_sign else bits

    number_bits = torch.where(code == 0, 0, (code + OFFSETS[kind]) << CUT_BITS)
    number = number_bits.view(torch.float32)
    number[code == not_finite] = torch.nan
    target.copy_(torch.where(bits != code, -number, number))


def narrow(kind: Kind, values: Tensor, plane: Tensor) -> None:
    """Convert fp32 numbers to a plane of moments, rounded to nearest if they need more bits; see `widen`.

    As in an update, positive second moments stay positive, and values above the range become the largest number.
    """
    if plane.dtype is not torch.uint8:
        write_rounded(values, plane)
        return

    # A second moment of 0 would make the next step huge.
    has_sign = kind is Kind.EXP_AVG
    least = 0 if has_sign else 1
    last = 126 if has_sign else 254

    # Half of the last kept bit is added, so cutting off the others rounds.
    bits = values.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    half = 1 << CUT_BITS - 1
    code = ((magnitude + half) >> CUT_BITS) - OFFSETS[kind]
    code = torch.where(magnitude == 0, 0, code.clamp(least, last))
    code = torch.where(values.isfinite(), code, last + 1)
    if has_sign:
        code |= (bits < 0).int() << 7
    plane.copy_(code)
