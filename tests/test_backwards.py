"""Backwards that ask for gradients of inputs, of weights, or twice: those of a plain model, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_ways import POLICIES, Way, check_right, embedded, ids, loss_of, model_given, opened, trained
from streamed_loops import TIERS, same
from torch import Tensor

import megatier
from megatier.errors import StreamedModelError, UnsupportedModelError

# ---------------------------------------------------------------------- gradients of inputs


def saliency_first(model: Any) -> list[Tensor]:
    x = embedded()
    return [*torch.autograd.grad(loss_of(model, x), x), trained(model)]


def adversarial(model: Any) -> list[Tensor]:
    x = embedded()
    [slope] = torch.autograd.grad(loss_of(model, x), x)
    loss = loss_of(model, (x + 0.1 * slope.sign()).detach())
    loss.backward()
    return [slope, loss.detach()]


def several_attacks(model: Any) -> list[Tensor]:
    x = embedded()
    for seed in range(3):
        [slope] = torch.autograd.grad(loss_of(model, x, seed), x)
        x = (x + 0.1 * slope).detach().requires_grad_()
    loss_of(model, x).backward()
    return [x.detach()]


def saliency_of_the_same_graph(model: Any) -> list[Tensor]:
    x = embedded()
    loss = loss_of(model, x)
    first = torch.autograd.grad(loss, x, retain_graph=True)
    again = torch.autograd.grad(2 * loss, x, retain_graph=True)
    loss.backward()
    assert x.grad is not None
    return [*first, *again, x.grad]


def backward_of_inputs(model: Any) -> list[Tensor]:
    x = embedded()
    loss_of(model, x).backward(inputs=[x])
    assert x.grad is not None
    return [x.grad, trained(model)]


def gradient_of_a_layer(model: Any) -> list[Tensor]:
    torch.manual_seed(0)
    outputs = model(input_ids=ids(), labels=ids(), output_hidden_states=True)
    return [*torch.autograd.grad(outputs.loss, outputs.hidden_states[2]), trained(model)]


def backward_in_two_parts(model: Any) -> list[Tensor]:
    torch.manual_seed(0)
    outputs = model(input_ids=ids(), labels=ids(), output_hidden_states=True)
    middle = outputs.hidden_states[2]
    [slope] = torch.autograd.grad(outputs.loss, middle)
    middle.backward(slope)
    return [slope]


def vector_jacobian(model: Any) -> list[Tensor]:
    loss, found = torch.autograd.functional.vjp(lambda x: loss_of(model, x), embedded().detach())
    return [loss, found, trained(model)]


INPUTS = (
    saliency_first,
    adversarial,
    several_attacks,
    saliency_of_the_same_graph,
    backward_of_inputs,
    gradient_of_a_layer,
    backward_in_two_parts,
    vector_jacobian,
)


@pytest.mark.parametrize("activations", POLICIES)
@pytest.mark.parametrize("way", INPUTS)
def test_way_to_gradients_of_inputs_gives_what_a_plain_model_gives(way: Way, activations: str) -> None:
    check_right(way, activations)


@pytest.mark.gpu
@pytest.mark.parametrize("activations", POLICIES)
def test_ways_to_gradients_of_inputs_on_a_gpu_give_what_a_plain_model_gives(activations: str) -> None:
    with torch.device("cuda"):
        for way in INPUTS:
            plain = copy.deepcopy(model_given()).train().cuda()
            with opened(activations) as streamed:
                streamed.model.train()
                torch.testing.assert_close(way(streamed.model), way(plain), rtol=1e-4, atol=1e-6)
                streamed.optimizer.step()


@pytest.mark.parametrize("activations", POLICIES)
def test_ways_to_gradients_of_inputs_that_train_nothing_change_no_weight(activations: str) -> None:
    def losses(x: Tensor) -> Tensor:
        loss = loss_of(streamed.model, x)
        return torch.stack([loss, loss**2])

    x = embedded()
    plain = copy.deepcopy(model_given()).train()
    expected = torch.autograd.functional.jacobian(lambda x: loss_of(plain, x), x)
    with opened(activations, fused_loss=True) as streamed:
        streamed.model.train()
        before = streamed.state_dict()
        for _ in range(2):
            found = torch.autograd.functional.jacobian(losses, x)
            assert torch.allclose(found[0], expected, rtol=1e-5, atol=1e-7)
            torch.autograd.grad(loss_of(streamed.model, x), x)
        with pytest.raises(StreamedModelError, match=r"after 0 of 1 backwards.* gradients of inputs"):
            streamed.optimizer.step()
        streamed.abandon()
        assert same(streamed.state_dict(), before)
        trained(streamed.model)
        streamed.optimizer.step()
        assert not same(streamed.state_dict(), before)


# ---------------------------------------------------------------------- backwards that are refused


def twice(model: Any) -> None:
    loss = loss_of(model, embedded())
    loss.backward()
    loss.backward()


def inputs_twice(model: Any) -> None:
    x = embedded()
    loss = loss_of(model, x)
    torch.autograd.grad(loss, x)
    torch.autograd.grad(loss, x)


def trained_and_again_for_inputs(model: Any) -> None:
    x = embedded()
    loss = loss_of(model, x)
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, x)


def inside_of_a_backward(model: Any) -> None:
    x, other = embedded(), embedded(1)
    first, second = loss_of(model, x), loss_of(model, other)
    x.register_hook(lambda _: torch.autograd.grad(second, other)[0])
    (first + second).backward(retain_graph=True)


def double(model: Any) -> None:
    x = embedded()
    torch.autograd.grad(loss_of(model, x), x, create_graph=True)


def hessian(model: Any) -> None:
    torch.autograd.functional.hvp(
        lambda x: loss_of(model, x), embedded().detach(), torch.ones(2, 8, 32, device=ids().device)
    )


def gradients_of_weights(model: Any) -> None:
    torch.autograd.grad(loss_of(model, embedded()), list(model.parameters()), allow_unused=True)


def backward_of_weights(model: Any) -> None:
    loss_of(model, embedded()).backward(inputs=list(model.parameters()))


def part_cleared(model: Any) -> None:
    trained(model)
    model.model.zero_grad()


def around_cleared(model: Any) -> None:
    trained(model)
    torch.nn.Sequential(model).zero_grad()


def hook_on_several_weights(model: Any) -> None:
    torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), print)


def edge_of_a_weight(model: Any) -> None:
    torch.autograd.graph.get_gradient_edge(next(model.parameters())).node.register_hook(print)


REFUSED: dict[Callable[[Any], None], str] = {
    twice: "has had its backward|second time",
    inputs_twice: "second time",
    trained_and_again_for_inputs: "has had its backward",
    inside_of_a_backward: "no gradients of inputs inside of it",
    double: "create_graph=True",
    hessian: "create_graph=True",
    backward_of_weights: "lies on megatier's tiers",
    gradients_of_weights: "lies on megatier's tiers",
    part_cleared: "all of them or none",
    around_cleared: "all of them or none",
    hook_on_several_weights: "tiers",
    edge_of_a_weight: "tiers",
}


@pytest.mark.parametrize("fused_loss", [False, True])
@pytest.mark.parametrize("way", REFUSED)
def test_way_that_cannot_be_right_is_refused_and_the_model_goes_on(
    way: Callable[[Any], None], fused_loss: bool
) -> None:
    with opened("keep" if fused_loss else "recompute", fused_loss=fused_loss) as streamed:
        with pytest.raises((StreamedModelError, RuntimeError), match=REFUSED[way]):
            way(streamed.model)
            streamed.optimizer.step()
        streamed.abandon()
        trained(streamed.model)
        streamed.optimizer.step()


@pytest.mark.gpu
@pytest.mark.parametrize("fused_loss", [False, True])
def test_ways_that_cannot_be_right_are_refused_on_a_gpu(fused_loss: bool) -> None:
    with torch.device("cuda"):
        for way in REFUSED:
            test_way_that_cannot_be_right_is_refused_and_the_model_goes_on(way, fused_loss)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hook_on_the_gradient_of_a_weight_of_a_given_model_is_refused_by_name(kind: str) -> None:
    model = copy.deepcopy(model_given())
    getattr(model.get_parameter("model.norm.weight"), kind)(print)
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight has a hook"):
        megatier.stream(model, tiers=TIERS)
