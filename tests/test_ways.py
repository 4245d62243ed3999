"""Ways to run a forward or a backward, or a part of one: each gives what a plain model gives, or is refused by name."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from crossed import crossed
from plain_adamw import PlainAdamW
from streamed_loops import TIERS, same
from tiny_runs import exactness_config, one_thread, plain_model
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import megatier
from megatier.engine.replay import GPU_SETTINGS
from megatier.errors import StreamedModelError, UnsupportedModelError
from megatier.integrations.streamed import Streamed

POLICIES = ("keep", "recompute")
RATE = 1e-2
NOTHING = contextlib.nullcontext()

Way = Callable[[Any], list[Tensor]]
"""Forwards and backwards of one step of a model; returns what they gave."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@functools.cache
def model_given(attention: str = "eager") -> PreTrainedModel:
    return plain_model(exactness_config("tied"), attention)


def opened(activations: Any, **options: Any) -> Streamed:
    settings: dict[str, Any] = {"compute_dtype": "fp32", "fused_loss": False, "attention": "eager", **options}
    model = model_given(settings["attention"])
    device: Any = torch.get_default_device().type
    tiers = replace(TIERS, device=device)
    settings["compile"] = False
    return megatier.stream(model, tiers=tiers, clip=None, weight_decay=0.1, activations=activations, **settings)


def ids(seed: int = 0) -> Tensor:
    found = torch.randint(3, 160, (2, 8), generator=torch.Generator().manual_seed(seed), device="cpu")
    return found.to(torch.get_default_device())


def embedded(seed: int = 0) -> Tensor:
    found = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(seed), device="cpu")
    return found.to(torch.get_default_device()).requires_grad_()


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


def plain_steps_of(way: Way, num_steps: int, attention: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    model = copy.deepcopy(model_given(attention)).train()
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
    expected, parameters = plain_steps_of(way, num_steps, options.get("attention", "eager"))
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(found)
    assert [name for name, value in parameters.items() if not torch.equal(value, weights[name])] == []


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


# ---------------------------------------------------------------------- contexts


class Halved(TorchFunctionMode):
    """A mode that changes what an operator does."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        return result / 2 if function is functional.silu else result


@contextlib.contextmanager
def switched(put: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    put(value)
    try:
        yield
    finally:
        put(before)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "sdpa": lambda: sdpa_kernel(SDPBackend.MATH),
    "order of sdpa": lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True),
    "default dtype": lambda: switched(torch.set_default_dtype, torch.float64, torch.float32),
    "device": lambda: torch.device("cpu"),
    "device meta": lambda: torch.device("meta"),
    "deterministic": lambda: switched(torch.use_deterministic_algorithms, True, False),
    "threads": lambda: switched(torch.set_num_threads, 2, 1),
    "flops": lambda: FlopCounterMode(display=False),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "one thread": lambda: torch.autograd.set_multithreading_enabled(False),
    "precision": lambda: switched(torch.set_float32_matmul_precision, "medium", "highest"),
    "mode": Halved,
}
NOT_AGAIN = {
    ("precision", "forward"),
    ("precision", "backward"),
    ("mode", "forward"),
    # torch takes a mode of functions away while that handles `loss.backward()`.
    ("mode", "both"),
}
"""Contexts that cannot be restored where a forward runs again."""


@pytest.mark.parametrize(
    ("kind", "around", "activations"),
    crossed(CONTEXTS, ["forward", "backward", "both"], POLICIES, by=min(3, len(POLICIES))),
)
def test_way_in_a_context_gives_what_a_plain_model_gives(kind: str, around: str, activations: str) -> None:
    def way(model: Any) -> list[Tensor]:
        context = CONTEXTS[kind]()
        apart = contextlib.nullcontext()
        with context if around == "both" else apart:
            with context if around == "forward" else apart:
                torch.manual_seed(1)
                loss: Tensor = model(input_ids=ids(), labels=ids()).loss
            with context if around == "backward" else apart:
                loss.backward()
        return [loss.detach()]

    if kind == "device meta" and around != "backward":
        pytest.skip("Hugging Face's forward makes its positions there")
    refusal = "run again" if (kind, around) in NOT_AGAIN and activations == "recompute" else ""
    if kind == "flops" and (around == "both" or (around, activations) == ("backward", "recompute")):
        refusal = "FlopCounterMode"
    with pytest.raises(StreamedModelError, match=refusal) if refusal else contextlib.nullcontext():
        check_right(way, activations, 1, attention="sdpa")


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_setting_of_reductions_is_put_back_with_both_its_values(kind: str) -> None:
    setting = next(setting for setting in GPU_SETTINGS if setting.name == f"reductions of {kind} products")
    assert setting.put is not None
    before = setting.get()
    name = f"allow_{kind}_reduced_precision_reduction"
    setattr(torch.backends.cuda.matmul, name, (False, False))
    try:
        inside = setting.get()
        setting.put(before)
        assert setting.get() == before != inside
        setting.put(inside)
        assert setting.get() == inside
    finally:
        setting.put(before)


def in_another_thread(model: Any) -> list[Tensor]:
    torch.manual_seed(1)
    loss: Tensor = model(input_ids=ids(), labels=ids()).loss
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return [loss.detach()]


def part_of_the_losses(model: Any) -> list[Tensor]:
    torch.manual_seed(1)
    logits = model(input_ids=ids()).logits
    losses = functional.cross_entropy(logits.flatten(0, 1), ids().flatten(), reduction="none")
    losses[3:9].sum().backward()
    return [losses.detach()]


def evaluating_before_the_backward(model: Any) -> list[Tensor]:
    torch.manual_seed(1)
    loss: Tensor = model(input_ids=ids(), labels=ids()).loss
    model.eval()
    loss.backward()
    model.train()
    return [loss.detach()]


def module_switched(model: Any) -> list[Tensor]:
    torch.manual_seed(1)
    model.model.layers[1].self_attn.eval()
    loss: Tensor = model(input_ids=ids(), labels=ids()).loss
    model.train()
    loss.backward()
    return [loss.detach()]


def inference(model: Any) -> list[Tensor]:
    torch.manual_seed(1)
    with torch.inference_mode():
        found: Tensor = model(input_ids=ids()).logits.sum()
    return [found.clone(), trained(model)]


def checkpointed_and_entered_again(model: Any) -> list[Tensor]:
    torch.manual_seed(1)
    x = embedded()
    loss: Tensor = checkpoint(lambda x: model(inputs_embeds=x, labels=ids()).loss, x, use_reentrant=True)
    loss.backward()
    return [loss.detach()]


def functional_call(model: Any) -> list[Tensor]:
    torch.manual_seed(1)
    outputs = torch.func.functional_call(model, {}, kwargs={"input_ids": ids(), "labels": ids()})
    outputs.loss.backward()
    return [outputs.loss.detach()]


@pytest.mark.parametrize("activations", POLICIES)
@pytest.mark.parametrize(
    "way",
    [
        in_another_thread,
        part_of_the_losses,
        evaluating_before_the_backward,
        module_switched,
        inference,
        checkpointed_and_entered_again,
        functional_call,
    ],
)
def test_way_of_a_loop_gives_what_a_plain_model_gives(way: Way, activations: str) -> None:
    check_right(way, activations)


def under_hooks(model: Any) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.half(), lambda x: x.float()):
        trained(model)


def saved_on_the_cpu(model: Any) -> None:
    with torch.autograd.graph.save_on_cpu():
        trained(model)


def without_hooks(model: Any) -> None:
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        trained(model)


def checkpointed(model: Any) -> None:
    checkpoint(lambda x: model(inputs_embeds=x, labels=ids()).loss, embedded(), use_reentrant=False).backward()


def transformed(model: Any) -> None:
    torch.func.grad(lambda x: loss_of(model, x))(embedded().detach())


def mapped(model: Any) -> None:
    torch.func.vmap(lambda x: model(inputs_embeds=x[None]).logits)(embedded().detach())


def dual(model: Any) -> None:
    with forward_ad.dual_level():
        model(inputs_embeds=forward_ad.make_dual(embedded().detach(), torch.ones(2, 8, 32)))


def other_weights(model: Any) -> None:
    weights = {"model.norm.weight": torch.ones(32)}
    torch.func.functional_call(model, weights, kwargs={"input_ids": ids(), "labels": ids()}).loss.backward()


UNDER_REFUSED: dict[Callable[[Any], None], str] = {
    under_hooks: "hooks on saved tensors",
    saved_on_the_cpu: "hooks on saved tensors",
    without_hooks: "hooks on saved tensors",
    checkpointed: "hooks on saved tensors",
    transformed: r"torch\.func",
    mapped: r"torch\.func",
    dual: "forward-mode",
    other_weights: r"model\.norm\.weight",
}


@pytest.mark.parametrize("activations", POLICIES)
@pytest.mark.parametrize("way", UNDER_REFUSED)
def test_way_past_the_nodes_is_refused_and_the_model_goes_on(way: Callable[[Any], None], activations: str) -> None:
    with opened(activations) as streamed:
        with pytest.raises((StreamedModelError, UnsupportedModelError), match=UNDER_REFUSED[way]):
            way(streamed.model)
        streamed.abandon()
        trained(streamed.model)
        streamed.optimizer.step()


def test_way_forward_with_tangents_and_without_gradients_gives_those_of_a_plain_model() -> None:
    def tangent(model: Any) -> Tensor:
        with torch.no_grad(), forward_ad.dual_level():
            x = forward_ad.make_dual(embedded().detach(), torch.ones(2, 8, 32))
            found: Tensor = forward_ad.unpack_dual(model.eval()(inputs_embeds=x).logits).tangent
            return found.clone()

    with opened("keep") as streamed:
        assert torch.equal(tangent(streamed.model), tangent(copy.deepcopy(model_given())))


# ---------------------------------------------------------------------- layers that change what they are given


class Changing(nn.Module):
    """The activation of an MLP, which does something else as well."""

    def __init__(self, change: Callable[[nn.Module], object]) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        return functional.silu(x)


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "counts in a buffer": (lambda module: module.seen.add_(1), r"changes its buffer .*seen"),
    "replaces a buffer": (lambda module: setattr(module, "seen", module.seen + 1), r"changes its buffer .*seen"),
    "draws from Python": (lambda _: random.random(), "draws random numbers from Python"),
    "draws from numpy": (lambda _: numpy.random.rand(), "draws random numbers from numpy"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_way_of_a_layer_that_changes_more_than_its_result_is_refused_where_it_runs_again(kind: str) -> None:
    change, message = CHANGES[kind]
    for activations in POLICIES:
        with opened(activations) as streamed:
            streamed.model.model.layers[1].mlp.act_fn = Changing(change)
            with pytest.raises(UnsupportedModelError, match=message) if activations != "keep" else NOTHING:
                trained(streamed.model)


class GoingOn(nn.Module):
    """The activation of an MLP, which goes on from one forward to the next past buffers and known generators."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.count = kind, 0
        self.last = torch.ones(())
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        result = functional.silu(x)
        match self.kind:
            case "attribute":
                self.count += 1
                return result * self.count
            case "tensor":
                result, self.last = result * self.last, result.detach().mean()
                return result
            case _:
                return result * torch.rand((), generator=self.generator)


@pytest.mark.parametrize("kind", ["attribute", "tensor", "generator"])
def test_way_of_a_layer_that_gives_other_numbers_when_it_runs_again_is_refused_and_plain_where_it_does_not(
    kind: str,
) -> None:
    def change(model: Any) -> None:
        model.model.layers[1].mlp.act_fn = GoingOn(kind)

    for activations in POLICIES:
        with opened(activations) as streamed:
            change(streamed.model)
            refused = pytest.raises(UnsupportedModelError, match=r"layers\.1 gave other numbers when it ran again")
            with refused if activations != "keep" else NOTHING:
                trained(streamed.model)
            streamed.abandon()

    def way(model: Any) -> list[Tensor]:
        change(model)
        return [trained(model)]

    check_right(way, "keep")


@pytest.mark.parametrize("activations", POLICIES)
def test_way_of_a_layer_that_changes_an_argument_in_place_is_plain_or_refused(
    activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward: Callable[..., Tensor] = LlamaDecoderLayer.forward

    def counting(self: Any, hidden_states: Tensor, *args: Any, position_ids: Tensor, **kwargs: Any) -> Tensor:
        result = forward(self, hidden_states, *args, position_ids=position_ids, **kwargs)
        result = result * (1 + 0.01 * position_ids[..., None])
        position_ids.add_(1)
        return result

    monkeypatch.setattr(LlamaDecoderLayer, "forward", counting)
    refused = pytest.raises(UnsupportedModelError, match=r"model\.layers\.0, \(1, 8\), was changed in place by its")
    with refused if activations == "recompute" else NOTHING:
        check_right(lambda model: [trained(model)], activations)


def test_way_of_a_loop_that_changes_an_argument_before_the_backward_is_refused_where_it_is_used_again() -> None:
    mask = torch.ones(2, 8, dtype=torch.long)
    found = []
    for activations in POLICIES:
        with opened(activations) as streamed:
            positions = torch.arange(8)[None]
            torch.manual_seed(0)
            loss = streamed.model(input_ids=ids(), labels=ids(), position_ids=positions, attention_mask=mask).loss
            positions.add_(1)
            refused = pytest.raises(UnsupportedModelError, match="in place between its forward and its backward")
            with refused if activations == "recompute" else NOTHING:
                loss.backward()
                found.append(streamed.grad_norm())
            streamed.abandon()
    assert len(found) == 1


@pytest.mark.parametrize("place", ["inside", "layer", "everywhere"])
def test_way_by_a_hook_in_a_layer_is_named_once_if_the_layer_runs_again(place: str) -> None:
    calls = []

    def hook(module: nn.Module, _: Any, output: Any) -> None:
        calls.append(module)

    for activations, times in (("keep", 1), ("recompute", 2)):
        calls.clear()
        with contextlib.ExitStack() as stack:
            streamed = stack.enter_context(opened(activations))
            layer = streamed.model.model.layers[1]
            hooked = {"inside": layer.mlp, "layer": layer, "everywhere": layer.mlp}[place]
            register = nn.modules.module.register_module_forward_hook
            handle = register(hook) if place == "everywhere" else hooked.register_forward_hook(hook)
            stack.callback(handle.remove)
            told = place != "layer" and activations == "recompute"
            name = r"model\.layers\.1\.mlp" if place == "inside" else r"model\.layers\.0\.\*"
            with pytest.warns(UserWarning, match=rf"called twice|{name}") if told else NOTHING:
                trained(streamed.model)
            streamed.optimizer.step()
            trained(streamed.model)
            assert calls.count(hooked) == 2 * (times if place != "layer" else 1)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hook_on_the_gradient_of_a_weight_of_a_given_model_is_refused_by_name(kind: str) -> None:
    model = copy.deepcopy(model_given())
    getattr(model.get_parameter("model.norm.weight"), kind)(print)
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight has a hook"):
        megatier.stream(model, tiers=TIERS)
