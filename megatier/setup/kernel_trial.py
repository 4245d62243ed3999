"""Tries attention and FP8 products on the GPU before a run opens, because few GPUs were measured.

What a GPU can do is taken from papers and data sheets. A small trial takes a fraction of a second, and finds a wrong
guess before anything large is allocated. Flex attention has to be compiled, which takes seconds, so it is not tried on
GPUs where it was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from megatier.compute.fp8 import Fp8Linear
from megatier.errors import ConfigError
from megatier.setup.attention_rule import FLEX, HOPPER, SDPA
from megatier.setup.setup import Setup
from megatier.setup.workload import COMPUTE_DTYPES, head_width

TOKENS = 256
"""Tokens of a trial. Flex attention has blocks of 128."""
ATTENTION_ERROR = 0.05
"""The largest error of attention against fp32, as a share of its norm. In bf16 on a CPU the error is 0.003."""
FP8_ERROR = 0.2
"""The largest error of products in FP8, as a share of the norm. On a CPU the error is 0.04."""

Trial = Callable[[Sequence[nn.Parameter]], Tensor]
"""A function of trained parameters."""


def try_kernels(setup: Setup) -> None:
    """Try the kernels that a run needs on its GPU. On a CPU there is nothing to try.

    Raises:
        ConfigError: a kernel fails or gives wrong numbers. The message names the setting that avoids it.
    """
    machine, model = setup.machine, setup.config.model
    if machine.device.type != "cuda":
        return

    text = setup.model.config.get_text_config()
    is_guess = model.attention == SDPA or (model.attention == FLEX and machine.capability != HOPPER)

    # Models without attention heads, such as Mamba, have nothing to try.
    if is_guess and getattr(text, "num_attention_heads", None):
        try_attention(machine.device, model.attention, head_width(text), COMPUTE_DTYPES[model.compute_dtype])
    if setup.work.products.fp8:
        try_fp8(machine.device)


def try_attention(device: torch.device, kernel: str, head_size: int, dtype: torch.dtype) -> None:
    """Try causal attention, forward and backward.

    Args:
        device: the GPU.
        kernel: "sdpa" or "flex_attention", which is compiled.
        head_size: elements of a head.
        dtype: the compute dtype.

    Raises:
        ConfigError: the kernel fails or gives wrong numbers.
    """

    def with_sdpa(inputs: Sequence[nn.Parameter]) -> Tensor:
        query, key, value = inputs
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    def with_flex(inputs: Sequence[nn.Parameter]) -> Tensor:
        query, key, value = inputs
        mask = create_block_mask(_is_causal, None, None, TOKENS, TOKENS, device=str(device))
        result: Tensor = torch.compile(flex_attention)(query, key, value, block_mask=mask)
        return result

    # Eager attention consists of plain products, which every GPU has.
    other = SDPA if kernel == FLEX else "eager"
    kernel_text = f"Attention by {kernel} with heads of {head_size} elements in {str(dtype).removeprefix('torch.')}"
    inputs = [_numbers((1, 2, TOKENS, head_size), dtype, seed) for seed in range(3)]
    remedy = f"Set model.attention to {other}, or update torch and the driver."
    _compare(
        with_flex if kernel == FLEX else with_sdpa, with_sdpa, inputs, device, ATTENTION_ERROR, kernel_text, remedy
    )


def try_fp8(device: torch.device) -> None:
    """Try a linear layer in FP8, forward and backward.

    Raises:
        ConfigError: the kernel fails or gives wrong numbers.
    """

    def in_fp8(inputs: Sequence[nn.Parameter]) -> Tensor:
        rows, weight = inputs
        layer = Fp8Linear(weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype)

        # The weight is the leaf whose gradient is compared. The layer is on `meta`, so it has drawn no numbers.
        layer.weight = weight
        result: Tensor = layer(rows)
        return result

    def in_fp32(inputs: Sequence[nn.Parameter]) -> Tensor:
        return functional.linear(*inputs)

    inputs = [_numbers((TOKENS, 128), torch.bfloat16, 0), _numbers((64, 128), torch.bfloat16, 1)]
    remedy = "Set numerics.products to bf16, or update torch and the driver."
    _compare(in_fp8, in_fp32, inputs, device, FP8_ERROR, "A product in FP8", remedy)


def _is_causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def _numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Draw numbers on the CPU with a separate generator, so that the random state of the run stays."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)


def _compare(
    tried: Trial,
    known: Trial,
    inputs: Sequence[Tensor],
    device: torch.device,
    error_max: float,
    kernel_text: str,
    remedy: str,
) -> None:
    """Compare result and gradients on a device with those in fp32 on the CPU."""
    # Both get the same rounded numbers, so that only the error of the kernel counts.
    expected = _with_gradients(known, [tensor.float() for tensor in inputs])
    try:
        computed = [tensor.float().cpu() for tensor in _with_gradients(tried, [each.to(device) for each in inputs])]
    # This is a RuntimeError too, but says nothing about the kernel.
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # Further lines from CUDA are advice on debugging kernels.
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{kernel_text} was tried and failed on this GPU: {reason}. {remedy}") from error

    for tensor, right in zip(computed, expected, strict=True):
        difference = float((tensor - right).norm() / right.norm())

        # NaN compares false, so it is refused too.
        if not difference <= error_max:
            raise ConfigError(
                f"{kernel_text} was tried and gives wrong numbers on this GPU: they differ from those in fp32 by "
                f"{difference:.0%}. {remedy}"
            )


def _with_gradients(function: Trial, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the result of a function, and its gradients with respect to its inputs."""
    leaves = [nn.Parameter(tensor) for tensor in inputs]
    # The caller may have turned gradients off.
    with torch.enable_grad():
        result = function(leaves)
        result.backward(torch.ones_like(result) / result.numel())
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
