"""Computes AdamW on planes of state: the numbers of a step, and the kernel that fits the planes' device.

`optimizer` has the formula. Any code with planes and a gradient may call this: the optimizer of a run, `TieredAdamW`,
and the probes that measure it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatier import _native
from megatier.address import address_of
from megatier.compute.seeds import rounding_key
from megatier.planes import Planes
from megatier.state import StateSchema
from megatier.tier import Kind

QUEUED_A_THREAD = 16
"""The most requests that wait for each thread of AdamW. With so many no thread runs dry, and a chunk from NVMe does not
wait for a whole unit."""

_MOMENT_DTYPES = {2: torch.bfloat16, 1: torch.uint8}
"""The dtype of moments that are rounded, by the bytes of one."""
StepScalars = tuple[float, float, float, float, float, float, float]
"""The numbers that the kernels take of a step: `Scalars.of_kernels` without the clip coefficient."""
Rounding = tuple[int, int, int]
"""How moments are rounded: the bytes of one, the key (`seeds.rounding_key`), and the number in the whole unit of the
planes' first element."""


@dataclass(frozen=True, slots=True)
class Scalars:
    """The numbers of one step that an update takes in addition to the planes."""

    decay: float
    """The factor on the weights of parameters that decay: 1 - learning rate * weight decay."""
    step: int
    """The number of the step, which decides how moments are rounded."""
    learning_rate: float
    """Of Muon, which takes it as it is; AdamW's is in the step size."""
    momentum: float
    """The decay of Muon's momentum."""
    of_kernels: tuple[float, float, float, float, float, float, float, float]
    """beta1, 1 - beta1, beta2, 1 - beta2, eps, step size, root of the bias correction, clip coefficient."""


def step_scalars(step: int, learning_rate: float, betas: tuple[float, float], eps: float) -> StepScalars:
    """Return the numbers that the kernels take of step 1, 2, ..."""
    # All of this is in fp64, and the kernels round each number once to fp32. In fp32 1 - 0.999 would have no
    # more than 15 good bits. The corrections of bias are among these numbers, so that no element divides by them.
    beta1, beta2 = betas
    step_size = learning_rate / (1 - beta1**step)
    bias2_root = math.sqrt(1 - beta2**step)
    return (
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        eps,
        step_size,
        bias2_root,
    )


def lion_scalars(learning_rate: float, betas: tuple[float, float]) -> StepScalars:
    """Return Lion's scalars in the order of AdamW's. It has no bias to correct."""
    beta1, beta2 = betas
    # The places are those of AdamW, since one kernel runs both. Lion has no second moment, so nothing to add eps to.
    return (beta1, 1 - beta1, beta2, 1 - beta2, 0.0, learning_rate, 1.0)


def adamw_threads(num_threads: int) -> _native.ThreadPool:
    """Start threads for `begin_adamw`, which blocks while they have enough to do."""
    return _native.ThreadPool(num_threads, QUEUED_A_THREAD * num_threads)


def rounding_of(schema: StateSchema, seed: int, step: int, unit: str, first: int) -> Rounding | None:
    """Return how moments are rounded; None: they are fp32.

    Args:
        schema: of the planes.
        seed: of the run.
        step: 1, 2, ...
        unit: its name, or whatever tells apart what is updated in one step.
        first: the number in the whole unit of the planes' first element.
    """
    # Lion and Muon have a momentum instead, which is always fp32.
    if Kind.EXP_AVG not in schema.kinds:
        return None
    width = schema.width(Kind.EXP_AVG)
    if width == torch.float32.itemsize:
        return None
    return width, rounding_key(seed, step, unit), first


def begin_adamw(
    pool: _native.ThreadPool,
    planes: Planes,
    grad: Tensor,
    segments: Sequence[tuple[int, int, float]],
    scalars: Scalars,
    before: Planes,
    rounding: Rounding | None = None,
) -> _native.Batch | None:
    """Begin AdamW on flat planes of one device, or Lion if they have a momentum.

    Args:
        pool: does it on the CPU.
        planes: the planes of each kind of state. With a remainder, weight and gradient are bf16, else fp32.
        grad: the gradient of the same elements.
        segments: (start, stop, decay) in elements.
        scalars: of the step.
        before: the planes to read of kinds that are not updated in place; on the CPU only.
        rounding: how moments are rounded; None: they are fp32.

    Returns:
        The batch to wait for; None if the update was enqueued on the GPU's current stream.
    """
    remainder = planes.get(Kind.REMAINDER)
    if grad.is_cuda:
        from megatier.optim import kernels  # Triton comes with torch's CUDA builds alone

        assert not before, "on the GPU AdamW is in place"
        of_kernel = (
            planes[Kind.WEIGHT],
            remainder,
            planes[_first_moment(planes)],
            planes.get(Kind.EXP_AVG_SQ),
            grad,
        )
        kernels.adamw(of_kernel, segments, scalars.of_kernels, rounding)
        return None

    # The last segment ends where the planes do, since segments have no gaps.
    _, count, _ = segments[-1]
    moments = torch.float32
    if rounding is not None:
        width, _, _ = rounding
        moments = _MOMENT_DTYPES[width]

    # A kind that is not updated in place has two planes: it is read from one and written to the other.
    is_split = remainder is not None
    weight = torch.bfloat16 if is_split else torch.float32
    sources = _addresses({**planes, **before}, count, moments)
    targets = (*_addresses(planes, count, moments), address_of(grad, weight, count))
    return pool.submit_adamw(targets, is_split, segments, scalars.of_kernels, before=sources, rounding=rounding)


def _first_moment(planes: Planes) -> Kind:
    """Return the kind that takes the place of the first moment: that of Lion is its momentum."""
    return Kind.EXP_AVG if Kind.EXP_AVG in planes else Kind.MOMENTUM


def _addresses(planes: Planes, count: int, moments: torch.dtype) -> tuple[int, int, int, int]:
    """Return the addresses that the C code takes of so many elements, 0 for a plane that there is not."""

    def address(kind: Kind, dtype: torch.dtype) -> int:
        return address_of(planes[kind], dtype, count) if kind in planes else 0

    # `address_of` checks dtype and length, which the C code cannot.
    weights = torch.bfloat16 if Kind.REMAINDER in planes else torch.float32
    return (
        address(Kind.WEIGHT, weights),
        address(Kind.REMAINDER, torch.int16),
        address(_first_moment(planes), moments),
        address(Kind.EXP_AVG_SQ, moments),
    )
