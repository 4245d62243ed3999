"""Orthogonalises matrices by the Newton-Schulz iteration, mostly on the small Gram matrix.

    X = u / |u|             five times: R = X X^T, P = a I + b R + c R R, X = P X

P and R commute, so several iterations need X only at their ends: Q = P1, then R = P1 R P1 and Q = Q P2, ..., X = Q X.
All but the last of these products are symmetric and only as large as the shorter side, and a GPU computes half of each.
In half precision R drifts away from X X^T, so it is recomputed after two iterations. Square matrices gain nothing by
this, so theirs is recomputed in each iteration. A single small matrix uses the plain iteration by the device's library,
since a GPU would multiply it faster than the host can launch kernels.

Matrices are held in fp16, times `SCALE`. Products are summed in fp32 and rounded once. bf16, which is usual elsewhere,
costs the same and has an eighth of the precision.

Source: Jordan et al., https://kellerjordan.github.io/posts/muon/; Zhang, Amsel, Chen, Dao, Gram Newton-Schulz,
https://dao-lab.ai/blog/2026/gram-newton-schulz/.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatier.optim.fp16_matmul import library_matmul, matmul, symmetric_matmul

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b and c of an iteration."""
NUM_ITERATIONS = 5
RESTARTED = (2, 3)
"""The number of iterations with each Gram matrix, if a matrix is not square."""
SMALL_SIDE = 1536
"""The longest shorter side of a small matrix."""
SCALE = 128.0
"""The factor on every matrix. With it, numbers above 4.8e-7 keep all their bits, and those up to 511 are finite. The
largest ones, up to 41, are in Q. A library may hold parts of R and X in fp16 times the square of this: up to 23,600."""
EPS = 1e-7
"""The smallest norm by which a matrix is divided."""


def orthogonal(x: Tensor) -> Tensor:
    """Return a matrix with nearly the same singular vectors, and singular values between 0.7 and 1.2.

    Its bits depend only on the matrix itself, and on whether it is in a stack, but not on other matrices there. Rows
    and columns of zeros stay zeros.

    Args:
        x: contiguous fp16 [rows, columns], or [experts, rows, columns], of norm 1 each, times `SCALE`. On a GPU rows
            and columns are multiples of `fp16_matmul.SIDE`.

    Returns:
        A matrix or stack of the same shape.
    """
    if _is_small(x.shape) or _is_alone_on_an_older_gpu(x):
        return _orthogonal_by_library(x)

    rows, columns = x.shape[-2:]
    is_tall = rows > columns
    for num_iterations in iterations(rows, columns):
        gram = symmetric_matmul(x, x, 1 / SCALE, columns=is_tall)
        factor = _product_of_polynomials(gram, num_iterations)

        # Freed before the product, which does not need it.
        del gram

        # A tall matrix is the transpose of X.
        left, right = (x, factor) if is_tall else (factor, x)
        x = matmul(left, right, 1 / SCALE)
    return x


def iterations(rows: int, columns: int) -> Sequence[int]:
    """Return the number of iterations with each Gram matrix of a matrix."""
    return (1,) * NUM_ITERATIONS if rows == columns else RESTARTED


def flops(shape: Sequence[int]) -> int:
    """Return the FLOPs of the products for a matrix or a stack. A symmetric product has half."""
    *stack, rows, columns = shape
    short, long = sorted((rows, columns))
    if _is_small(shape):
        # A library computes both halves: of X X^T, P X, and R R.
        return NUM_ITERATIONS * (4 * short * short * long + 2 * short**3)

    total = 0
    for num_iterations in iterations(rows, columns):
        # R and Q X, then P for each iteration. Each iteration but the first adds Q and both halves of P R P.
        num_symmetric = 4 * num_iterations - 3
        total += 3 * short * short * long + num_symmetric * short**3
    return math.prod(stack) * total


def _is_small(shape: Sequence[int]) -> bool:
    """Return whether a matrix is alone, and faster to multiply than to launch kernels for."""
    return len(shape) == 2 and min(shape) <= SMALL_SIDE


def _is_alone_on_an_older_gpu(x: Tensor) -> bool:
    """Return whether a single matrix is on a GPU before Hopper, which has no asynchronous loads of tiles."""
    return x.ndim == 2 and x.is_cuda and torch.cuda.get_device_capability(x.device) < (9, 0)


def _orthogonal_by_library(x: Tensor) -> Tensor:
    """Orthogonalise one matrix by the plain iteration."""
    a, b, c = COEFFICIENTS
    rows, columns = x.shape
    is_tall = rows > columns
    for _ in range(NUM_ITERATIONS):
        # The Gram matrix of the shorter side. The other one is larger and gives the same result.
        left, right = (x.mT, x) if is_tall else (x, x.mT)
        gram = library_matmul(left, right, 1 / SCALE)
        polynomial = library_matmul(gram, gram, c / SCALE, added=(b, gram))
        left, right = (x, polynomial) if is_tall else (polynomial, x)
        x = library_matmul(left, right, 1 / SCALE, added=(a, x))
    return x


def _product_of_polynomials(gram: Tensor, num_iterations: int) -> Tensor:
    """Return Q, the product of several iterations' polynomials in R. Both are fp16 [.., M, M], times `SCALE`.

    With a on the diagonal, numbers there would be rounded so coarsely that R would soon differ from X X^T. So P and Q
    leave a out, and each product that uses them adds it. Only the returned matrix includes it.
    """
    a, b, c = COEFFICIENTS
    scalar = 1.0
    """The multiple of the identity that is left out of Q."""
    total: Tensor | None = None
    for num_left in reversed(range(num_iterations)):
        is_last = num_left == 0
        diagonal = a * scalar * SCALE if is_last else 0.0
        if total is None:
            polynomial = symmetric_matmul(gram, gram, c / SCALE, added=[(b, gram)], diagonal=diagonal)
            total = polynomial
        else:
            polynomial = symmetric_matmul(gram, gram, c / SCALE, added=[(b, gram)])
            added = [(a, total), (scalar, polynomial)]
            total = symmetric_matmul(total, polynomial, 1 / SCALE, added=added, diagonal=diagonal)
        scalar *= a

        # The Gram matrix that the next iteration would see if X were multiplied first.
        if not is_last:
            half = symmetric_matmul(gram, polynomial, 1 / SCALE, added=[(a, gram)])
            gram = symmetric_matmul(half, polynomial, 1 / SCALE, added=[(a, half)])
    assert total is not None
    return total
