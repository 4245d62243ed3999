"""What attention gave, in the place of attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatier.compute.attention_kernels import KERNELS, KeptAttention, is_attention, without_cudnn
from megatier.engine.activation import dropping

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Counted(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the kernels of attention that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in KERNELS
        return func(*args, **(kwargs or {}))


def twice(x: Tensor, dropout: float = 0.0) -> Tensor:
    """Attention after attention."""
    for _ in range(2):
        q = torch.tanh(x).view(2, 16, 4, 8).transpose(1, 2)
        found = F.scaled_dot_product_attention(q, q, q, is_causal=True, dropout_p=dropout)
        x = found.transpose(1, 2).reshape(2, 16, 32)
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_attention_is_not_computed_twice_and_gives_the_same_bits(dtype: torch.dtype) -> None:
    x = torch.randn(2, 16, 32).to(dtype).requires_grad_()
    expected = twice(x)
    [slope] = torch.autograd.grad(expected.sum(), [x])
    kept = KeptAttention()
    with dropping("probe"), kept.noting():
        first = twice(x)
    with Counted() as counted, kept.replaying():
        again = twice(x)
    assert counted.count == 0
    assert torch.equal(first, expected)
    assert torch.equal(again, expected)
    assert torch.equal(torch.autograd.grad(again.sum(), [x])[0], slope)


def test_kept_attention_holds_no_graph() -> None:
    x = torch.randn(2, 16, 32, requires_grad=True)
    kept = KeptAttention()
    with dropping("probe"), kept.noting():
        twice(x)
    assert [tensor.requires_grad for results in kept._results for tensor in results] == [False] * 4


def test_kept_attention_with_dropout_runs_again_with_the_numbers_after_it() -> None:
    x = torch.randn(2, 16, 32, requires_grad=True)
    kept = KeptAttention()
    torch.manual_seed(3)
    with dropping("probe"), kept.noting():
        first = twice(x, 0.5) + torch.rand(2, 16, 32)
    torch.manual_seed(3)
    with kept.replaying():
        assert torch.equal(twice(x, 0.5) + torch.rand(2, 16, 32), first)


def test_kernels_of_attention_are_known() -> None:
    assert is_attention(FLASH)
    assert is_attention(torch.ops.higher_order.flex_attention)
    assert not is_attention(torch.ops.aten.mm.default)


@pytest.fixture
def _kernels() -> Iterator[None]:
    cuda = torch.backends.cuda
    before = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()
    yield
    for enable, value in zip(
        (cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_cudnn_sdp), before, strict=True
    ):
        enable(value)


@pytest.mark.usefixtures("_kernels")
def test_attention_without_cudnn_leaves_the_setting_as_it_was() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    with pytest.raises(KeyError), without_cudnn(), without_cudnn():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        raise KeyError
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.usefixtures("_kernels")
def test_attention_of_which_cudnn_is_the_only_fused_kernel_keeps_it() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.backends.cuda.enable_flash_sdp(False)
    with without_cudnn():
        assert torch.backends.cuda.cudnn_sdp_enabled()
