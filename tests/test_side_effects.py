"""Layers, hooks and loops that change more than their result: a plain model's numbers, or a refusal by name."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from plain_ways import POLICIES, check_right, ids, opened, trained
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from megatier.errors import UnsupportedModelError

NOTHING = contextlib.nullcontext()


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
