"""The node alone: gradients with weights that come and go, and what goes through a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from one_node import SIZE, Probe, Shelf, streamed, streamed_gradients
from torch import Tensor, nn
from transformers import DynamicCache

from megatier.errors import StreamedModelError, UnsupportedModelError
from megatier.guards.crossing import FORWARDS_CHECKED
from megatier.tier import Phase


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


def test_node_interrupted_while_weights_are_bound_has_its_parameters_again() -> None:
    _, node, _, _ = streamed()
    interrupts = [KeyboardInterrupt()]

    class InterruptedOnce(dict[str, Any]):
        def __setitem__(self, name: str, value: object) -> None:
            super().__setitem__(name, value)
            if interrupts:
                raise interrupts.pop()

    node._places = [(InterruptedOnce(owner), name, tensor) for owner, name, tensor in node._places]
    before = [owner[name] for owner, name, _ in node._places]
    slots = [torch.zeros(1)] * (len(node._tensors_by_name) + len(node._lent))
    with pytest.raises(KeyboardInterrupt), node._bound(slots):
        pass
    assert all(owner[name] is one for (owner, name, _), one in zip(node._places, before, strict=True))
    with node._bound(slots):
        pass


def test_node_offloaded_input_leaves_and_comes_back() -> None:
    probe, _, shelf, _ = streamed("offload")
    output = probe(torch.randn(6, SIZE, requires_grad=True))
    assert shelf.stashed["unit"].shape == (6, SIZE)
    output.sum().backward()
    assert shelf.stashed == {}


# ---------------------------------------------------------------------- calls


@pytest.mark.parametrize("name", ["cache", "past_key_values", "past_key_value", "layer_past"])
def test_node_training_strips_caches_and_evaluation_keeps_them(name: str) -> None:
    probe, _, _, _ = streamed()
    cache = DynamicCache()
    probe(torch.randn(2, SIZE), use_cache=True, **{name: cache})
    with torch.no_grad():
        probe(torch.randn(2, SIZE), use_cache=True, **{name: cache})
    assert probe.calls[0] == {"rows": 2, "use_cache": False, name: None}
    assert probe.calls[1] == {"rows": 2, "use_cache": True, name: cache}
    cache.update(torch.ones(2, 1, 3, 4), torch.ones(2, 1, 3, 4), 0)
    with pytest.raises(StreamedModelError, match=f"{name} of .* holds a cache"):
        probe(torch.randn(2, SIZE), use_cache=True, **{name: cache})


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


# ---------------------------------------------------------------------- views of weights


class Views(Probe):
    """A probe that gives views of its own weights, in a way that a test chooses."""

    way: Callable[[Views, Tensor, Any], Any]
    left: Tensor
    left_inside: dict[str, Any]

    def forward(self, x: Tensor, shared: Any = None) -> Any:  # type: ignore[override]
        return self.way(self, x, shared)


def write_view(probe: Views, x: Tensor, shared: Any) -> Tensor:
    shared["given"] = (probe.shift, [probe.gain[1]])
    return x * 1.0


def leave_view(probe: Views, x: Tensor, shared: Any) -> Tensor:
    probe.left = probe.shift[1:]
    probe.left_inside = {"list": [probe.gain.t(), (probe.shift,)]}
    return x * 1.0


RESULTS: dict[str, tuple[Callable[[Views, Tensor, Any], Any], Callable[[Any, Any], list[Tensor]]]] = {
    "the weight": (lambda p, x, s: p.shift, lambda found, s: [found]),
    "expanded": (lambda p, x, s: p.shift.expand(x.shape), lambda found, s: [found]),
    "rows": (lambda p, x, s: (x * 1.0, p.gain[1:3].t()), lambda found, s: list(found)),
    "nested": (lambda p, x, s: (x * 1.0, ({"deep": [p.gain[:, 0]]}, None)), lambda f, s: [f[0], f[1][0]["deep"][0]]),
    "detached": (lambda p, x, s: (x * p.gain[0], p.shift.detach()), lambda found, s: list(found)),
    "in a container": (write_view, lambda found, s: [found, s["given"][0], s["given"][1][0]]),
}


def views(activations: str, way: Callable[[Views, Tensor, Any], Any]) -> tuple[Views, Views, Shelf]:
    """The same module behind a node and plain."""
    probe, _, shelf, weights = streamed(activations, kind=Views)
    plain = Views("cpu")
    plain.load_state_dict(weights)
    assert isinstance(probe, Views)
    probe.way = plain.way = way
    return probe, plain, shelf


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("result", RESULTS)
def test_node_result_that_is_a_view_of_a_weight_has_its_numbers_and_its_gradient(result: str, activations: str) -> None:
    way, get = RESULTS[result]
    probe, plain, shelf = views(activations, way)
    x = torch.randn(6, SIZE)
    for training in (True, False):
        shared: tuple[Any, Any] = ({}, {})
        with torch.set_grad_enabled(training):
            inputs = [x.clone().requires_grad_(training) for _ in shared]
            found, expected = (
                get(module(leaf, store), store)
                for module, leaf, store in zip((probe, plain), inputs, shared, strict=True)
            )
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert not any(tensor.isnan().any() for tensor in found)
        if training:
            for tensors in (found, expected):
                torch.stack([t.square().sum() for t in tensors if t.requires_grad]).sum().backward()

    for name, parameter in plain.named_parameters():
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert torch.equal(shelf.gradients()[name], wanted)


@pytest.mark.parametrize("training", [True, False])
def test_node_view_of_a_weight_that_is_left_in_an_attribute_has_its_numbers(training: bool) -> None:
    probe, plain, _ = views("recompute", leave_view)
    for _ in range(FORWARDS_CHECKED + 1):
        for module in (probe, plain):
            with torch.set_grad_enabled(training):
                module(torch.randn(6, SIZE))
        assert torch.equal(probe.left, plain.left)
        found, expected = probe.left_inside["list"], plain.left_inside["list"]
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1][0], expected[1][0])
