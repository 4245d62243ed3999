"""Attention over pieces of any lengths that lie one behind the other, such as the patches of images, as one operator.

Transformers' vision towers cut their queries by lengths that they read from a tensor, and the compiler refuses code
that does. So the whole loop over pieces is one operator (`varlen_attention`), which a compiled block calls. How many
pieces there are, and how long, changes no code.

On a CPU each piece takes the kernel of `scaled_dot_product_attention`, so it has the bits of the loop. On a GPU one
kernel of FlashAttention takes all pieces, as in `torch.nn.attention.varlen`, and the host reads no lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from megatier.readback import on_host

WIDEST_HEAD = 256
"""The widest head that FlashAttention takes."""
ALIGNED_HEAD = 8
"""What its heads' widths are multiples of."""
LEAST_CAPABILITY = (8, 0)
"""The oldest GPU that it runs on, as CUDA counts them."""
PLANNED_PIECE = 4096
"""The length of a piece by which the compiler weighs this operator: an image of 1,024 x 1,024 in patches of 16."""

_aten = torch.ops.aten


def has_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the operator takes these tensors. Else the loop over pieces has to run."""
    if query.shape[1] != key.shape[1] or query.shape[-1] != value.shape[-1]:
        return False
    if query.device.type == "cpu":
        return bool(_is_allowed())

    is_half = query.dtype in (torch.bfloat16, torch.float16)
    width = query.shape[-1]
    fits = width % ALIGNED_HEAD == 0 and width <= WIDEST_HEAD
    return query.is_cuda and is_half and fits and _is_allowed() and _is_on_gpu()


# Constants of compiled code, which is compiled anew when other kernels are allowed.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_allowed() -> bool:
    """Return whether FlashAttention may run; by this name torch means a CPU's kernel as well."""
    return bool(torch.backends.cuda.flash_sdp_enabled())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_on_gpu() -> bool:
    """Return whether this torch and this GPU have FlashAttention."""
    has_it = bool(torch.backends.cuda.is_flash_attention_available())
    return has_it and torch.cuda.get_device_capability() >= LEAST_CAPABILITY


@torch.library.custom_op("megatier::varlen_attention", mutates_args=())
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return what every token sees of its own piece, and the log-sum-exp.

    Args:
        query: [1, heads, tokens, width].
        key: the same.
        value: the same.
        ends: int32 [pieces + 1]: where pieces end, from 0 to the number of tokens, on the device of the others.
        longest: the length of the longest piece, a scalar on the CPU: no host waits for it, and no code depends on it.
        scale: the factor of products.

    Returns:
        [1, tokens, heads, width], and fp32 [heads, tokens].
    """
    if query.is_cuda:
        number = int(longest)
        tokens = [_by_token(tensor) for tensor in (query, key, value)]
        output, sums, *_ = _aten._flash_attention_forward(
            *tokens, ends, ends, number, number, 0.0, False, False, scale=scale
        )
        return output.unsqueeze(0), sums

    pieces = zip(*(_split(tensor, ends) for tensor in (query, key, value)), strict=True)
    of_pieces = [_aten._scaled_dot_product_flash_attention_for_cpu(*piece, scale=scale) for piece in pieces]
    output = torch.cat([output.transpose(1, 2) for output, _ in of_pieces], dim=1)
    return output, torch.cat([sums for _, sums in of_pieces], dim=2).squeeze(0)


@torch.library.custom_op("megatier::varlen_attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    ends: Tensor,
    longest: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, each [1, heads, tokens, width]."""
    if query.is_cuda:
        number = int(longest)
        tokens = [_by_token(tensor) for tensor in (query, key, value)]
        # What a kernel with dropout would draw numbers by.
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)
        unused = torch.empty(0, dtype=torch.float32, device=query.device)
        grads = _aten._flash_attention_backward(
            grad[0], *tokens, output[0], sums, ends, ends, number, number, 0.0, False, state, unused, scale=scale
        )
        by_token = [of_tensor.contiguous().unsqueeze(0) for of_tensor in grads]
    else:
        by_head = (grad.transpose(1, 2), query, key, value, output.transpose(1, 2), sums.unsqueeze(0))
        pieces = zip(*(_split(tensor, ends) for tensor in by_head), strict=True)
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        of_pieces = [backward(*piece, 0.0, False, scale=scale) for piece in pieces]
        of_tensors = zip(*of_pieces, strict=True)
        by_token = [torch.cat([piece_grad.transpose(1, 2) for piece_grad in grads], dim=1) for grads in of_tensors]

    of_query, of_key, of_value = (of_tensor.transpose(1, 2) for of_tensor in by_token)
    return of_query, of_key, of_value


def _by_token(tensor: Tensor) -> Tensor:
    """Return [1, heads, tokens, width] as [tokens, heads, width]."""
    return tensor.squeeze(0).transpose(0, 1)


def _split(tensor: Tensor, ends: Tensor) -> Sequence[Tensor]:
    """Return the pieces of [1, heads, tokens, ...]."""
    lengths: list[int] = on_host(ends.diff()).tolist()
    return torch.split(tensor, lengths, dim=2)


OPERATOR = torch.ops.megatier.varlen_attention.default
"""The operator as it stands in a compiled graph."""

# ---------------------------------------------------------------------- what torch wants to know of an operator


@varlen_attention.register_fake
def _shapes(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    _, heads, tokens, width = query.shape
    return query.new_empty((1, tokens, heads, width)), query.new_empty((heads, tokens), dtype=torch.float32)


@_attention_backward.register_fake
def _backward_shapes(grad: Tensor, query: Tensor, *_: object) -> tuple[Tensor, ...]:
    return tuple(query.new_empty(grad.shape).transpose(1, 2) for _ in range(3))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401 - torch's own
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - torch's own
    query, key, value, ends, longest, output, sums = ctx.saved_tensors
    grads = _attention_backward(grad, query, key, value, output, sums, ends, longest, ctx.scale)
    return *grads, None, None, None


varlen_attention.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.megatier.varlen_attention)
def _flops(query: Sequence[int], *args: object, **kwargs: object) -> int:
    """Count as if all pieces had the planned length: code is compiled once for pieces of any lengths."""
    piece, num_pieces = _planned_pieces(query)
    return int(sdpa_flop_count(piece, piece, piece) * num_pieces)


@register_flop_formula(torch.ops.megatier.varlen_attention_backward)
def _backward_flops(grad: Sequence[int], query: Sequence[int], *args: object, **kwargs: object) -> int:
    """Count as `_flops` does."""
    piece, num_pieces = _planned_pieces(query)
    return int(sdpa_backward_flop_count(piece, piece, piece, piece) * num_pieces)


def _planned_pieces(query: Sequence[int]) -> tuple[tuple[int, ...], float]:
    """Return the shape of a piece of the planned length, and how many of it there are."""
    batch, heads, tokens, width = query
    return (batch, heads, PLANNED_PIECE, width), tokens / PLANNED_PIECE
