"""Ways to run a forward or a backward, or a part of one: each gives what a plain model gives, or is refused by name."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from plain_adamw import PlainAdamW
from streamed_loops import TIERS, same
from tiny_runs import exactness_config, one_thread, plain_model
from torch import Tensor
from transformers import PreTrainedModel

import megatier
from megatier.errors import StreamedModelError, UnsupportedModelError
from megatier.integrations.streamed import Streamed

POLICIES = ("keep", "recompute")
RATE = 1e-2

Way = Callable[[Any], list[Tensor]]
"""Forwards and backwards of one step of a model; returns what they gave."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@functools.cache
def model_given() -> PreTrainedModel:
    return plain_model(exactness_config("tied"), "eager")


def opened(activations: Any, **options: Any) -> Streamed:
    settings = {"compute_dtype": "fp32", "fused_loss": False, "clip": None, "weight_decay": 0.1, "attention": "eager"}
    return megatier.stream(model_given(), tiers=TIERS, activations=activations, **{**settings, **options})


def ids(seed: int = 0) -> Tensor:
    return torch.randint(3, 160, (2, 8), generator=torch.Generator().manual_seed(seed))


def embedded(seed: int = 0) -> Tensor:
    return torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def loss_of(model: Any, x: Tensor, seed: int = 0) -> Tensor:
    """The loss with given embeddings; dropout draws by the seed."""
    torch.manual_seed(seed)
    loss: Tensor = model(inputs_embeds=x, labels=ids()).loss
    return loss


def trained(model: Any, seed: int = 1) -> Tensor:
    """A forward and a backward of tokens, as a step has them."""
    torch.manual_seed(seed)
    loss: Tensor = model(input_ids=ids(seed), labels=ids(seed)).loss
    loss.backward()
    return loss.detach()


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


def steps_of(streamed: Streamed, way: Way, num_steps: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """What a way gives in each step, and the weights after them."""
    streamed.model.train()
    found = []
    for _ in range(num_steps):
        for group in streamed.optimizer.param_groups:
            group["lr"] = RATE
        found += way(streamed.model)
        streamed.optimizer.step()
        streamed.optimizer.zero_grad()
    return found, streamed.state_dict()


def plain_steps_of(way: Way, num_steps: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    model = copy.deepcopy(model_given()).train()
    optimizer = PlainAdamW(model, None)
    found = []
    for step in range(1, num_steps + 1):
        found += way(model)
        # What has no gradient is not updated, as in torch.
        absent = [(parameter, parameter.clone()) for parameter in model.parameters() if parameter.grad is None]
        optimizer.step(step, RATE)
        with torch.no_grad():
            for parameter, value in absent:
                parameter.copy_(value)
    return found, dict(model.named_parameters())


def check_right(way: Way, activations: str, num_steps: int = 2, **options: Any) -> None:
    """A way gives the bits of a plain model: when it is recorded, and when it is played."""
    with opened(activations, **options) as streamed:
        found, weights = steps_of(streamed, way, num_steps)
    expected, parameters = plain_steps_of(way, num_steps)
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(found)
    assert [name for name, value in parameters.items() if not torch.equal(value, weights[name])] == []


@pytest.mark.parametrize("activations", POLICIES)
@pytest.mark.parametrize("way", INPUTS)
def test_way_to_gradients_of_inputs_gives_what_a_plain_model_gives(way: Way, activations: str) -> None:
    check_right(way, activations)


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
    torch.autograd.functional.hvp(lambda x: loss_of(model, x), embedded().detach(), torch.ones(2, 8, 32))


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


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hook_on_the_gradient_of_a_weight_of_a_given_model_is_refused_by_name(kind: str) -> None:
    model = copy.deepcopy(model_given())
    getattr(model.get_parameter("model.norm.weight"), kind)(print)
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight has a hook"):
        megatier.stream(model, tiers=TIERS)
