from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine_call_arguments import hands_on
from tiny_gradients import padded_batch, streamed_gradients
from tiny_models import tiny_config
from tiny_runs import BATCH, PLACES, ModelWeights, opened, plain_model
from torch import Tensor, nn
from transformers import AutoConfig, LlamaForCausalLM, PretrainedConfig

from megatier.config.schema import TrainConfig
from megatier.errors import UnsupportedModelError
from megatier.guards.unbound_weights import make_unbound
from megatier.guards.weight_changes import Unchanged, check_evaluates
from megatier.models.decoder import build_skeleton

WEIGHT = "model.layers.0.mlp.down_proj.weight"


def by_version(layer: Any) -> None:
    with torch.no_grad():
        layer.mlp.down_proj.weight.mul_(0.5)


def by_data(layer: Any) -> None:
    layer.mlp.down_proj.weight.data.mul_(0.5)


def by_replacing(layer: Any) -> None:
    layer.mlp.down_proj.weight = nn.Parameter(torch.zeros_like(layer.mlp.down_proj.weight))


CHANGES = {"version": by_version, "data": by_data, "replacing": by_replacing}


def changing(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None], *, training: bool) -> None:
    def way(layer: nn.Module, hidden: Tensor, shared: Any) -> None:
        if layer.training == training:
            change(layer)

    hands_on(monkeypatch, way)


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("kind", CHANGES)
def test_weight_changed_in_a_forward_of_training_is_refused(
    kind: str, activations: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing(monkeypatch, CHANGES[kind], training=True)
    config = tiny_config("llama")
    source = ModelWeights(plain_model(config))
    with pytest.raises(UnsupportedModelError, match=f"^model.layers.0 changes the weight {WEIGHT} in its forward"):
        streamed_gradients(config, tmp_path, source, activations)


@pytest.mark.parametrize("kind", CHANGES)
def test_weight_changed_in_a_forward_of_evaluation_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing(monkeypatch, CHANGES[kind], training=False)
    config = tiny_config("llama")
    with opened(config, tmp_path, PLACES["ram"], TrainConfig(steps=1, batch=BATCH), tokens=24) as session:
        session.engine.train_step(1, 0.0, [padded_batch()])
        with pytest.raises(UnsupportedModelError, match=f"model.layers.0 changes the weight {WEIGHT}"):
            session.engine.evaluate([padded_batch()])


def test_weight_changed_in_place_under_autograd_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changing(monkeypatch, lambda layer: layer.mlp.down_proj.weight.mul_(0.5), training=True)
    config = tiny_config("llama")
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0 changes a weight or an argument in place"):
        streamed_gradients(config, tmp_path, ModelWeights(plain_model(config)))


def test_weight_replaced_between_forwards_is_refused(tmp_path: Path) -> None:
    config = tiny_config("llama")
    with opened(config, tmp_path, PLACES["ram"], TrainConfig(steps=1, batch=BATCH), tokens=24) as session:
        by_replacing(session.model.model.layers[0])
        with pytest.raises(UnsupportedModelError, match=f"model.layers.0 changes the weight {WEIGHT}"):
            session.engine.train_step(1, 0.0, [padded_batch()])


def test_weight_whose_own_bits_are_written_passes() -> None:
    weights = [torch.ones(3).data, torch.ones(4, dtype=torch.bfloat16).data]
    unchanged = Unchanged(["one", "two"], weights, by_bits=True)
    assert not unchanged.check("probe")
    weights[1].clamp_(-2, 2)
    assert unchanged.check("probe")
    weights[1].data.neg_()
    with pytest.raises(UnsupportedModelError, match="probe changes the weight two in its forward"):
        unchanged.check("probe")


# ---------------------------------------------------------------------- where it is not bound


def unbound(name: str = "layer.weight") -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(2, 2, device="meta"))
    make_unbound(parameter, torch.device("cpu"), torch.bfloat16, name)
    return parameter


def set_item(weight: Tensor) -> None:
    weight[0] = 1.0


def set_data(weight: Tensor) -> None:
    weight.data = torch.ones(2, 2)


OUTSIDE: dict[str, Callable[[Tensor], object]] = {
    "method": lambda w: w.div_(2),
    "operator": lambda w: w.__itruediv__(2),
    "data": lambda w: w.data.mul_(2),
    "detached": lambda w: w.detach().copy_(torch.ones(2, 2)),
    "list": lambda w: torch._foreach_mul_([w], 2.0),
    "out": lambda w: torch.add(torch.ones(2, 2), 1, out=w),
    "initialiser": lambda w: nn.init.normal_(w),
    "item": set_item,
    "set data": set_data,
}


@pytest.mark.parametrize("kind", OUTSIDE)
def test_unbound_weight_is_changed_in_no_way(kind: str) -> None:
    with (
        torch.no_grad(),
        pytest.raises(UnsupportedModelError, match=r"the weight layer\.weight is changed where it is"),
    ):
        OUTSIDE[kind](unbound())


def test_unbound_weight_can_be_looked_at_and_frozen() -> None:
    weight = unbound()
    assert weight.requires_grad_(False).data.dtype is torch.bfloat16
    assert weight.detach().device == torch.device("cpu")
    assert (weight.numel(), weight.shape, weight.is_meta, weight.grad) == (4, (2, 2), True, None)
    assert not weight.requires_grad


def rwkv(**options: Any) -> PretrainedConfig:
    sizes = {"vocab_size": 160, "hidden_size": 64, "attention_hidden_size": 64, "intermediate_size": 96}
    return AutoConfig.for_model("rwkv", **sizes, num_hidden_layers=4, context_length=64, **options)


def test_rwkv_that_rescales_its_weights_for_evaluation_is_refused(tmp_path: Path) -> None:
    config = rwkv(rescale_every=2)
    with opened(config, tmp_path, PLACES["ram"], TrainConfig(steps=1, batch=BATCH), tokens=24) as session:
        session.engine.train_step(1, 0.0, [padded_batch()])
        with pytest.raises(UnsupportedModelError, match=r"rwkv\.blocks\.0\.attention\.output\.weight .*_every: 0"):
            session.engine.evaluate([padded_batch()])


def test_rwkv_that_would_rescale_its_weights_is_refused_before_training() -> None:
    with pytest.raises(UnsupportedModelError, match=r"^rwkv would change weights in place .*_every: 0"):
        check_evaluates(build_skeleton(rwkv(), "sdpa"))
    check_evaluates(build_skeleton(rwkv(rescale_every=0), "sdpa"))
    check_evaluates(build_skeleton(tiny_config("llama"), "sdpa"))


def test_rwkv_that_rescales_nothing_is_evaluated_as_a_plain_model_is(tmp_path: Path) -> None:
    config = rwkv(rescale_every=0)
    plain = plain_model(config, "eager").eval()
    options: dict[str, Any] = {"source": ModelWeights(plain), "tokens": 24, "compute_dtype": "fp32"}
    with opened(config, tmp_path, PLACES["ram"], TrainConfig(steps=1, batch=BATCH), **options) as session:
        loss = session.engine.evaluate([padded_batch()])
    with torch.no_grad():
        assert loss == pytest.approx(plain(**padded_batch(), use_cache=False).loss.item(), rel=1e-6)


def test_model_that_changes_a_weight_outside_of_its_module_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = LlamaForCausalLM.forward

    def halving(self: Any, **kwargs: Any) -> Any:
        self.model.layers[1].mlp.down_proj.weight.data.mul_(0.5)
        return forward(self, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", halving)
    config = tiny_config("llama")
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1\.mlp\.down_proj\.weight is changed where it is"):
        streamed_gradients(config, tmp_path, ModelWeights(plain_model(config)))
