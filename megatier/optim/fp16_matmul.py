"""Multiplies matrices of fp16 on the device where they lie, symmetric products at half the cost on a GPU.

Products are summed in fp32 and rounded once, after all that is added. The bits of each depend on its own two factors,
and not on what else shares a call: a CPU multiplies one pair after the other, in memory of their own, whose alignment
libraries choose their kernels by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

SIDE = 128
"""Every side of a factor on a GPU is a multiple of this, so that no tile has to look for its end."""


def symmetric_matmul(
    left: Tensor,
    right: Tensor,
    scale: float,
    *,
    added: Sequence[tuple[float, Tensor]] = (),
    diagonal: float = 0.0,
    columns: bool = False,
) -> Tensor:
    """Compute scale * left @ right.T + diagonal * I, and what is added, which is known to be symmetric.

    Args:
        left: contiguous fp16 [.., M, K], or [.., K, M] with `columns`.
        right: the same; it may be the same tensor.
        scale: see above.
        added: at most two matrices, contiguous fp16 [.., M, M] and symmetric, each behind its factor.
        diagonal: what is added to the diagonal.
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

        # A library may sum the two halves in different orders. So one is mirrored, as kernels on a GPU do it.
        return total.triu() + total.triu(1).mT

    return _one_by_one(one, left)


def matmul(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Compute scale * left @ right; both are contiguous fp16 [.., M, K] and [.., K, N], and so is what is returned."""
    # The library's kernels for one product are its fastest, but those for several may add up in another order.
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
        right: fp16 [K, N]; the same.
        scale: see above.
        added: what is added, a factor and fp16 [M, N].

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

    # Matmul has no scale, and scaling its result would round twice. With beta 0 nothing of `result` is read.
    result = left.new_empty(left.shape[0], right.shape[1])
    return torch.addmm(result, left, right, beta=0, alpha=scale, out=result)


def _as_fp32(stack: Tensor, index: int) -> Tensor:
    """Return one matrix of a stack, or the only one, in memory of its own."""
    return stack.view(-1, *stack.shape[-2:])[index].float()


def _one_by_one(one: Callable[[int], Tensor], like: Tensor) -> Tensor:
    """Return products, given by number, rounded to fp16; as many as `like` has, and in its dimensions."""
    *stack, rows, columns = like.shape
    num_products = like.numel() // (rows * columns) if stack else 1
    products = [one(index).to(torch.float16) for index in range(num_products)]
    return torch.stack(products) if stack else products[0]
