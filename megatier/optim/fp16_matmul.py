"""Multiplies fp16 matrices on their device. On a GPU, symmetric products take half the work.

Products are summed in fp32 and rounded once, after everything is added. The bits of each product depend only on its two
factors, not on what else is in the call. For this, the CPU multiplies one pair at a time, in newly allocated memory,
since libraries choose kernels by alignment. `newton_schulz` is the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

SIDE = 128
"""On a GPU, every side of a factor is a multiple of this, so that no tile is cut."""


def symmetric_matmul(
    left: Tensor,
    right: Tensor,
    scale: float,
    *,
    added: Sequence[tuple[float, Tensor]] = (),
    diagonal: float = 0.0,
    columns: bool = False,
) -> Tensor:
    """Compute scale * left @ right.T + diagonal * I plus `added`, which the caller knows to be symmetric.

    Args:
        left: contiguous fp16 [.., M, K], or [.., K, M] with `columns`.
        right: like `left`; it may be the same tensor.
        scale: see above.
        added: at most two (factor, matrix) pairs, each matrix contiguous fp16 [.., M, M] and symmetric.
        diagonal: the number that is added to the diagonal.
        columns: whether both factors are stored transposed.

    Returns:
        fp16 [.., M, M], symmetric in every bit.
    """
    if left.is_cuda:
        from megatier.optim import matmul_kernels

        return matmul_kernels.launch_symmetric_matmul(
            left, right, scale, added=added, diagonal=diagonal, columns=columns
        )

    def one(index: int) -> Tensor:
        first, second = (_as_fp32(tensor, index) for tensor in (left, right))
        total = first.mT @ second if columns else first @ second.mT
        total.mul_(scale)
        for factor, other in added:
            total.add_(_as_fp32(other, index), alpha=factor)
        total.diagonal().add_(diagonal)

        # A library may sum the two halves in different orders, so one is mirrored, as the GPU kernels do.
        return total.triu() + total.triu(1).mT

    return _one_by_one(one, left)


def matmul(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Compute scale * left @ right of contiguous fp16 [.., M, K] and [.., K, N]. The result is contiguous fp16 too."""
    # The library is fastest for a single product, but its batched kernels may sum in another order.
    if left.ndim == 2:
        return library_matmul(left, right, scale)
    if not left.is_cuda:
        return _one_by_one(lambda index: (_as_fp32(left, index) @ _as_fp32(right, index)).mul_(scale), left)

    from megatier.optim.matmul_kernels import launch_matmul

    return launch_matmul(left, right, scale)


def library_matmul(left: Tensor, right: Tensor, scale: float, *, added: tuple[float, Tensor] | None = None) -> Tensor:
    """Compute scale * left @ right by the device's library.

    Args:
        left: fp16 [M, K]; it may be a transposed view.
        right: fp16 [K, N]; it may be a transposed view.
        scale: see above.
        added: a factor and an fp16 [M, N] matrix to add.

    Returns:
        fp16 [M, N].
    """
    if not left.is_cuda:
        total = (left.float() @ right.float()).mul_(scale)
        if added is not None:
            total.add_(added[1].float(), alpha=added[0])
        return total.to(torch.float16)

    if added is not None:
        factor, other = added
        return torch.addmm(other, left, right, beta=factor, alpha=scale)

    # `matmul` has no scale, and scaling its result would round twice. With beta 0, `result` is not read.
    result = left.new_empty(left.shape[0], right.shape[1])
    return torch.addmm(result, left, right, beta=0, alpha=scale, out=result)


def _as_fp32(stack: Tensor, index: int) -> Tensor:
    """Return a copy of one matrix of a stack, or of the only matrix, in fp32."""
    return stack.view(-1, *stack.shape[-2:])[index].float()


def _one_by_one(one: Callable[[int], Tensor], like: Tensor) -> Tensor:
    """Compute the products one by one, round them to fp16, and stack them like the matrices of `like`."""
    *stack, rows, columns = like.shape
    num_products = like.numel() // (rows * columns) if stack else 1
    products = [one(index).to(torch.float16) for index in range(num_products)]
    return torch.stack(products) if stack else products[0]
