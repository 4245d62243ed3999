"""Makes matrices orthogonal by Newton and Schulz's iteration, mostly on the small Gram matrix.

    X = u / |u|             five times: R = X X^T, P = a I + b R + c R R, X = P X

P and R commute, so several iterations need X only at their ends: Q = P1, then R = P1 R P1 and Q = Q P2, ..., X = Q X.
All but the last of these products are symmetric and of the shorter side alone, and a GPU computes half of each. In half
precision R drifts away from X X^T, so it is computed anew after three iterations. Square matrices gain nothing by this,
and have it computed anew in each.

Each matrix is held in fp16, times `SCALE`; each product is summed in fp32, and rounded once. bf16, which is usual, has
the same cost and an eighth of the precision.

Source: Jordan et al., https://kellerjordan.github.io/posts/muon/; Zhang, Amsel, Chen, Dao, Gram Newton-Schulz,
https://dao-lab.ai/blog/2026/gram-newton-schulz/.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatier.optim.fp16_products import SIDE, product, symmetric_product

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b and c of an iteration."""
NUM_ITERATIONS = 5
RESTARTED = (3, 2)
"""Iterations until the Gram matrix is computed anew, of matrices that are not square."""
SCALE = 256.0
"""The factor of every matrix. Numbers up to 255 are finite then, and those above 2.4e-7 keep all their bits. The
largest are Q's, up to 41."""
EPS = 1e-7
"""Least norm by which a matrix is divided."""


def orthogonal(matrix: Tensor) -> Tensor:
    """Return a matrix with nearly the same singular vectors, and singular values between 0.7 and 1.2.

    Its bits depend on the matrix alone, also if it is one of a stack.

    Args:
        matrix: fp32 [rows, columns], or [experts, rows, columns].

    Returns:
        fp16 of the same shape, times `SCALE`; it may be a view.
    """
    rows, columns = matrix.shape[-2:]
    norm = matrix.norm(dim=(-2, -1), keepdim=True)
    x = _padded(matrix * (SCALE / norm.clamp(min=EPS)))

    is_tall = rows > columns
    for num_iterations in iterations(rows, columns):
        gram = symmetric_product(x, x, 1 / SCALE, columns=is_tall)
        factor = _polynomial_of_several(gram, num_iterations)
        del gram

        # A tall matrix is the transpose of X.
        left, right = (x, factor) if is_tall else (factor, x)
        x = product(left, right, 1 / SCALE)
    return x[..., :rows, :columns]


def iterations(rows: int, columns: int) -> Sequence[int]:
    """Return how many iterations a matrix goes through with each of its Gram matrices."""
    return (1,) * NUM_ITERATIONS if rows == columns else RESTARTED


def flops(rows: int, columns: int) -> int:
    """Return the floating-point operations of the products for one matrix, half of them for a symmetric one."""
    short, long = sorted((rows, columns))
    total = 0
    for num_iterations in iterations(rows, columns):
        # R and Q X; then P for each iteration, and for each but the first Q and both halves of P R P.
        num_symmetric = 4 * num_iterations - 3
        total += 3 * short * short * long + num_symmetric * short**3
    return total


def _polynomial_of_several(gram: Tensor, num_iterations: int) -> Tensor:
    """Return Q, by which several iterations multiply, from R; both are fp16 [.., M, M], times `SCALE`."""
    a, b, c = COEFFICIENTS
    product_of_all: Tensor | None = None
    for last in reversed(range(num_iterations)):
        polynomial = symmetric_product(gram, gram, c / SCALE, added=gram, factor=b, diagonal=a * SCALE)
        if product_of_all is None:
            product_of_all = polynomial
        else:
            product_of_all = symmetric_product(product_of_all, polynomial, 1 / SCALE)

        # What the next iteration would find if it multiplied X with itself.
        if last:
            half = symmetric_product(gram, polynomial, 1 / SCALE)
            gram = symmetric_product(half, polynomial, 1 / SCALE)
    assert product_of_all is not None
    return product_of_all


def _padded(matrix: Tensor) -> Tensor:
    """Round to fp16. On a GPU the sides are padded with zeros for its kernels, which leave them zeros."""
    *stack, rows, columns = matrix.shape
    sides = [rows, columns]
    if matrix.is_cuda:
        sides = [-(-side // SIDE) * SIDE for side in sides]
    if sides == [rows, columns]:
        return matrix.to(torch.float16)

    padded = torch.zeros(*stack, *sides, dtype=torch.float16, device=matrix.device)
    padded[..., :rows, :columns] = matrix
    return padded
