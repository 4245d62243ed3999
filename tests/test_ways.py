"""Contexts and loops around a forward or a backward: each gives what a plain model gives, or is refused by name."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from crossed import crossed
from plain_ways import POLICIES, Way, check_right, embedded, ids, loss_of, model_given, opened, trained
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from megatier.engine.replay import _GPU_SETTINGS
from megatier.errors import StreamedModelError, UnsupportedModelError

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
    setting = next(setting for setting in _GPU_SETTINGS if setting.name == f"reductions of {kind} products")
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


# ---------------------------------------------------------------------- loops


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


# ---------------------------------------------------------------------- past the nodes


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
