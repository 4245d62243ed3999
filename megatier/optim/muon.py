"""Computes Muon on planes of state, one matrix at a time, on whichever device they lie.

    g = grad * scale              m = m + (1 - mu) (g - m)            u = g + mu (m - g)
    X = bf16(u) / |u|             five times: A = X X^T, X = a X + (b A + c A A) X
    x = x (1 - lr wd) - lr 0.2 sqrt(max(rows, columns)) X

x is the fp32 master, which may be split into weight plane and remainder. m is fp32. `scale` is the clip coefficient.
X is multiplied in bf16, and transposed meanwhile if it has more rows than columns. The last factor gives changes the
size of AdamW's, so both have the same learning rate and decay. Experts of a stack are matrices of their own, and are
multiplied several at once, as many as `BATCH_ELEMENTS` says, since each of them is small.

These are the operations of `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, in its order. Products of matrices
are those of the device's libraries, so a CPU and a GPU give other bits. On one device they depend on nothing but the
matrix: what is multiplied lies in memory of its own, never in planes, whose alignment differs from place to place.

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
from megatier.optim.adamw import Scalars
from megatier.optim.masters import join_master, split_master
from megatier.planes import Elements, Planes
from megatier.tier import Kind

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b and c of an iteration."""
NUM_ITERATIONS = 5
BATCH_ELEMENTS = 1 << 24
"""Elements of the experts that are multiplied at once, unless one has more. This may change bits."""
EPS = 1e-7
"""Least norm by which a matrix is divided."""
RMS = 0.2
"""Root of the mean square of AdamW's changes, over the learning rate."""
FLOPS_OF_ITERATION = (4, 2)
"""Floating-point operations of an iteration, over (shorter side squared * longer side) and over the former's cube."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix in the planes of a unit, which is a parameter, or those of several experts of a stack."""

    start: int
    """Its first element in the unit."""
    shape: tuple[int, ...]
    """Rows and columns, after the number of experts if there are several."""

    @property
    def num_elements(self) -> int:
        """Elements of all its experts."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.start + self.num_elements

    @property
    def flops(self) -> int:
        """Floating-point operations of the products of its update."""
        *stack, rows, columns = self.shape
        short = min(rows, columns)
        long = max(rows, columns)
        outer, inner = FLOPS_OF_ITERATION
        of_iteration = outer * short * short * long + inner * short**3

        # A stack of experts has a product for each.
        num_experts = math.prod(stack)
        return num_experts * NUM_ITERATIONS * of_iteration


class Muon:
    """The arithmetic of all units of a run that are updated by matrix. Any thread may call it."""

    def __init__(self, layouts: Mapping[str, Layout]) -> None:
        """Find the matrices of units, whose layouts are given by name."""
        self._matrices: dict[str, tuple[Matrix, ...]] = {}
        """The matrices of each unit."""
        self._stops: dict[str, int] = {}
        """One past the last element of each, padding included."""
        for unit, layout in layouts.items():
            if layout.schema.by_matrix:
                self._matrices[unit] = tuple(matrices_of(layout))
                self._stops[unit] = layout.num_trained

    def runs(self, unit: str) -> Sequence[Elements]:
        """Return the runs of a unit's elements that are updated one at a time; none if any run will do."""
        if unit not in self._matrices:
            return []

        # Padding belongs to the matrix before it. A rank's shard may have no matrix, and be padding alone.
        later = self._matrices[unit][1:]
        starts = [0, *(matrix.start for matrix in later)]
        bounds = [*starts, self._stops[unit]]
        return list(pairwise(bounds))

    def apply(self, unit: str, elements: Elements, planes: Planes, grad: Tensor, scalars: Scalars) -> None:
        """Update those matrices of a unit that lie in a run of its elements, in place; see `RunOptimizer.apply`."""
        # A run is what `runs` has, or the whole unit, so no matrix lies across its ends.
        start, stop = elements
        for matrix in self._matrices[unit]:
            if start <= matrix.start < stop:
                update_matrix(matrix, planes, grad, scalars, start)


def matrices_of(layout: Layout) -> Iterator[Matrix]:
    """Yield the matrices of a unit's trained parameters, which have two dimensions, or three if of experts."""
    for tensor in layout.trained.tensors:
        *stack, rows, columns = tensor.shape
        if not stack:
            yield Matrix(tensor.start, (rows, columns))
            continue

        # By the stack alone, so that batches, and with them bits, are the same on every tier.
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
        scalars: of the step.
        first: the number in the unit of the planes' first element.
    """
    run = slice(matrix.start - first, matrix.stop - first)
    is_split = Kind.REMAINDER in planes
    dtype = torch.bfloat16 if is_split else torch.float32
    weight = planes[Kind.WEIGHT].view(dtype)[run]
    momentum = planes[Kind.MOMENTUM].view(torch.float32)[run]

    # A copy, since the gradient is read again if this update turns out to be void.
    *_, grad_scale = scalars.of_kernels
    change = grad.view(dtype)[run].to(torch.float32, copy=True)
    change.mul_(grad_scale)

    # Nesterov's momentum, as in torch.optim.Muon.
    momentum.lerp_(change, 1 - scalars.momentum)
    change.lerp_(momentum, scalars.momentum)

    # Each of these is as large as the matrix, in memory that no budget counts. So it is freed as soon as it was used.
    direction = orthogonal(change.view(matrix.shape)).reshape(-1)
    del change

    longer = max(matrix.shape[-2:])
    rate = scalars.learning_rate * (RMS * math.sqrt(longer))
    if not is_split:
        # The master decays before the change is added, as in torch.optim.Muon.
        weight.mul_(scalars.decay)
        weight.add_(direction, alpha=-rate)
        return

    remainder = planes[Kind.REMAINDER].view(torch.int16)[run]
    master = torch.empty(weight.numel(), dtype=torch.float32, device=weight.device)
    join_master(weight, remainder, master)
    master.mul_(scalars.decay)
    master.add_(direction, alpha=-rate)
    del direction
    split_master(master, weight, remainder)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return a matrix with nearly the same singular vectors, and singular values between 0.7 and 1.2.

    Args:
        matrix: fp32 [rows, columns], or [experts, rows, columns].

    Returns:
        bf16 of the same shape; it may be a transposed view.
    """
    a, b, c = COEFFICIENTS
    # A copy in memory of its own, whose alignment is the same on every tier: libraries choose their kernels by it.
    x = matrix.bfloat16()

    # Transposed, so that the products below are of the shorter side.
    rows, columns = matrix.shape[-2:]
    is_tall = rows > columns
    if is_tall:
        x = x.mT

    # A matrix alone takes the functions of torch's Muon, whose bits those for batches need not have.
    is_stack = x.ndim > 2
    norm = x.norm(dim=(-2, -1), keepdim=True) if is_stack else x.norm()
    x.div_(norm.clamp(min=EPS))

    # Newton and Schulz's iteration.
    add = torch.baddbmm if is_stack else torch.addmm
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        polynomial = add(gram, gram, gram, beta=b, alpha=c)
        x = add(x, polynomial, x, beta=a)
    return x.mT if is_tall else x
