"""Compiled units: the same bits under every activation policy and in every tier, and what their graphs save."""

from __future__ import annotations

import contextvars
import itertools
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor.config
from one_node import SIZE, Shelf
from tiny_runs import PLACES, Run, exactness_config, opened, run_in_fresh_process, run_steps
from torch import Tensor, nn
from torch.utils import flop_counter

from megatier.compute.compilation import Compilation
from megatier.engine.gradient import Gradients
from megatier.engine.node import Node
from megatier.engine.stage import Stage, learning
from megatier.errors import UnsupportedModelError
from megatier.layout import Layout
from megatier.state import ADAMW_FP32
from megatier.tier import Activations

ACTIVATIONS = ("keep", "recompute", "offload")
ALL = list(itertools.product(PLACES, ACTIVATIONS))
PLAIN = Run(model="plain", dtype="fp32", fused_loss=True, loss_chunk=32)


# ---------------------------------------------------------------------- whole runs


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("share", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
def test_compiled_run_gives_the_same_bits_on_any_tier_and_nearly_those_of_an_uncompiled_one(
    share: float, tmp_path: Path
) -> None:
    run = replace(PLAIN, compile=True, saved_share=share)
    expected = run(tmp_path)
    settings = [("recompute", "nvme"), ("offload", "ram_streamed")]  # the slow tests try all
    found = {(a, p): replace(run, activations=a, place=p)(tmp_path) for a, p in settings}
    assert [setting for setting, result in found.items() if result != expected] == []

    # With the usual eps, one weight in 32,032 whose gradient is nearly zero can take another step in AdamW's second
    # update, and the norms of steps 3 to 5 then differ by a thousandth.
    compiled = replace(run, eps=0.1)(tmp_path)
    uncompiled = replace(PLAIN, eps=0.1)(tmp_path)
    assert uncompiled != compiled
    assert compiled.losses == pytest.approx(uncompiled.losses, rel=1e-6)
    assert compiled.norms == pytest.approx(uncompiled.norms, rel=1e-6)


def test_compiling_where_bf16_products_are_taken_in_fp32_changes_nothing(tmp_path: Path) -> None:
    run = Run(model="plain", fp32_products=True, fused_loss=True)
    assert replace(run, compile=True)(tmp_path) == run(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "groups", "slices"), [("bf16", 1, 1), ("bf16", 3, 2), ("fp32", 1, 2)])
@pytest.mark.parametrize("share", [0.0, 0.8])
def test_compiled_run_with_dropout_gives_the_same_bits_everywhere(
    share: float, dtype: str, groups: int, slices: int, tmp_path: Path
) -> None:
    run = Run(model="tied", dtype=dtype, groups=groups, slices=slices, fused_loss=True, loss_chunk=32)
    run = replace(run, compile=True, saved_share=share)
    found = {pair: replace(run, place=pair[0], activations=pair[1])(tmp_path) for pair in ALL}
    assert [pair for pair, result in found.items() if result != found[ALL[0]]] == []


@pytest.mark.slow
def test_compiled_run_in_two_fresh_processes_with_nothing_compiled_gives_the_same_bits(tmp_path: Path) -> None:
    runs = [replace(PLAIN, dtype=dtype, compile=True, saved_share=0.5) for dtype in ("fp32", "bf16")]
    others = [replace(run, place="nvme", activations="offload") for run in runs]
    first = run_in_fresh_process(runs, tmp_path, tmp_path / "first")
    second = run_in_fresh_process(others, tmp_path, tmp_path / "second")
    assert all(any((tmp_path / name).iterdir()) for name in ("first", "second"))
    assert first == second


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.0, 0.8])
def test_compiled_run_on_cuda_gives_the_same_bits_on_any_tier_and_activation_policy(
    share: float, tmp_path: Path
) -> None:
    run = Run(model="flash", device="cuda", saved_share=share, fused_loss=True, loss_chunk=32)
    settings = list(itertools.product(("gpu", "ram", "ram_streamed", "gpu_ram"), ACTIVATIONS))
    for groups in (1, 3):
        runs = [replace(run, groups=groups, place=p, activations=a) for p, a in settings]
        found = dict(zip(settings, run_in_fresh_process(runs, tmp_path), strict=True))
        expected = found[settings[0]]
        assert all(np.isfinite(expected.losses))
        assert [pair for pair, result in found.items() if result != expected] == [], f"{groups} groups"


@pytest.mark.gpu
def test_compiled_run_on_cuda_is_near_an_uncompiled_one(tmp_path: Path) -> None:
    run = Run(model="flash", dtype="fp32", device="cuda", fused_loss=True, loss_chunk=32)
    compiled, uncompiled = run_in_fresh_process([run, replace(run, compile=False)], tmp_path)
    assert compiled.losses == pytest.approx(uncompiled.losses, rel=1e-4)
    assert compiled != uncompiled


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("share", [0.0, 0.8])
def test_evaluation_runs_uncompiled(share: float, tmp_path: Path) -> None:
    options: dict[str, Any] = {"compute_dtype": "fp32", "fused_loss": True, "saved_share": share}
    config, losses = exactness_config("plain"), []
    for compiles in (False, True):
        with opened(config, tmp_path, PLACES["ram"], PLAIN.train, compile=compiles, **options) as session:
            batch = {"input_ids": torch.arange(32).view(2, 16), "labels": torch.arange(32).view(2, 16)}
            losses.append(session.engine.evaluate([batch]))
            nodes = session.engine.model.nodes
            assert any(node.keeps_graph for node in nodes)  # keep is the policy
            assert [node.unit for node in nodes if (node._compiled is not None) != compiles] == (
                ["model.embed_tokens"] if compiles else []
            )
    assert losses[0] == losses[1]


@pytest.mark.usefixtures("traced")
def test_layers_of_a_class_share_one_compilation(tmp_path: Path) -> None:
    torch._dynamo.utils.counters.clear()
    config, train = exactness_config("plain"), PLAIN.train
    with opened(config, tmp_path, PLACES["ram"], train, compute_dtype="fp32", compile=True) as session:
        run_steps(session, train, 2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3  # a layer, the last norm, the head


# ---------------------------------------------------------------------- what a graph saves


def gated(x: Tensor, up: Tensor, gate: Tensor, down: Tensor) -> Tensor:
    """What a layer is made of."""
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return (nn.functional.silu(x @ gate) * (x @ up)) @ down


def operands() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(48, 32), (32, 64), (32, 64), (64, 32)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def saved_by(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """What its graph holds besides the inputs."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*inputs).sum().backward()
    addresses = {tensor.data_ptr() for tensor in inputs}
    return [tensor for tensor in saved if tensor.data_ptr() not in addresses and tensor.numel() > 1]


@pytest.mark.usefixtures("traced")
def test_saved_share_another_one_takes_effect_in_the_same_process() -> None:
    inputs, num_bytes, grads = operands(), [], []
    for share in (1.0, 0.4, 0.0, 1.0):
        compiled = Compilation(share)(gated, "gated")
        for tensor in inputs:
            tensor.grad = None
        num_bytes.append(sum(tensor.nbytes for tensor in saved_by(compiled, inputs)))
        grads.append([tensor.grad for tensor in inputs])
        assert compiled.saves_inputs_alone is (share == 0)
    assert num_bytes[0] > num_bytes[1] > num_bytes[2] == 0
    assert num_bytes[3] == num_bytes[0]
    for found in grads[1:]:
        for one, other in zip(grads[0], found, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("traced")
def test_compilation_deterministic_kernels_are_asked_for_where_torch_is() -> None:
    for wanted in (True, False, True):
        torch.use_deterministic_algorithms(wanted)
        Compilation(0.8)(gated, "gated")
        assert torch._inductor.config.deterministic is wanted


# ---------------------------------------------------------------------- what the compiler refuses


def branching(x: Tensor) -> Tensor:
    """Control flow that depends on values."""
    return x * 2 if x.sum() > 0 else x * 3


def test_tile_that_is_called_again_and_again_leaves_nothing_in_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = Compilation().compile_tile(torch.sin, "a tile")
    monkeypatch.setattr(tile, "_run", torch.cos)  # compiling would take seconds
    counts = []
    for _ in range(3):
        tile(torch.zeros(1))
        counts.append(len(contextvars.copy_context()))
    assert len(set(counts)) == 1


@pytest.mark.parametrize("share", [0.0, 0.8])
def test_function_that_the_compiler_refuses_runs_uncompiled_with_one_warning(share: float) -> None:
    compiled = Compilation(share)(branching, "Branching")
    with pytest.warns(
        UserWarning, match=r"^Branching runs uncompiled, because torch\.compile refuses it: \S"
    ) as caught:
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    assert len(caught) == 1
    assert not compiled.saves_inputs_alone
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(compiled(-torch.ones(3)), torch.full((3,), -3.0))


def refusing_backend(graph: Any, examples: Any) -> Any:
    raise AssertionError("no such node\nin this graph")


def test_function_that_the_backend_refuses_is_warned_of_with_the_cause_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=refusing_backend))
    compiled = Compilation()(torch.neg, "Refused")
    with pytest.warns(UserWarning, match=r" raised: AssertionError: no such node\. It takes more"):
        assert torch.equal(compiled(torch.ones(3)), -torch.ones(3))


class Branch(nn.Module):
    """A product whose sign depends on a value."""

    def __init__(self, device: str, *, refused: bool, part: nn.Module | None = None) -> None:
        super().__init__()
        self.part = part or nn.Identity()
        self.gain = nn.Parameter(torch.empty(SIZE, SIZE, device=device))
        self.refused = refused

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        result: Tensor = self.part(torch.tanh(x @ self.gain)) * x
        if self.refused and x.sum() > 0:
            return result * -2
        return result


def streamed(
    activations: str, share: float | None, *, slices: int = 1, refused: bool = False, part: nn.Module | None = None
) -> tuple[Branch, Node, Shelf]:
    """A module on meta behind a node, compiled if a share is given. A part that is given may run in tiles."""
    torch.manual_seed(0)
    layout = replace(Layout.of([("gain", (SIZE, SIZE))]), schema=ADAMW_FP32)
    shelf = OneShelf(torch.randn(layout.num_elements))
    device = torch.device("cpu")
    gradients = Gradients({"unit": layout}, shelf, shelf, groups=1)
    gradients.begin_group(0)
    anchor = torch.zeros((), requires_grad=True)
    stage = Stage(
        source=shelf,
        gradients=gradients,
        dtypes={"unit": torch.float32},
        device=device,
        slices=slices,
        anchor=anchor,
        compilation=None if share is None else Compilation(share),
    )
    module = Branch("meta", refused=refused, part=part)
    places: Any = [(module._parameters, tensor.name, tensor) for tensor in layout.tensors]
    tiled = () if part is None else ("part",)
    node = Node(stage, "unit", "branch", module, places, activations=Activations(activations), tiled=tiled)
    with torch.no_grad(), learning(stage):
        for rows in (1, 2):
            module(torch.randn(rows, SIZE))
    return module, node, shelf


class OneShelf(Shelf):
    """Weights of a unit of one tensor."""

    def acquire_grad_buffer(self, unit: str, *, fits: bool = False) -> Tensor:
        self.shipped.append(torch.full_like(self.weights, float("nan")))
        return self.shipped[-1].view(torch.uint8)


def plain_gradients(shelf: Shelf, x: Tensor, *, refused: bool, slices: int) -> tuple[Tensor, Tensor]:
    """Of the unit and of x."""
    module = Branch("cpu", refused=refused)
    with torch.no_grad():
        module.gain.copy_(shelf.weights[: SIZE * SIZE].view(SIZE, SIZE))
    x = x.clone().requires_grad_()
    sum((module(part).square().sum() for part in x.chunk(slices)), torch.zeros(())).backward()
    assert module.gain.grad is not None
    assert x.grad is not None
    return module.gain.grad, x.grad


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("share", [0.0, 0.8])
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_compiled_node_gives_the_gradients_of_plain_torch(
    activations: str, share: float, slices: int, refused: bool
) -> None:
    module, node, shelf = streamed(activations, share, slices=slices, refused=refused)
    for step in range(2):  # in the first the compiler refuses
        x = torch.randn(6, SIZE)
        expected = plain_gradients(shelf, x, refused=refused, slices=slices)
        leaf = x.clone().requires_grad_()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            output = module(leaf)
            output.square().sum().backward()
        refusals = [w for w in caught if "Branch runs uncompiled" in str(w.message)]
        assert len(refusals) == (1 if refused and not step else 0)
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, expected[1])
        torch.testing.assert_close(shelf.shipped[-1][: SIZE * SIZE].view(SIZE, SIZE), expected[0])
        assert all(bool((slot == 0xFF).all()) for slot in shelf.slots)
        node.stage.gradients.begin_group(0)
    assert node.keeps_graph is (activations == "keep" or (share == 0 and not refused))


class Counting(nn.Module):
    """A factor that grows from one forward to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count


@pytest.mark.usefixtures("traced")
@pytest.mark.filterwarnings("ignore:Branch runs uncompiled")
def test_node_with_slices_and_tiles_that_the_compiler_refuses_gives_the_gradients_of_plain_torch() -> None:
    module, _, shelf = streamed("recompute", 0.8, slices=2, refused=True, part=nn.Identity())
    x = torch.randn(6, SIZE)
    expected = plain_gradients(shelf, x, refused=True, slices=2)
    leaf = x.clone().requires_grad_()
    module(leaf).square().sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, expected[1])
    torch.testing.assert_close(shelf.shipped[-1][: SIZE * SIZE].view(SIZE, SIZE), expected[0])


@pytest.mark.parametrize("slices", [1, 2])
def test_node_that_might_run_in_tiles_and_gives_other_numbers_when_it_runs_again_is_refused(slices: int) -> None:
    module, _, _ = streamed("recompute", None, slices=slices, part=Counting())
    output = module(torch.randn(6, SIZE, requires_grad=True))
    with pytest.raises(UnsupportedModelError, match="branch gave other numbers when it ran again"):
        output.square().sum().backward()


# ---------------------------------------------------------------------- what stays on the device


class _Lent(torch.autograd.Function):
    """A tensor over the memory of an array, with a graph behind it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, array: Any) -> Tensor:
        return torch.from_numpy(array)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].sum(), None


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("share", [0.0, 0.8, None])
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_offloaded_input_is_not_held_between_forward_and_backward(
    activations: str, share: float | None, slices: int
) -> None:
    module, node, shelf = streamed(activations, share or 0.0, slices=slices)
    if share is None:
        node._compiled = None
    array: Any = np.random.default_rng(0).standard_normal((6, SIZE), dtype=np.float32)
    expected = plain_gradients(shelf, torch.from_numpy(array.copy()), refused=False, slices=slices)
    held, anchor = weakref.ref(array), torch.zeros((), requires_grad=True)
    x: Any = _Lent.apply(anchor, array)  # type: ignore[no-untyped-call]
    output = module(x)
    x = array = None
    assert (held() is None) is (activations == "offload")
    output.square().sum().backward()
    assert held() is None
    assert anchor.grad is not None
    torch.testing.assert_close(anchor.grad, expected[1].sum())
    torch.testing.assert_close(shelf.shipped[-1][: SIZE * SIZE].view(SIZE, SIZE), expected[0])


def test_attention_flops_of_few_key_heads_are_those_of_as_many_as_query_heads() -> None:
    Compilation()(torch.relu, "a function")
    whole = flop_counter.sdpa_flop_count((1, 8, 16, 4), (1, 8, 16, 4), (1, 8, 16, 4))
    assert flop_counter.sdpa_flop_count((1, 8, 16, 4), (1, 2, 16, 4), (1, 2, 16, 4)) == whole


@pytest.mark.gpu
@pytest.mark.filterwarnings("error:.*runs uncompiled")
def test_layer_with_few_key_heads_that_saves_part_compiles_on_a_gpu(tmp_path: Path) -> None:
    Run(model="flash", device="cuda", saved_share=0.3)(tmp_path)
