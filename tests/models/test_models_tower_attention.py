"""The attention of towers whose images have any number of patches: which have it, and that their blocks compile."""

from __future__ import annotations

import inspect
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from tiny_runs import plain_model
from tiny_vision import vision_config
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionBlock

from megatier.compute.compilation import Compilation, Compiled
from megatier.models.tower_attention import VARLEN, TowerAttention, longest_as_tensor

SIZES = [(16, 16), (16,), (64, 16, 36), (4,)]
"""Patches of the images of some batches."""


def arguments(lengths: tuple[int, ...], width: int = 16) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(sum(lengths))
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    angles = tuple(torch.randn(sum(lengths), width, generator=generator) for _ in range(2))
    hidden = torch.randn(sum(lengths), 32, generator=generator).requires_grad_()
    return {"hidden_states": hidden, "cu_seqlens": ends, "position_embeddings": angles, "max_seqlen": max(lengths)}


def outcome(function: Any, block: nn.Module, given: dict[str, Any]) -> list[Tensor]:
    """What a block gives, and all of its gradients."""
    result: Tensor = function(**given)
    weights = list(block.parameters())
    return [result.detach(), *torch.autograd.grad(result.square().sum(), [given["hidden_states"], *weights])]


def tower(family: str = "qwen3_vl") -> tuple[PreTrainedModel, nn.Module]:
    model = plain_model(vision_config(family), "sdpa")
    return model, model.model.visual.blocks[0]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"])
def test_tower_that_would_loop_over_images_has_the_operator_while_it_runs(family: str) -> None:
    model, block = tower(family)
    attention = TowerAttention.of(model)
    assert attention.serves(block)
    assert not attention.serves(model.model.language_model)
    with attention.applied():
        assert model.config.vision_config._attn_implementation == VARLEN
        assert model.config.text_config._attn_implementation == "sdpa"
    assert model.config.vision_config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", ["gemma3", "llava"])
def test_tower_of_images_of_one_size_stays_as_it_is(family: str) -> None:
    model = plain_model(vision_config(family), "sdpa")
    assert not TowerAttention.of(model).serves(model)


def test_tower_with_another_attention_keeps_it() -> None:
    model = plain_model(vision_config("qwen3_vl"), "eager")
    assert not TowerAttention.of(model).serves(model)


@pytest.mark.parametrize("lengths", SIZES)
def test_block_without_a_kernel_loops_as_before(lengths: tuple[int, ...]) -> None:
    model, block = tower()
    given = arguments(lengths)
    with sdpa_kernel(SDPBackend.MATH):
        expected = outcome(block, block, given)
        with TowerAttention.of(model).applied():
            found = outcome(block, block, longest_as_tensor(given))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_block_is_compiled_once_for_images_of_any_number_and_size(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, block = tower(family)
    expected = [outcome(block, block, arguments(lengths)) for lengths in SIZES]
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    attention = TowerAttention.of(model)
    torch.compiler.reset()
    compiled = Compilation(any_shape=True)(block.forward, "block")
    for lengths, wanted in zip(SIZES, expected, strict=True):
        with attention.applied(), warnings.catch_warnings(action="error", category=UserWarning):
            found = outcome(compiled, block, longest_as_tensor(arguments(lengths)))
        assert all(map(torch.equal, found, wanted))
    assert len(graphs) == 1
    torch.compiler.reset()


@pytest.mark.parametrize("share", [0.4, pytest.param(0.0, marks=pytest.mark.slow)])
def test_compiled_block_gives_a_batch_its_bits_whatever_came_before(share: float) -> None:
    model, block = tower()
    exact = [outcome(block, block, arguments(lengths)) for lengths in SIZES]
    attention = TowerAttention.of(model)

    def compiled() -> Compiled[..., Any]:
        torch.compiler.reset()
        return Compilation(saved_share=share, keeps_attention=share == 0, any_shape=True)(block.forward, "block")

    def run(function: Compiled[..., Any], lengths: tuple[int, ...]) -> list[Tensor]:
        with attention.applied():
            found = outcome(function, block, longest_as_tensor(arguments(lengths)))
        assert not function.is_refused
        return found

    one = compiled()
    forwards = [run(one, lengths) for lengths in SIZES]
    other = compiled()
    backwards = [run(other, lengths) for lengths in reversed(SIZES)][::-1]
    for first, second, wanted in zip(forwards, backwards, exact, strict=True):
        assert all(map(torch.equal, first, second))
        for tensor, expected in zip(first, wanted, strict=True):
            torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-4)
    torch.compiler.reset()


def test_lengths_are_handed_over_as_transformers_calls_them() -> None:
    takes = inspect.signature(Qwen3VLVisionBlock(vision_config("qwen3_vl").vision_config).attn.forward).parameters
    assert {"cu_seqlens", "max_seqlen"} <= takes.keys()
    given = longest_as_tensor({"max_seqlen": 7, "cu_seqlens": None})
    assert int(given["max_seqlen"]) == 7
    assert "flash" in VARLEN
