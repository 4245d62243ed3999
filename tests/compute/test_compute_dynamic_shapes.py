"""Code for batches of any size: how often it is compiled, and that a batch has its bits whatever came before."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.source import ConstantSource
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.codegen import simd, triton_utils
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from megatier.compute import dynamic_shapes
from megatier.compute.compilation import Compilation, Compiled

Shape = tuple[int, int]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def scaled(x: Tensor, gain: Tensor) -> Tensor:
    """Its gradient by `gain` is a sum over all tokens."""
    return torch.tanh(x * gain)


def run(compiled: Compiled[..., Tensor], shape: Shape) -> list[Tensor]:
    """The result and the gradients for a batch, which follows from its shape."""
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    x = torch.randn(*shape, 16, generator=generator).requires_grad_()
    gain = torch.linspace(0.5, 2, 16).requires_grad_()
    result = compiled(x, gain)
    result.square().sum().backward()
    assert x.grad is not None
    assert gain.grad is not None
    return [result.detach(), x.grad, gain.grad]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Notes each graph that is compiled, which runs as it is."""
    found: list[Any] = []

    def backend(graph: Any, examples: Any) -> Any:
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    return found


# ---------------------------------------------------------------------- which kernel


def attend(x: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


@pytest.mark.parametrize("any_shape", [False, True])
def test_compiled_attention_takes_the_kernels_that_are_allowed_now(graphs: list[Any], any_shape: bool) -> None:
    compiled = Compilation(any_shape=any_shape)(attend, "attend")
    x = torch.randn(2, 2, 5, 8, generator=torch.Generator().manual_seed(1))
    compiled(x)
    with sdpa_kernel(SDPBackend.MATH), pytest.warns(UserWarning, match="Other kernels of attention are allowed"):
        compiled(x)
    with pytest.warns(UserWarning, match="compiled anew"):
        compiled(x)
    compiled(x)
    assert len(graphs) == 3


@pytest.mark.parametrize("any_shape", [False, True])
def test_stored_code_is_named_after_the_kernels_that_are_allowed(any_shape: bool) -> None:
    Compilation(any_shape=any_shape)(attend, "attend")
    rule = torch._inductor.config.joint_custom_pre_pass
    assert isinstance(rule, CustomGraphPass)
    name = rule.uuid()
    with sdpa_kernel(SDPBackend.MATH):
        assert rule.uuid() != name
    assert rule.uuid() == name


# ---------------------------------------------------------------------- how often


def test_compilation_for_any_shape_serves_all_lengths_with_one_variant(graphs: list[Any]) -> None:
    compiled = Compilation(any_shape=True)(scaled, "scaled")
    for length in range(2, 90):
        run(compiled, (2 + length % 3, length))
    assert len(graphs) == 1
    for length in range(2, 9):
        run(compiled, (1, length))
    assert len(graphs) == 2  # a batch of one row


@pytest.mark.parametrize("shapes", [[(16, 16), (4, 24)], [(4, 24), (16, 16)], [(1, 5), (16, 16), (4, 24)]])
def test_compilation_for_any_shape_takes_sizes_that_are_equal_by_chance_as_others(
    shapes: list[Shape], graphs: list[Any]
) -> None:
    compiled = Compilation(any_shape=True)(scaled, "scaled")
    for shape in shapes:
        run(compiled, shape)
    assert len(graphs) == len({rows == 1 for rows, _ in shapes})


def test_compilation_for_one_shape_compiles_each_anew_and_has_no_limit(graphs: list[Any]) -> None:
    compiled = Compilation()(scaled, "scaled")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in range(2, 15):
            run(compiled, (2, length))
    assert len(graphs) == 13
    assert torch._dynamo.config.recompile_limit > 1e6
    assert torch._dynamo.config.accumulated_recompile_limit > 1e6


def test_marks_leave_out_what_is_the_models() -> None:
    kinds = [torch.ones(2, 5, 8), torch.ones(7, 8), torch.ones(2, 5, dtype=torch.int64), torch.ones(2, 1, 5, 5)]
    dynamic_shapes.mark_dynamic([kinds], {"scale": torch.ones(())})
    found: list[set[int]] = [getattr(x, "_dynamo_weak_dynamic_indices") for x in kinds]  # noqa: B009 - torch's own
    assert found == [{0, 1}, {0}, {0, 1}, {0, 1, 2, 3}]


def test_masks_by_blocks_are_compiled_for_each_size_and_a_warning_names_the_cost_once(graphs: list[Any]) -> None:
    def masked(x: Tensor, mask: BlockMask) -> Tensor:
        return x * 2

    def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    compilation = Compilation(any_shape=True)
    one, other = compilation(masked, "Masked"), compilation(masked, "Masked")
    masks = {length: create_block_mask(causal, None, None, length, length, device="cpu") for length in (5, 7, 9)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in (5, 5):
            one(torch.ones(2, length, 16, requires_grad=True), masks[length])
        assert not caught
        for length in (7, 9, 5):
            one(torch.ones(2, length, 16, requires_grad=True), masks[length])
            other(torch.ones(2, length, 16, requires_grad=True), masks[length])
    assert [str(w.message).partition(",")[0] for w in caught] == ["Masked is compiled anew for each size of batches"]
    assert len(graphs) == 3


# ---------------------------------------------------------------------- the same bits


def code_after(first: Shape, wanted: Sequence[Shape]) -> tuple[list[list[Tensor]], list[str]]:
    """What batches give after another one was compiled, and the code that this made."""

    def runs() -> list[list[Tensor]]:
        compiled = Compilation(any_shape=True)(scaled, "scaled")
        run(compiled, first)
        return [run(compiled, shape) for shape in wanted]

    torch.compiler.reset()
    results, code = run_and_get_code(runs)
    return results, [re.sub(r"AOT ID: .*|cpp_fused_\w+", "", text) for text in code]


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@pytest.mark.parametrize("planned", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_code_for_any_shape_is_planned_by_rule_and_not_by_the_first_batch(
    planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not planned:  # then it is what torch does
        monkeypatch.setattr(dynamic_shapes, "planned", lambda sizes, expression: expression)
        monkeypatch.setattr(dynamic_shapes, "_planned_partition", lambda hint: hint)
    with torch._inductor.config.patch(force_disable_caches=True):
        results, code = code_after((2, 3), [(3, 11)])
        others, others_code = code_after((60, 60), [(3, 11)])
    assert (code == others_code) is planned
    if planned:
        assert all(torch.equal(a, b) for a, b in zip(results[0], others[0], strict=True))


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("lengths", [[5, 7, 6], [7, 5, 6]])
def test_size_that_is_refused_runs_uncompiled_and_others_stay_compiled(lengths: list[int]) -> None:
    ran: list[int] = []

    def backend(graph: Any, examples: Any) -> Any:
        length = next(x.shape[1] for x in examples if isinstance(x, Tensor) and x.dim() == 3)
        if length == 7:
            raise AssertionError("not with 7")

        def noted(*args: Any) -> Any:
            ran.append(length)
            return graph.forward(*args)

        return noted

    compiled = Compiled(scaled, "Scaled", saves_inputs_alone=True)
    compiled._run = torch.compile(scaled, backend=backend, dynamic=False, fullgraph=True)
    with pytest.warns(UserWarning, match="Scaled runs uncompiled with batches of this size, because .* not with 7"):
        for length in lengths * 2:
            run(compiled, (2, length))
            assert compiled.is_refused is (length == 7)
            assert compiled.saves_inputs_alone is (length != 7)
    assert ran == [length for length in lengths * 2 if length != 7]


def test_limit_of_recompiles_that_somebody_sets_ends_no_run() -> None:
    compiled = Compilation()(scaled, "Scaled")
    compiled._run = torch.compile(scaled, backend="eager", dynamic=False, fullgraph=True)
    plain = Compiled(scaled, "plain", saves_inputs_alone=False)
    plain._run = scaled
    with torch._dynamo.config.patch(recompile_limit=2), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in (5, 6, 7, 8, 5):
            for one, other in zip(run(compiled, (2, length)), run(plain, (2, length)), strict=True):
                assert torch.equal(one, other)
    refusals = [str(w.message) for w in caught if "runs uncompiled" in str(w.message)]
    assert len(refusals) == 1
    assert refusals[0].startswith("Scaled runs uncompiled with batches of this size, because ")
    assert refusals[0].endswith("It takes more time, and more memory where layers save a share of their activations.")
    assert not compiled.is_refused


@pytest.mark.parametrize("any_shape", [True, False])
def test_backward_that_is_refused_runs_uncompiled_and_ends_no_run(any_shape: bool) -> None:
    def refuse(graph: Any, examples: Any) -> Any:
        raise AssertionError("no such backward")

    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph), bw_compiler=refuse)
    compiled = Compilation(any_shape=any_shape)(scaled, "Scaled")
    compiled._run = torch.compile(scaled, backend=backend, dynamic=False, fullgraph=True)
    plain = Compiled(scaled, "plain", saves_inputs_alone=False)
    plain._run = scaled
    with pytest.warns(
        UserWarning, match="Scaled runs uncompiled with batches of this size, because .*no such backward"
    ):
        found = run(compiled, (2, 5))
    assert compiled.is_refused
    assert all(torch.equal(one, other) for one, other in zip(found, run(plain, (2, 5)), strict=True))


def test_question_that_becomes_a_guard_is_answered_by_true_sizes_though_it_asks_for_hints() -> None:
    """Such as whether 32 bits address a tensor. What a smaller size would answer is no true guard of a large batch."""
    dynamic_shapes.install_planning()
    sizes = ShapeEnv()
    source = ConstantSource("tokens")
    tokens = sizes.create_symbol(1 << 32, source, dynamic_dim=DimDynamic.DYNAMIC)
    allocator = SizeVarAllocator(sizes)
    hint = next(getattr(allocator, name) for name in dynamic_shapes._HINTS if hasattr(allocator, name))
    with dynamic_shapes.planning():
        assert hint(tokens) == dynamic_shapes.PLANNED_TOKENS
        assert dynamic_shapes._with_true_sizes(hint)(tokens) == 1 << 32
    for maker in (simd, triton_utils):
        assert hasattr(maker.expr_fits_within_32bit, "__wrapped__")
