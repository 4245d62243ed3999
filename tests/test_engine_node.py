from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_config
from tiny_runs import (
    BATCH,
    PLACES,
    ModelWeights,
    exactness_config,
    one_thread,
    opened,
    plain_model,
    random_groups,
    read_parameters,
    run_steps,
)
from torch import Tensor, nn

from megatier.config.schema import TrainConfig
from megatier.engine.gradient import Gradients
from megatier.engine.node import Node
from megatier.engine.stage import Stage, learning
from megatier.errors import ConfigError, UnsupportedModelError
from megatier.layout import Layout
from megatier.tier import Activations, Kind, Phase

SIZE = 4
LAYOUT = Layout.of([("gain", (SIZE, SIZE)), ("idle", (3,)), ("shift", (SIZE,))])


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@dataclass
class Shelf:
    """Weights of one unit, at another address for every use, poisoned when given back; and its gradients."""

    weights: Tensor
    slots: list[Tensor] = field(default_factory=list)
    shipped: list[Tensor] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    stashed: dict[str, Tensor] = field(default_factory=dict)

    def enter(self, unit: str, phase: Phase, group: int) -> Use:
        self.phases.append(phase)
        self.slots.append(self.weights.clone().view(torch.uint8))
        return Use(self.slots[-1])

    def stash(self, unit: str, tensor: Tensor) -> None:
        self.stashed[unit] = tensor.clone()

    def fetch(self, unit: str) -> Tensor:
        return self.stashed.pop(unit)

    def take_grad(self, unit: str, *, fits: bool = False) -> Tensor:
        self.shipped.append(torch.full((LAYOUT.num_elements,), float("nan")))
        return self.shipped[-1].view(torch.uint8)

    def ship_grad(self, unit: str, *, group: int) -> None:
        pass

    def sums_here(self, unit: str) -> bool:
        return False

    def measure(self, unit: str, grad: Tensor) -> None:
        pass

    def gradients(self) -> dict[str, Tensor]:
        """What the last backward shipped."""
        return {t.name: self.shipped[-1][t.start : t.stop].view(t.shape) for t in LAYOUT.tensors}


class Use:
    def __init__(self, slot: Tensor) -> None:
        self.bytes = slot

    def leave(self) -> None:
        self.bytes.fill_(0xFF)


class Probe(nn.Module):
    """tanh(x gain + shift), and a record of how it was called. The parameter `idle` is not used."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(SIZE, SIZE, device=device))
        self.idle = nn.Parameter(torch.empty(3, device=device))
        self.shift = nn.Parameter(torch.empty(SIZE, device=device))
        self.calls: list[dict[str, Any]] = []
        self.returns_tuple = False

    def forward(self, x: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Any:
        self.calls.append({"rows": len(x), **kwargs})
        result = torch.tanh(torch.dropout(x, 0.25, self.training) @ self.gain + self.shift)
        if mask is not None:
            result = result * mask
        return (result, None, torch.arange(len(x))) if self.returns_tuple else result


def streamed(activations: str = "keep", slices: int = 1) -> tuple[Probe, Node, Shelf, dict[str, Tensor]]:
    """A probe on meta behind a node, and its weights by name."""
    torch.manual_seed(0)
    weights = torch.randn(LAYOUT.num_elements)
    shelf = Shelf(weights)
    device = torch.device("cpu")
    gradients = Gradients({"unit": LAYOUT}, torch.float32, shelf, shelf, groups=1)
    gradients.begin_group(0)
    anchor = torch.zeros((), requires_grad=True)
    stage = Stage(source=shelf, gradients=gradients, dtype=torch.float32, device=device, slices=slices, anchor=anchor)
    probe = Probe("meta")
    bindings = [(probe._parameters, tensor.name, tensor) for tensor in LAYOUT.tensors]
    node = Node(stage, "unit", "probe", probe, bindings, activations=Activations(activations))  # type: ignore[arg-type]
    return probe, node, shelf, {t.name: weights[t.start : t.stop].view(t.shape) for t in LAYOUT.tensors}


def plain_gradients(weights: Mapping[str, Tensor], x: Tensor, seed: int = 1, **kwargs: Any) -> dict[str, Tensor]:
    """Of the sum of squares of the probe's output, for its weights and for x."""
    probe = Probe("cpu")
    with torch.no_grad():
        for name, value in weights.items():
            probe.get_parameter(name).copy_(value)
    x = x.clone().requires_grad_()
    torch.manual_seed(seed)
    probe(x, **kwargs).square().sum().backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in probe.named_parameters()}
    assert x.grad is not None
    return {**grads, "x": x.grad}


def streamed_gradients(probe: Probe, shelf: Shelf, x: Tensor, seed: int = 1, **kwargs: Any) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    torch.manual_seed(seed)
    output = probe(x, **kwargs)
    torch.manual_seed(99)  # a recompute must not depend on the random state of the backward
    (output[0] if isinstance(output, tuple) else output).square().sum().backward()
    assert x.grad is not None
    return {**shelf.gradients(), "x": x.grad}


# ---------------------------------------------------------------------- gradients


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_node_weights_poisoned_between_forward_and_backward_gradients_are_right(activations: str) -> None:
    probe, _, shelf, weights = streamed(activations)
    x = torch.randn(6, SIZE)
    found = streamed_gradients(probe, shelf, x)
    expected = plain_gradients(weights, x)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len({slot.data_ptr() for slot in shelf.slots}) == 2
    assert all(bool((slot == 0xFF).all()) for slot in shelf.slots)
    assert shelf.phases == [Phase.FORWARD, Phase.BACKWARD]


def test_node_kept_graph_reads_the_weights_bound_in_the_backward() -> None:
    probe, _, shelf, weights = streamed("keep")
    x = torch.randn(6, SIZE)
    expected = plain_gradients(weights, x)
    leaf = x.clone().requires_grad_()
    torch.manual_seed(1)
    output = probe(leaf)
    shelf.weights = shelf.weights * 2
    output.square().sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, 2 * expected["x"])
    assert torch.equal(shelf.gradients()["gain"], expected["gain"])


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_node_used_twice_in_a_step_gradients_add_up(activations: str) -> None:
    probe, _, shelf, weights = streamed(activations)
    probe.eval()
    x = torch.randn(6, SIZE)
    first, second = x.clone().requires_grad_(), x.clone().requires_grad_()
    (probe(first).square().sum() + 2 * probe(second).square().sum()).backward()
    plain = Probe("cpu").eval()
    plain.load_state_dict(weights)
    one = torch.autograd.grad(plain(x).square().sum(), [plain.gain])[0]
    assert len(shelf.shipped) == 1
    torch.testing.assert_close(shelf.gradients()["gain"], 3 * one)


def test_node_input_without_gradient_still_ships_weight_gradients() -> None:
    probe, _, shelf, weights = streamed("recompute")
    probe.eval()
    x = torch.randn(6, SIZE)
    probe(x).square().sum().backward()
    plain = Probe("cpu").eval()
    plain.load_state_dict(weights)
    plain(x).square().sum().backward()
    assert torch.equal(shelf.gradients()["gain"], plain.get_parameter("gain").grad)  # type: ignore[arg-type]


def test_node_parameter_without_gradient_counts_as_zero_and_shifts_nothing() -> None:
    probe, _, shelf, _ = streamed()
    found = streamed_gradients(probe, shelf, torch.randn(6, SIZE))
    assert torch.equal(found["idle"], torch.zeros(3))
    assert found["shift"].abs().min() > 0


def test_node_offloaded_input_leaves_and_comes_back() -> None:
    probe, _, shelf, _ = streamed("offload")
    output = probe(torch.randn(6, SIZE, requires_grad=True))
    assert shelf.stashed["unit"].shape == (6, SIZE)
    output.sum().backward()
    assert shelf.stashed == {}


# ---------------------------------------------------------------------- calls


@pytest.mark.parametrize("name", ["past_key_values", "past_key_value", "layer_past"])
def test_node_training_strips_caches_and_evaluation_keeps_them(name: str) -> None:
    probe, _, _, _ = streamed()
    cache = torch.ones(1)
    probe(torch.randn(2, SIZE), use_cache=True, **{name: cache})
    with torch.no_grad():
        probe(torch.randn(2, SIZE), use_cache=True, **{name: cache})
    assert probe.calls[0] == {"rows": 2, "use_cache": False, name: None}
    assert probe.calls[1] == {"rows": 2, "use_cache": True, name: cache}


def test_node_tuple_output_with_none_and_integers_passes_through() -> None:
    probe, _, shelf, weights = streamed("recompute")
    probe.returns_tuple = True
    x = torch.randn(6, SIZE)
    found = streamed_gradients(probe, shelf, x)
    expected = plain_gradients(weights, x)
    assert torch.equal(found["gain"], expected["gain"])
    output, nothing, positions = probe(x)
    assert output.requires_grad
    assert nothing is None
    assert not positions.requires_grad
    assert torch.equal(positions, torch.arange(6))


def test_node_nested_outputs_come_out_nested() -> None:
    probe, node, _, _ = streamed()
    inner = node._forward
    node._forward = lambda x: {"all": [inner(x), (None, x.detach() * 2)]}
    x = torch.randn(6, SIZE)
    result = probe(x)
    output, (nothing, doubled) = result["all"]
    assert isinstance(result["all"], list)
    assert output.requires_grad
    assert nothing is None
    assert torch.equal(doubled, 2 * x)


def test_node_output_that_is_no_tensor_is_refused() -> None:
    probe, node, _, _ = streamed()
    node._forward = lambda x: {"output": x, "rows": len(x)}
    with pytest.raises(UnsupportedModelError, match=r"probe returns something other than tensors \(int\)"):
        probe(torch.randn(2, SIZE))


def test_node_argument_on_meta_is_refused() -> None:
    probe, _, _, _ = streamed()
    with pytest.raises(UnsupportedModelError, match="probe was given a tensor on meta"):
        probe(torch.randn(2, SIZE, device="meta"))


def test_node_unbound_parameter_is_on_meta_but_names_the_device_of_its_weights() -> None:
    probe, _, _, _ = streamed()
    assert probe.gain.is_meta
    assert probe.gain.device == torch.device("cpu")
    assert isinstance(probe.gain, nn.Parameter)


@pytest.mark.parametrize("training", [True, False])
def test_node_after_a_call_parameters_are_unbound_again(training: bool) -> None:
    probe, node, _, _ = streamed()
    with torch.set_grad_enabled(training):
        probe(torch.randn(2, SIZE))
    assert all(parameter.is_meta for parameter in probe.parameters())
    node._forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError), torch.set_grad_enabled(training):
        probe(torch.randn(2, SIZE))
    assert all(parameter.is_meta for parameter in probe.parameters())


def test_node_evaluation_expects_no_backward() -> None:
    probe, _, shelf, _ = streamed(slices=3)
    with torch.no_grad():
        assert probe(torch.randn(6, SIZE)).shape == (6, SIZE)
    assert probe.calls == [{"rows": 6}]
    assert shelf.phases == [Phase.FORWARD]


# ---------------------------------------------------------------------- slices


def learn(probe: Probe, node: Node, *calls: tuple[Tensor, Tensor | None]) -> None:
    with torch.no_grad(), learning(node.stage):
        for x, mask in calls:
            probe(x, mask)
    probe.calls.clear()


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_node_slices_share_one_binding_and_give_the_whole_gradients(activations: str) -> None:
    probe, node, shelf, weights = streamed(activations, slices=3)
    probe.eval()
    learn(probe, node, (torch.randn(1, SIZE), torch.ones(SIZE)), (torch.randn(2, SIZE), torch.ones(SIZE)))
    shelf.phases.clear()
    x, mask = torch.randn(6, SIZE), torch.rand(SIZE)
    found = streamed_gradients(probe, shelf, x, mask=mask)
    assert node.rows.batched == [True, False]
    assert [call["rows"] for call in probe.calls] == [2] * 3 * (1 if activations == "keep" else 2)
    assert shelf.phases == [Phase.FORWARD, Phase.BACKWARD]
    plain = Probe("cpu").eval()
    plain.load_state_dict(weights)
    whole = x.clone().requires_grad_()
    plain(whole, mask).square().sum().backward()
    torch.testing.assert_close(found["gain"], plain.get_parameter("gain").grad)
    torch.testing.assert_close(found["x"], whole.grad)


def test_node_shared_input_gets_the_sum_of_the_slices_gradients() -> None:
    probe, node, _, weights = streamed("recompute", slices=2)
    probe.eval()
    learn(probe, node, (torch.randn(1, SIZE), torch.ones(SIZE)), (torch.randn(2, SIZE), torch.ones(SIZE)))
    x, mask = torch.randn(4, SIZE), torch.rand(SIZE).requires_grad_()
    [found] = torch.autograd.grad(probe(x, mask).square().sum(), [mask])
    plain = Probe("cpu").eval()
    plain.load_state_dict(weights)
    [expected] = torch.autograd.grad(plain(x, mask).square().sum(), [mask])
    torch.testing.assert_close(found, expected)


def test_node_shared_argument_as_long_as_the_batch_is_not_cut() -> None:
    probe, node, _, weights = streamed("recompute", slices=2)
    probe.eval()
    learn(probe, node, (torch.randn(1, SIZE), torch.ones(SIZE)), (torch.randn(2, SIZE), torch.ones(SIZE)))
    plain = Probe("cpu").eval()
    plain.load_state_dict(weights)
    x, mask = torch.randn(SIZE, SIZE), torch.rand(SIZE)
    torch.testing.assert_close(probe(x, mask), plain(x, mask))


def test_node_without_batched_arguments_runs_once() -> None:
    probe, node, _, _ = streamed("keep", slices=2)
    learn(probe, node, (torch.randn(5, SIZE), None), (torch.randn(5, SIZE), None))
    assert probe(torch.randn(5, SIZE, requires_grad=True)).shape == (5, SIZE)
    assert probe.calls == [{"rows": 5}]


def test_node_argument_whose_other_sizes_follow_the_batch_is_refused() -> None:
    probe, node, _, _ = streamed(slices=2)
    with pytest.raises(ConfigError, match=r"train\.slices: the arguments of probe cannot be cut"):
        learn(probe, node, (torch.randn(SIZE, 1, SIZE), None), (torch.randn(SIZE, 2, SIZE), None))


def test_node_argument_unknown_while_learning_is_refused() -> None:
    probe, node, _, _ = streamed(slices=2)
    learn(probe, node, (torch.randn(1, SIZE), None), (torch.randn(2, SIZE), None))
    with pytest.raises(ConfigError, match=r"argument 1 of probe was not there in the first step"):
        probe(torch.randn(4, SIZE), torch.ones(4, SIZE))


def test_node_rows_not_divisible_by_slices_are_refused() -> None:
    probe, node, _, _ = streamed(slices=2)
    learn(probe, node, (torch.randn(1, SIZE), None), (torch.randn(2, SIZE), None))
    with pytest.raises(ConfigError, match=r"train\.slices is 2, but a group has 5 rows"):
        probe(torch.randn(5, SIZE))


# ---------------------------------------------------------------------- under a model


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_session_with_hugging_face_checkpointing_switched_on_gives_the_same_losses(
    activations: Any, tmp_path: Path
) -> None:
    train = TrainConfig(steps=2, batch=BATCH, activations=activations)
    losses = []
    for checkpointing in (False, True):
        with opened(exactness_config("tied"), tmp_path, PLACES["ram"], train) as session:
            for module in session.model.modules():
                if hasattr(module, "gradient_checkpointing"):
                    module.gradient_checkpointing = checkpointing  # type: ignore[assignment]
                    module._gradient_checkpointing_func = torch.utils.checkpoint.checkpoint  # type: ignore[assignment]
            losses.append([result.loss for result in run_steps(session, train, 2)])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("slices", [1, 2])
def test_session_router_logits_reach_the_auxiliary_loss_with_their_gradient(
    slices: int, activations: Any, tmp_path: Path
) -> None:
    """Without the captured outputs' gradients, a router would learn from the language loss alone."""
    config = tiny_config("qwen3_moe", num_hidden_layers=2, router_aux_loss_coef=10.0)
    train = TrainConfig(steps=1, batch=BATCH, slices=slices, activations=activations, beta1=0.0, clip=1e9)
    plain = plain_model(config)
    with opened(config, tmp_path, PLACES["ram"], train, source=ModelWeights(plain), compute_dtype="fp32") as session:
        [result] = run_steps(session, train, 1)
        found = read_parameters(session, Kind.EXP_AVG)
    [batch] = random_groups(train, config.vocab_size, 1)
    output = plain(**batch, use_cache=False)
    output.loss.backward()
    assert output.aux_loss > 0
    assert result.loss == pytest.approx(output.loss.item(), rel=1e-6)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        assert (found[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name


def test_session_steps_with_slices_learn_once(tmp_path: Path) -> None:
    train = TrainConfig(steps=3, batch=BATCH, slices=2)
    with opened(exactness_config("tied"), tmp_path, PLACES["ram"], train, fused_loss=True) as session:
        passes: list[str] = []
        begin = session.player.begin

        def record(name: str) -> None:
            passes.append(name)
            begin(name)

        session.player.begin = record  # type: ignore[method-assign]
        run_steps(session, train, 3)
    assert passes == ["evaluate", "evaluate", "train", "train", "train"]


def test_session_learning_draws_no_random_numbers(tmp_path: Path) -> None:
    """Else a loop that begins anew, which learns again, would draw other dropout than the first one."""
    train = TrainConfig(steps=3, batch=BATCH, slices=2)
    states = []
    with opened(exactness_config("tied"), tmp_path, PLACES["ram"], train, seed=None) as session:
        for step in (1, 2):
            torch.manual_seed(5)
            session.engine.train_step(step, 0.0, random_groups(train, 160, 1))
            states.append(torch.get_rng_state())
    assert torch.equal(states[0], states[1])


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_session_after_a_step_no_activation_or_gradient_survives(activations: Any, tmp_path: Path) -> None:
    train = TrainConfig(steps=9, batch=BATCH, groups=3, slices=2, activations=activations)
    counts = []
    with opened(exactness_config("moe"), tmp_path, PLACES["nvme"], train) as session:
        seen: list[weakref.ref[Tensor]] = []
        layer = session.model.get_decoder().layers[0]
        layer.register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
        for step in (1, 2, 3):
            session.engine.train_step(step, 1e-3, random_groups(train, 160, step))
            session.player.drain()
            session.player.take_events()
            gc.collect()
            counts.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))
            assert seen
            assert all(reference() is None for reference in seen)
    assert counts[2] <= counts[1]
