"""Computes AdamW on planes of state: the scalars of a step, and the kernel for the planes' device.

`optimizer` has the formula. Any code that has planes and a gradient may call this: a run's optimizer, `TieredAdamW`,
and the probes that measure it. Any thread may call it.
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
"""The most requests that may wait for each thread. It is enough that no thread runs dry, and so few that a chunk from
NVMe does not wait for a whole unit."""

_MOMENT_DTYPES = {2: torch.bfloat16, 1: torch.uint8}
"""The dtype of rounded moments, by their width in bytes."""
StepScalars = tuple[float, float, float, float, float, float, float]
"""The scalars of a step for the kernels: `Scalars.of_kernels` without the clip coefficient."""
Rounding = tuple[int, int, int]
"""How moments are rounded: their width in bytes, the key (`seeds.rounding_key`), and the index in the unit of the
planes' first element."""


@dataclass(frozen=True, slots=True)
class Scalars:
    """The scalars of one step that an update needs besides the planes."""

    decay: float
    """The factor on the weights of decayed parameters: 1 - learning rate * weight decay."""
    step: int
    """The number of the step, which seeds the rounding of moments."""
    learning_rate: float
    """The learning rate, which Muon uses directly. AdamW's is part of the step size."""
    momentum: float
    """The decay of Muon's momentum."""
    of_kernels: tuple[float, float, float, float, float, float, float, float]
    """beta1, 1 - beta1, beta2, 1 - beta2, eps, step size, root of the bias correction, clip coefficient."""


def step_scalars(step: int, learning_rate: float, betas: tuple[float, float], eps: float) -> StepScalars:
    """Return the scalars of step 1, 2, ... for the kernels."""
    # All of this is in fp64, and the kernels round each scalar once to fp32. In fp32, 1 - 0.999 would have only 15 good
    # bits. The bias corrections are included, so that no element has to divide by them.
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
    """Return Lion's scalars in the order of AdamW's. Lion has no bias correction."""
    beta1, beta2 = betas
    # In AdamW's order, since one kernel runs both. Lion has no second moment, so its eps is 0.
    return (beta1, 1 - beta1, beta2, 1 - beta2, 0.0, learning_rate, 1.0)


def adamw_threads(num_threads: int) -> _native.ThreadPool:
    """Start the threads of `begin_adamw`, which blocks while they have enough work."""
    return _native.ThreadPool(num_threads, QUEUED_A_THREAD * num_threads)


def rounding_of(schema: StateSchema, seed: int, step: int, unit: str, first: int) -> Rounding | None:
    """Return how moments are rounded; None: they are fp32.

    Args:
        schema: the schema of the planes.
        seed: of the run.
        step: 1, 2, ...
        unit: the unit's name, or another key that is unique within a step.
        first: the index in the whole unit of the planes' first element.
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
    """Begin AdamW on flat planes on one device, or Lion if they have a momentum.

    Args:
        pool: the threads on the CPU.
        planes: the planes of each kind of state. With a remainder, weight and gradient are bf16, else fp32.
        grad: the gradient of the same elements.
        segments: (start, stop, decay) in elements.
        scalars: the scalars of the step.
        before: the planes to read for kinds that are not updated in place; on the CPU only.
        rounding: how moments are rounded; None: they are fp32.

    Returns:
        The work to wait for; None if the update was enqueued on the GPU's current stream.
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

    # Segments have no gaps, so the last one ends where the planes end.
    _, count, _ = segments[-1]
    moments = torch.float32
    if rounding is not None:
        width, _, _ = rounding
        moments = _MOMENT_DTYPES[width]

    # A kind that is not updated in place has two planes: one to read and one to write.
    is_split = remainder is not None
    weight = torch.bfloat16 if is_split else torch.float32
    sources = _addresses({**planes, **before}, count, moments)
    targets = (*_addresses(planes, count, moments), address_of(grad, weight, count))
    return pool.submit_adamw(targets, is_split, segments, scalars.of_kernels, before=sources, rounding=rounding)


def _first_moment(planes: Planes) -> Kind:
    """Return the kind of the first moment. For Lion that is the momentum."""
    return Kind.EXP_AVG if Kind.EXP_AVG in planes else Kind.MOMENTUM


def _addresses(planes: Planes, count: int, moments: torch.dtype) -> tuple[int, int, int, int]:
    """Return the addresses of the planes for the C code, 0 for a missing plane."""

    def address(kind: Kind, dtype: torch.dtype) -> int:
        return address_of(planes[kind], dtype, count) if kind in planes else 0

    # `address_of` checks dtype and length, which the C code cannot do.
    weights = torch.bfloat16 if Kind.REMAINDER in planes else torch.float32
    return (
        address(Kind.WEIGHT, weights),
        address(Kind.REMAINDER, torch.int16),
        address(_first_moment(planes), moments),
        address(Kind.EXP_AVG_SQ, moments),
    )
