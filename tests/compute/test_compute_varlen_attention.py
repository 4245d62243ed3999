"""Attention over pieces of any lengths: the bits of a loop over them, and one code for all lengths."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from megatier.compute.varlen_attention import PLANNED_PIECE, has_kernel, varlen_attention

HEADS, WIDTH, SCALE = 2, 16, 0.3
LENGTHS = [(5,), (7, 7, 7), (1, 20, 3), (64, 4)]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def given(lengths: Sequence[int], device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key and value as a tower has them: heads and tokens are the wrong way round in memory."""
    generator = torch.Generator().manual_seed(sum(lengths))
    made = torch.randn(3, sum(lengths), HEADS, WIDTH, generator=generator).to(device, dtype)
    return [part.transpose(0, 1).unsqueeze(0).detach().requires_grad_() for part in made]


def places(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return ends, torch.tensor(max(lengths))


def looped(lengths: Sequence[int], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    pieces = zip(*(tensor.split(list(lengths), dim=2) for tensor in (query, key, value)), strict=True)
    found = [scaled_dot_product_attention(q, k, v, scale=SCALE).transpose(1, 2) for q, k, v in pieces]
    return torch.cat(found, dim=1)


def differentiate(result: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    weight = torch.linspace(-1, 1, result.numel(), device=result.device, dtype=result.dtype).view(result.shape)
    return list(torch.autograd.grad(result, inputs, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_attention_over_pieces_has_the_bits_of_a_loop_over_them(lengths: Sequence[int], dtype: torch.dtype) -> None:
    inputs = given(lengths, dtype=dtype)
    result, sums = varlen_attention(*inputs, *places(lengths), SCALE)
    expected = looped(lengths, *inputs)
    assert torch.equal(result, expected)
    assert sums.shape == (HEADS, sum(lengths))

    found = differentiate(result, inputs)
    for grad, wanted in zip(found, differentiate(expected, inputs), strict=True):
        assert torch.equal(grad, wanted)


# From torch 2.14 on opcheck itself copies its inputs, and then reads their gradients.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_operator_is_what_it_tells_torch() -> None:
    ends, longest = places((7, 2, 7))
    opcheck(varlen_attention, (*given((7, 2, 7)), ends, longest, SCALE))


def test_operator_is_weighed_as_if_pieces_had_the_planned_length() -> None:
    lengths = (PLANNED_PIECE // 4, PLANNED_PIECE // 4)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        inputs = [torch.empty(1, HEADS, sum(lengths), WIDTH, requires_grad=True) for _ in range(3)]
        result, _ = varlen_attention(*inputs, torch.empty(3, dtype=torch.int32), torch.empty(()), SCALE)
        forward = counter.get_total_flops()
        result.sum().backward()
    assert forward == 2 * 2 * HEADS * WIDTH * sum(lengths) * PLANNED_PIECE
    assert counter.get_total_flops() == 3.5 * forward


def test_tensors_without_a_kernel_are_told() -> None:
    query, key, value = given((8,))
    assert has_kernel(query, key, value)
    assert not has_kernel(query, key[:, :1], value[:, :1])
    assert not has_kernel(query, key, value[..., :8])
    assert not has_kernel(*(tensor.to("meta") for tensor in (query, key, value)))
    allowed = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        assert not has_kernel(query, key, value)
    finally:
        torch.backends.cuda.enable_flash_sdp(allowed)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("lengths", LENGTHS)
def test_attention_over_pieces_on_a_gpu_is_nearly_that_of_a_loop(lengths: Sequence[int]) -> None:
    inputs = given(lengths, "cuda", torch.bfloat16)
    assert has_kernel(*inputs)
    ends, longest = places(lengths)
    result, _ = varlen_attention(*inputs, ends.cuda(), longest, SCALE)
    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    expected = looped(lengths, *exact)
    torch.testing.assert_close(result.float(), expected, rtol=0.02, atol=0.02)

    found = differentiate(result, inputs)
    again = differentiate(result_again := varlen_attention(*inputs, ends.cuda(), longest, SCALE)[0], inputs)
    assert torch.equal(result, result_again)
    for grad, repeated, wanted in zip(found, again, differentiate(expected, exact), strict=True):
        assert torch.equal(grad, repeated)
        torch.testing.assert_close(grad.float(), wanted, rtol=0.05, atol=0.05)
