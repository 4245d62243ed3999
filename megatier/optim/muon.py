"""Computes Muon on planes of state, one matrix at a time, on the device where they lie.

    g = grad * scale              m = m + (1 - mu) (g - m)            u = g + mu (m - g)
    X = orthogonal(u / |u|)       x = x (1 - lr wd) - lr 0.2 sqrt(max(rows, columns)) X

x is the fp32 master, which may be split into weight plane and remainder. m is fp32. `scale` is the clip coefficient,
and `newton_schulz` makes the matrix orthogonal. The last factor makes changes as large as AdamW's, so both use the same
learning rate and decay. Each expert of a stack is a matrix of its own. Since experts are small, several are multiplied
at once (`BATCH_ELEMENTS`).

These are the operations of `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, in its order, except that the
iterations are more precise. CPU and GPU give different bits. On one device the bits depend only on the matrix: what is
multiplied is in newly allocated memory, never in planes, whose alignment differs from place to place. `RunOptimizer`
calls this.

Source: Jordan et al., https://kellerjordan.github.io/posts/muon/; Liu et al. (Moonshot AI), arXiv 2502.16982.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megatier.layout import Layout
from megatier.optim import newton_schulz
from megatier.optim.adamw import Scalars
from megatier.optim.masters import join_master, split_master
from megatier.optim.newton_schulz import EPS, SCALE, orthogonal
from megatier.planes import Elements, Planes
from megatier.tier import Kind

BATCH_ELEMENTS = 1 << 24
"""The most elements of experts that are multiplied at once, unless one expert has more."""
RMS = 0.2
"""The root mean square of AdamW's changes, over the learning rate."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix in the planes of a unit: a parameter, or several experts of a stack."""

    start: int
    """Its first element in the unit."""
    shape: tuple[int, ...]
    """Rows and columns, after the number of experts if there are several."""

    @property
    def num_elements(self) -> int:
        """The number of elements of all its experts."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.start + self.num_elements

    @property
    def flops(self) -> int:
        """The FLOPs of the matrix products of its update."""
        return newton_schulz.flops(self.shape)


class Muon:
    """The arithmetic of all units that are updated by matrix. Any thread may call it."""

    def __init__(self, layouts: Mapping[str, Layout]) -> None:
        """Find the matrices of the units, from their layouts by name."""
        self._matrices: dict[str, tuple[Matrix, ...]] = {}
        """The matrices of each unit."""
        self._stops: dict[str, int] = {}
        """The end of each unit's trained elements, padding included."""
        for unit, layout in layouts.items():
            if layout.schema.by_matrix:
                self._matrices[unit] = tuple(matrices_of(layout))
                self._stops[unit] = layout.num_trained

    def runs(self, unit: str) -> Sequence[Elements]:
        """Return the runs of a unit's elements that must be updated one at a time; none if any run will do."""
        if unit not in self._matrices:
            return []

        # Padding belongs to the matrix before it. A rank's shard may have no matrix, only padding.
        later = self._matrices[unit][1:]
        starts = [0, *(matrix.start for matrix in later)]
        bounds = [*starts, self._stops[unit]]
        return list(pairwise(bounds))

    def apply(self, unit: str, elements: Elements, planes: Planes, grad: Tensor, scalars: Scalars) -> None:
        """Update the matrices of a unit that lie in a run of its elements, in place; see `RunOptimizer.apply`."""
        # A run is one of `runs` or the whole unit, so it cuts no matrix.
        start, stop = elements
        for matrix in self._matrices[unit]:
            if start <= matrix.start < stop:
                update_matrix(matrix, planes, grad, scalars, start)


def matrices_of(layout: Layout) -> Iterator[Matrix]:
    """Yield the matrices of a unit's trained parameters: two dimensions, or three for a stack of experts."""
    for tensor in layout.trained.tensors:
        *stack, rows, columns = tensor.shape
        if not stack:
            yield Matrix(tensor.start, (rows, columns))
            continue

        # The batch size depends only on the stack, so batches, and with them bits, are the same on every tier.
        (num_experts,) = stack
        expert_elements = rows * columns
        batch = max(1, BATCH_ELEMENTS // expert_elements)
        for first in range(0, num_experts, batch):
            num_taken = min(batch, num_experts - first)
            yield Matrix(tensor.start + first * expert_elements, (num_taken, rows, columns))


@torch.no_grad()
def update_matrix(matrix: Matrix, planes: Planes, grad: Tensor, scalars: Scalars, first: int) -> None:
    """Update a matrix in place.

    Args:
        matrix: its place and shape.
        planes: uint8, the planes of each kind of state, all on one device.
        grad: uint8, the gradient of the same elements, in the dtype of the weights.
        scalars: the scalars of the step.
        first: the index in the unit of the planes' first element.
    """
    run = slice(matrix.start - first, matrix.stop - first)
    is_split = Kind.REMAINDER in planes
    dtype = torch.bfloat16 if is_split else torch.float32
    weight = planes[Kind.WEIGHT].view(dtype)[run]
    remainder = planes[Kind.REMAINDER].view(torch.int16)[run] if is_split else None
    momentum = planes[Kind.MOMENTUM].view(torch.float32)[run]
    if weight.is_cuda:
        # Triton is there only where CUDA is.
        from megatier.optim.muon_kernels import begin_step, end_step
    else:
        begin_step, end_step = _begin_step, _end_step

    *_, grad_scale = scalars.of_kernels
    x = begin_step(grad.view(dtype)[run], momentum, matrix.shape, grad_scale, scalars.momentum)
    x = orthogonal(x)

    longer = max(matrix.shape[-2:])
    rate = scalars.learning_rate * (RMS * math.sqrt(longer))
    end_step(x, weight, remainder, matrix.shape, scalars.decay, rate / SCALE)


def _begin_step(grad: Tensor, momentum: Tensor, shape: tuple[int, ...], grad_scale: float, decay: float) -> Tensor:
    """Update momentum in place, and return the input of `orthogonal`, on the CPU."""
    # A copy, since the gradient is read again if this update becomes void.
    change = grad.to(torch.float32, copy=True)
    change.mul_(grad_scale)

    # Nesterov's momentum, as in torch.optim.Muon.
    momentum.lerp_(change, 1 - decay)
    change.lerp_(momentum, decay)

    for one in change.view(-1, *shape[-2:]):
        one.mul_(SCALE / one.norm().clamp(min=EPS))
    return change.to(torch.float16).view(shape)


def _end_step(
    x: Tensor, weight: Tensor, remainder: Tensor | None, shape: tuple[int, ...], decay: float, rate: float
) -> None:
    """Apply the change to the master in place, on the CPU."""
    direction = x.view(math.prod(shape))
    if remainder is None:
        # The master decays before the change is added, as in torch.optim.Muon.
        weight.mul_(decay)
        weight.add_(direction, alpha=-rate)
        return

    master = torch.empty(weight.numel(), dtype=torch.float32, device=weight.device)
    join_master(weight, remainder, master)
    master.mul_(decay)
    master.add_(direction, alpha=-rate)
    split_master(master, weight, remainder)
