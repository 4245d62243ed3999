"""Attention in compiled layers: which kernel runs, what stays of it, and that no bit depends on that."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_compute_compilation import ACTIVATIONS, PLAIN, saved_by
from tiny_runs import Run, run_in_fresh_process
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from megatier.compute.attention_kernels import FLEX, is_attention
from megatier.compute.compilation import Compilation


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_compiled_run_that_keeps_attention_gives_the_same_bits_under_any_policy(dtype: str, tmp_path: Path) -> None:
    run = replace(PLAIN, dtype=dtype, compile=True, saved_share=0.0)
    expected = run(tmp_path)
    kept = replace(run, kept_attention=True)
    runs = [replace(kept, activations="recompute", place="nvme")]
    runs += [replace(kept, activations="offload", offload_attention=True)]
    if dtype == "bf16":  # which is slow
        runs += [replace(kept, activations="keep"), replace(kept, activations="offload", place="ram_streamed")]
    assert [each(tmp_path) == expected for each in runs] == [True] * len(runs)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
def test_compiled_run_on_cuda_that_keeps_attention_gives_the_same_bits(attention: str, tmp_path: Path) -> None:
    run = Run(model="flash", device="cuda", attention=attention, saved_share=0.0, fused_loss=True, loss_chunk=32)
    runs = [replace(run, kept_attention=kept, activations=a) for kept in (False, True) for a in ACTIVATIONS]
    runs += [replace(runs[-1], offload_attention=True, place=place) for place in ("ram", "nvme_grads")]
    found = run_in_fresh_process(runs, tmp_path)
    assert all(np.isfinite(found[0].losses))
    assert [result == found[0] for result in found] == [True] * 8


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("share", [0.0, 0.8])
@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
def test_kernel_of_attention_on_cuda_gives_the_same_bits_in_two_fresh_processes(
    attention: str, share: float, tmp_path: Path
) -> None:
    """All kernels that `model.attention: auto` may choose, with a cold cache each time."""
    run = Run(model="flash", device="cuda", attention=attention, saved_share=share, kept_attention=True)
    runs = [run, replace(run, slices=2)]
    found = [run_in_fresh_process(runs, tmp_path, tmp_path / name) for name in ("first", "second")]
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_flex_attention_on_cuda_is_near_sdpa(tmp_path: Path) -> None:
    run = Run(model="flash", device="cuda")
    sdpa, flex = run_in_fresh_process([run, replace(run, attention="flex_attention")], tmp_path)
    assert flex.losses == pytest.approx(sdpa.losses, rel=2e-3)
    assert flex.norms == pytest.approx(sdpa.norms, rel=3e-2)


def attending(x: Tensor, queries: Tensor, keys: Tensor, out: Tensor) -> Tensor:
    """Attention of 4 heads, between products and functions of elements."""
    q, k = ((torch.tanh(x) @ weight).view(1, 48, 4, 8).transpose(1, 2) for weight in (queries, keys))
    mixed = nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True)
    return torch.tanh(mixed.transpose(1, 2).reshape(1, 48, 32) @ out)


def cutting(backwards: list[Any]) -> Any:
    """A backend that cuts graphs as the compiler does, and runs them operator by operator. It notes each backward."""

    def cut(graph: Any, examples: Any, **others: Any) -> Any:
        marking: Any = torch._inductor.config.joint_custom_post_pass
        if marking is not None:
            marking(graph.graph)
        parts = min_cut_rematerialization_partition(graph, examples, compiler="inductor", **others)
        backwards.append(parts[1])
        return parts

    return aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph), partition_fn=cut)


def test_kept_attention_saves_its_output_and_log_sum_exp_and_does_not_run_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backwards: list[Any] = []
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=cutting(backwards)))
    torch.manual_seed(0)
    inputs = [torch.randn(shape, requires_grad=True) for shape in [(1, 48, 32), (32, 32), (32, 32), (32, 32)]]
    saved: list[set[int]] = []
    grads: list[list[Tensor]] = []
    for keeps in (False, True, False):
        compiled = Compilation(0.0, keeps)(attending, "attending")
        for tensor in inputs:
            tensor.grad = None
        saved.append({tensor.numel() for tensor in saved_by(compiled, inputs)})
        grads.append([tensor.grad for tensor in inputs if tensor.grad is not None])
        assert compiled.saves_inputs_alone
    assert saved == [set(), {48 * 4, 48 * 32}, set()]
    repeats = [any(is_attention(node.target) for node in backward.graph.nodes) for backward in backwards]
    assert repeats == [True, False, True]
    assert all(torch.equal(one, other) for one, other in zip(grads[0], grads[1], strict=True))


def flexing(x: Tensor, queries: Tensor, keys: Tensor, out: Tensor, mask: BlockMask) -> Tensor:
    """The same by flex attention."""
    q, k = ((torch.tanh(x) @ weight).view(1, 48, 4, 8).transpose(1, 2) for weight in (queries, keys))
    mixed = flex_attention(q, k, k, block_mask=mask)
    return torch.tanh(mixed.transpose(1, 2).reshape(1, 48, 32) @ out)


@pytest.mark.parametrize(("share", "keeps", "repeats"), [(0.0, False, True), (0.0, True, False), (0.3, False, False)])
def test_flex_attention_is_repeated_in_a_backward_only_if_nothing_is_saved(
    share: float, keeps: bool, repeats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU flex attention has a backward only if it runs as plain products."""
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    torch.compiler.reset()
    Compilation(share, keeps)._adopt()
    backwards: list[Any] = []
    torch.manual_seed(0)
    inputs = [torch.randn(shape, requires_grad=True) for shape in [(1, 48, 32), (32, 32), (32, 32), (32, 32)]]
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 48, 48, device="cpu")
    compiled: Any = torch.compile(flexing, backend=cutting(backwards), fullgraph=True)
    compiled(*inputs, mask).sum().backward()
    found = [tensor.grad for tensor in inputs]
    [backward] = backwards
    assert any(node.target is FLEX for node in backward.graph.nodes) is repeats

    expected = torch.autograd.grad(attending(*inputs).sum(), inputs)
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert (one - other).norm() <= 1e-5 * other.norm()
