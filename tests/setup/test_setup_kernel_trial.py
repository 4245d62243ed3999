"""Kernels that are tried on a device before a run opens, and what a wrong guess is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_setups import elsewhere
from torch import Tensor
from torch.nn import functional

from megatier.config.data_section import DataConfig
from megatier.config.schema import ModelConfig, NumericsConfig, RunConfig, TiersConfig
from megatier.errors import ConfigError
from megatier.setup import kernel_trial
from megatier.setup.kernel_trial import try_attention, try_fp8, try_kernels
from megatier.setup.setup import Setup

CPU = torch.device("cpu")


def setup_of(attention: Any, capability: tuple[int, int] | None, products: Any, device: str) -> Setup:
    shape = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = RunConfig(
        model=ModelConfig(config=shape | {"num_attention_heads": 2, "vocab_size": 320}, attention=attention),
        data=DataConfig(files=("x",), tokenizer="bytes", sequence_length=8),
        tiers=TiersConfig(),
        numerics=NumericsConfig(products=products),
    )
    made = elsewhere(config)
    machine = replace(made.machine, device=torch.device(device), capability=capability)
    return replace(made, machine=machine)


@pytest.mark.parametrize("head_size", [16, 80])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_that_is_right_is_taken_and_draws_none_of_the_runs_numbers(
    head_size: int, dtype: torch.dtype
) -> None:
    before = torch.random.get_rng_state()
    try_attention(CPU, "sdpa", head_size, dtype)
    try_fp8(CPU)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_attention_that_fails_is_refused_with_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel image is available\nand more lines")

    # The CPU's own attention, to which it is compared, comes first.
    right = functional.scaled_dot_product_attention
    calls: Iterator[Callable[..., Any]] = iter([right, fail])
    monkeypatch.setattr(functional, "scaled_dot_product_attention", lambda *a, **k: next(calls)(*a, **k))
    with pytest.raises(ConfigError, match=r"sdpa .* failed on this GPU: no kernel image is available\. Set model.att"):
        try_attention(CPU, "sdpa", 64, torch.bfloat16)


@pytest.mark.parametrize("factor", [1.5, float("nan")])
def test_product_in_fp8_that_is_wrong_is_refused_with_the_setting(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = torch._scaled_mm

    def wrong(*args: Any, **names: Any) -> Tensor:
        return right(*args, **names) * factor

    monkeypatch.setattr(torch, "_scaled_mm", wrong)
    with pytest.raises(ConfigError, match=r"FP8 .* gives wrong numbers on this GPU: .* Set numerics.products to bf16"):
        try_fp8(CPU)


@pytest.mark.parametrize(
    ("attention", "capability", "products", "device", "expected"),
    [
        ("sdpa", (8, 6), "bf16", "cuda", ["attention"]),
        ("flex_attention", (12, 0), "bf16", "cuda", ["attention"]),
        ("flex_attention", (9, 0), "fp8", "cuda", ["fp8"]),
        ("eager", (8, 9), "fp8", "cuda", ["fp8"]),
        ("sdpa", None, "fp8", "cpu", []),
    ],
)
def test_kernels_that_are_guessed_are_tried(
    attention: str,
    capability: tuple[int, int] | None,
    products: str,
    device: str,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[str] = []
    monkeypatch.setattr(kernel_trial, "try_attention", lambda *_: tried.append("attention"))
    monkeypatch.setattr(kernel_trial, "try_fp8", lambda *_: tried.append("fp8"))
    try_kernels(setup_of(attention, capability, products, device))
    assert tried == expected


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
def test_kernels_of_this_gpu_are_right(attention: str) -> None:
    device = torch.device("cuda")
    try_attention(device, attention, 64, torch.bfloat16)
    if torch.cuda.get_device_capability() >= (8, 9):
        try_fp8(device)
