"""Stacks of experts in FP8: each expert computes as a linear layer in FP8 does that has its rows alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from megatier.compute import fp8_stacks
from megatier.compute.compilation import Compilation
from megatier.compute.fp8 import FP8_DTYPE, Fp8Linear
from megatier.compute.fp8_stacks import Fp8Experts, fits_fp8_experts, set_fp8_experts, supports_fp8

EXPERTS, CHOSEN, HIDDEN, INSIDE = 4, 2, 32, 48
KINDS = {"gated": Qwen3MoeExperts, "transposed": GptOssExperts, "plain": NemotronHExperts}


def experts_of(kind: str, device: str = "cpu", *, is_fp8: bool = True, inside: int = INSIDE) -> nn.Module:
    names = {
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS),
        **dict.fromkeys(("hidden_size", "moe_latent_size"), HIDDEN),
        **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), inside),
        **dict.fromkeys(("hidden_act", "mlp_hidden_act"), "silu"),
        "swiglu_alpha": 1.7,
        "swiglu_limit": 7.0,
        "_experts_implementation": "grouped_mm",
    }
    made: Any = KINDS[kind]
    module: nn.Module = made(SimpleNamespace(**names))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    module = module.to(device, torch.bfloat16)
    if is_fp8:
        set_fp8_experts(module)
    return module


def sent(num_tokens: int = 21, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Rows, the experts that they go to, of which one gets none, and their weights."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
    scores = torch.rand(num_tokens, EXPERTS - 1, generator=generator)
    chosen = scores.topk(CHOSEN).indices
    weights = torch.rand(num_tokens, CHOSEN, generator=generator).bfloat16()
    return rows.to(device), chosen.to(device), weights.to(device)


def taken(module: Any, rows: Tensor, chosen: Tensor, weights: Tensor) -> list[Tensor]:
    """The result, and the gradients of rows, weights and parameters."""
    leaves = [rows.detach().requires_grad_(), weights.detach().requires_grad_()]
    result = module(leaves[0], chosen, leaves[1])
    slope = torch.randn(result.shape, generator=torch.Generator().manual_seed(2)).to(result)
    return [result.detach(), *torch.autograd.grad(result, [*leaves, *module.parameters()], slope)]


def are_near(found: Tensor, wanted: Tensor, least: float) -> bool:
    cosine = nn.functional.cosine_similarity(found.float().flatten(), wanted.float().flatten(), 0)
    return float(cosine) > least and float(found.norm()) == pytest.approx(float(wanted.norm()), rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_in_fp8_are_near_those_of_transformers(kind: str) -> None:
    plain = experts_of(kind, is_fp8=False)
    wanted = taken(plain, *sent())
    set_fp8_experts(plain)
    found = taken(plain, *sent())
    assert isinstance(plain, Fp8Experts)
    for one, other in zip(found, wanted, strict=True):
        assert not torch.equal(one, other)
        assert are_near(one, other, 0.99)
    set_fp8_experts(plain, is_fp8=False)
    assert type(plain) is KINDS[kind]
    assert all(map(torch.equal, taken(plain, *sent()), wanted))


def test_each_expert_computes_as_a_linear_layer_in_fp8_that_has_its_rows_alone() -> None:
    """With a single matrix for each expert, and no activation, there is nothing else."""
    weight = (torch.randn(EXPERTS, INSIDE, HIDDEN, generator=torch.Generator().manual_seed(0)) / 4).bfloat16()
    rows, chosen, _ = sent()
    layout = fp8_stacks._lay_out(chosen.flatten(), EXPERTS)
    leaves = [rows.detach().requires_grad_(), weight.detach().requires_grad_()]
    result = fp8_stacks._multiply(leaves[0], leaves[1], CHOSEN, *layout)
    slope = torch.randn(result.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    of_rows, of_weight = torch.autograd.grad(result, leaves, slope)

    of_pairs = torch.zeros(len(rows) * CHOSEN, HIDDEN, dtype=torch.bfloat16)
    for expert in range(EXPERTS):
        layer = Fp8Linear(HIDDEN, INSIDE, bias=False, dtype=torch.bfloat16)
        layer.weight.data = weight[expert]
        pairs = (chosen.flatten() == expert).nonzero()[:, 0]
        own = rows[pairs // CHOSEN].requires_grad_()
        expected = layer(own)
        assert torch.equal(result[pairs], expected)
        grads = torch.autograd.grad(expected, [own, layer.weight], slope[pairs], materialize_grads=True)
        of_pairs[pairs] = grads[0]
        assert torch.equal(of_weight[expert], grads[1])
    assert not of_weight[EXPERTS - 1].any()
    assert torch.equal(of_rows, of_pairs.view(len(rows), CHOSEN, HIDDEN).sum(1))


@pytest.mark.parametrize("has_others_elsewhere", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_expert_depends_on_no_token_that_went_elsewhere(kind: str, has_others_elsewhere: bool) -> None:
    module: Any = experts_of(kind)
    rows, chosen, weights = sent()
    is_mine = (chosen == 0).any(1)
    assert 0 < is_mine.sum() < len(rows)
    if has_others_elsewhere:
        module.num_experts = 1
        for name, parameter in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(parameter[:1].detach()))
        chosen = chosen.clamp(max=1)
    found = taken(module, rows, chosen, weights)
    factor = 1e37 if has_others_elsewhere else 1e6
    other = taken(module, torch.where(is_mine[:, None], rows, rows * factor), chosen, weights)
    assert torch.equal(found[0][is_mine], other[0][is_mine])
    assert all(torch.equal(one[0], two[0]) for one, two in zip(found[3:], other[3:], strict=True))
    assert has_others_elsewhere or not all(
        torch.equal(one[1], two[1]) for one, two in zip(found[3:], other[3:], strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_experts_elsewhere_add_nothing_and_ranges_of_experts_give_the_whole(kind: str) -> None:
    module: Any = experts_of(kind)
    rows, chosen, weights = sent()
    whole = taken(module, rows, chosen, weights)
    parts = []
    for start in (0, 2):
        part: Any = experts_of(kind)
        part.num_experts = 2
        for name, parameter in module.named_parameters():
            setattr(part, name, nn.Parameter(parameter[start : start + 2].detach()))
        is_own = (chosen >= start) & (chosen < start + 2)
        parts.append(taken(part, rows, torch.where(is_own, chosen - start, 2), weights))
    assert are_near(parts[0][0] + parts[1][0], whole[0], 0.9999)
    for number in range(3, len(whole)):
        assert torch.equal(torch.cat([part[number] for part in parts]), whole[number])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_token_that_is_not_finite_gives_nothing_finite_and_leaves_other_tokens(bad: float) -> None:
    module = experts_of("gated")
    rows, chosen, weights = sent()
    rows[-1, 5] = bad
    found = taken(module, rows, chosen, weights)
    assert not found[0][-1].isfinite().any()
    assert found[0][:-1].isfinite().all()
    of_first = found[3]
    assert not of_first[chosen[-1]].isfinite().all()
    others = [expert for expert in range(EXPERTS) if expert not in chosen[-1].tolist()]
    assert of_first[others].isfinite().all()


def test_experts_with_zeros_few_tokens_or_none_are_finite() -> None:
    module = experts_of("gated")
    rows, chosen, weights = sent()
    for count, factor in ((0, 1.0), (1, 1.0), (21, 0.0), (21, 1e-38)):
        found = taken(module, factor * rows[:count], chosen[:count], weights[:count])
        assert all(part.isfinite().all() for part in found)
        assert found[0].shape == (count, HIDDEN)


def test_experts_save_a_row_in_fp8_once_for_all_that_it_goes_to() -> None:
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    module = experts_of("gated")
    rows, chosen, weights = sent()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(rows.requires_grad_(), chosen, weights)
    codes = [tuple(tensor.shape) for tensor in saved if tensor.dtype is FP8_DTYPE]
    assert codes == [(len(rows), HIDDEN), (len(rows) * CHOSEN, INSIDE)]


@pytest.mark.usefixtures("traced")
def test_compiled_experts_give_the_same_bits() -> None:
    module = experts_of("gated")
    given = sent()
    compiled = Compilation(0.5)(module.forward, "experts")
    run: Any = lambda *args: compiled(*args)  # noqa: E731
    run.parameters = module.parameters
    found, expected = taken(run, *given), taken(module, *given)
    assert not compiled.is_refused
    assert all(map(torch.equal, found, expected))


def test_experts_that_are_known_are_those_that_transformers_marks() -> None:
    class Other(nn.Module):
        num_experts = 4

        def __init__(self) -> None:
            super().__init__()
            self.down_proj = nn.Parameter(torch.zeros(4, 16, 16))

    assert not supports_fp8(Other())
    module: Any = experts_of("gated", is_fp8=False)
    assert supports_fp8(module)
    assert fits_fp8_experts(module)
    assert not fits_fp8_experts(experts_of("gated", is_fp8=False, inside=40))
    module.forward = lambda rows: rows
    assert not supports_fp8(module)


@pytest.mark.parametrize("kind", KINDS)
def test_kernel_for_all_groups_takes_what_products_ask_it_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes, strides and types, by torch's own checks, which need no GPU."""
    asked = []
    one_by_one = fp8_stacks._grouped_mm

    def noting(*given: Any) -> Tensor:
        left, right, scale, ends, is_fast = given
        result: Tensor = one_by_one(*given)
        on_meta = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in (left, right, scale, ends)
        ]
        found = fp8_stacks._grouped_mm_on_gpu(*on_meta, is_fast=is_fast)
        asked.append((found.shape, found.dtype) == (result.shape, result.dtype))
        return result

    monkeypatch.setattr(fp8_stacks, "_grouped_mm", noting)
    taken(experts_of(kind), *sent())
    assert asked == [True] * 6


@pytest.mark.parametrize("num_experts", [1, 3])
def test_kernel_for_all_groups_gets_scales_side_by_side(num_experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Tensor] = []
    monkeypatch.setattr(torch, "_scaled_grouped_mm", lambda *operands, **_: given.extend(operands))
    left, right = (torch.empty(32, 48, dtype=FP8_DTYPE, device="meta") for _ in range(2))
    # One scale for each expert, repeated without memory.
    scale = torch.ones(num_experts, 1, device="meta").expand(-1, 32)
    ends = torch.empty(num_experts, dtype=torch.int32, device="meta")
    fp8_stacks._grouped_mm_on_gpu(left, right, scale, ends, is_fast=False)
    _, _, *scales = given
    assert all(one.is_contiguous() and one.shape == (num_experts * 32,) for one in scales)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_experts_on_cuda_repeat_their_bits_and_are_near_those_of_products_one_by_one(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for num_tokens in (1, 21, 3000):
        module = experts_of(kind, "cuda")
        given = sent(num_tokens, "cuda")
        found = taken(module, *given)
        assert all(map(torch.equal, taken(module, *given), found))
        monkeypatch.setattr(fp8_stacks, "_has_kernel", lambda *_: False)
        one_by_one = taken(module, *given)
        monkeypatch.undo()
        # Sums of a kernel are taken in an order of its own.
        assert all(are_near(one, other, 0.9999) for one, other in zip(found, one_by_one, strict=True))
