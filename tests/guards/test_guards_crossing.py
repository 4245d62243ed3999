from __future__ import annotations

import re
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine_call_arguments import hands_on
from tiny_gradients import padded_batch, streamed_gradients
from tiny_models import tiny_config
from tiny_runs import BATCH, PLACES, ModelWeights, opened, plain_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from megatier.config.schema import TrainConfig
from megatier.errors import UnsupportedModelError
from megatier.guards.crossing import OutputCheck, check_inside, note_owner

LEFT: list[Tensor] = []
LAYERS: dict[int, nn.Module] = {}
CURRENT: ContextVar[Tensor] = ContextVar("current")


@pytest.fixture(autouse=True)
def _nothing_left() -> None:
    LEFT.clear()
    LAYERS.clear()


def number(layer: Any) -> int:
    return int(layer.self_attn.layer_idx)


def by_attribute(layer: nn.Module, hidden: Tensor, shared: Any) -> Tensor | None:
    LAYERS[number(layer)] = layer
    layer.left = hidden
    before = LAYERS.get(number(layer) - 1)
    return None if before is None else before.left  # type: ignore[return-value]


def by_global(layer: nn.Module, hidden: Tensor, shared: Any) -> Tensor | None:
    LEFT.append(hidden)
    return LEFT[-2] if len(LEFT) > 1 else None


def by_context(layer: nn.Module, hidden: Tensor, shared: Any) -> Tensor | None:
    before = CURRENT.get(None)
    CURRENT.set(hidden)
    return before if number(layer) else None


def by_bound_method(layer: nn.Module, hidden: Tensor, shared: Any) -> Tensor | None:
    """What is called is no container."""
    before = shared.last
    shared(hidden)
    return before  # type: ignore[no-any-return]


class Called:
    last: Tensor | None = None

    def __call__(self, tensor: Tensor) -> None:
        self.last = tensor


UNKNOWN = "it comes by no attribute of a module, so by a closure, a global or a context variable"
WAYS: dict[str, tuple[Callable[..., Any], Callable[[], Any], str]] = {
    "attribute": (by_attribute, lambda: None, "model.layers.0.left (4, 24, 64)"),
    "global": (by_global, lambda: None, UNKNOWN),
    "context": (by_context, lambda: None, UNKNOWN),
    "callable": (by_bound_method, Called, UNKNOWN),
}


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("kind", WAYS)
def test_tensor_that_comes_into_a_layer_past_its_arguments_is_refused_at_the_first_step(
    kind: str, activations: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    way, make, name = WAYS[kind]
    hands_on(monkeypatch, way)
    config = tiny_config("llama")
    source = ModelWeights(plain_model(config))
    message = f"model.layers.1 computes with a tensor .* none of its arguments: {re.escape(name)}"
    with pytest.raises(UnsupportedModelError, match=f"{message}, made in the forward of model.layers.0"):
        streamed_gradients(config, tmp_path, source, activations, batch={**padded_batch(), "shared": make()})


def test_tensor_that_comes_into_a_frozen_layer_past_its_arguments_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = torch.ones(64, requires_grad=True)
    hands_on(monkeypatch, lambda layer, hidden, shared: outside)
    config = tiny_config("llama")
    source, frozen = ModelWeights(plain_model(config)), ["model.embed_tokens", "model.layers.0"]
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0 computes with a tensor .*, made outside of it"):
        streamed_gradients(config, tmp_path, source, frozen=frozen)


def test_tensor_left_by_the_step_before_is_refused_at_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_state(layer: Any, hidden: Tensor, shared: Any) -> Tensor | None:
        before, layer.state = getattr(layer, "state", None), hidden
        return before

    hands_on(monkeypatch, by_state)
    train = TrainConfig(steps=2, batch=BATCH)
    config = tiny_config("llama")
    with opened(config, tmp_path, PLACES["ram"], train, tokens=24) as session:
        session.engine.train_step(1, 0.0, [padded_batch()])
        with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0 .* made in the forward of model\.layers\.0"):
            session.engine.train_step(2, 0.0, [padded_batch()])


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_tensor_that_the_model_takes_from_a_layer_past_its_results_is_refused(
    activations: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(layer: nn.Module, hidden: Tensor, shared: Any) -> None:
        layer.left = hidden

    forward = LlamaForCausalLM.forward

    def adding(self: Any, **kwargs: Any) -> Any:
        output = forward(self, **kwargs)
        output.loss = output.loss + self.model.layers[2].left.square().mean()
        return output

    hands_on(monkeypatch, leave)
    monkeypatch.setattr(LlamaForCausalLM, "forward", adding)
    config = tiny_config("llama")
    source = ModelWeights(plain_model(config))
    message = r"LlamaForCausalLM computes with a tensor that model\.layers\.2 made .*: model\.layers\.[0-3]\.left"
    with pytest.raises(UnsupportedModelError, match=message):
        streamed_gradients(config, tmp_path, source, activations)


def test_graph_that_ends_in_leaves_of_its_own_passes() -> None:
    own = note_owner(torch.ones(2, requires_grad=True), "probe")
    outputs = [None, own * 2, torch.ones(1)]
    check_inside("probe", outputs, [own], nn.Module())
    check_outputs = OutputCheck(nn.Module())
    check_outputs([torch.ones(2, requires_grad=True).exp()])
    with pytest.raises(UnsupportedModelError, match="Module computes with a tensor that probe made"):
        check_outputs(outputs)
    check_outputs(outputs)
