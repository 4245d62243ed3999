"""megatier.stream of models with frozen parameters: given or named, told apart, and refused where nothing is left."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny_runs import MIB, exactness_config, plain_model, random_groups

import megatier
from megatier.config.schema import TiersConfig, TrainConfig
from megatier.errors import CheckpointError, ConfigError, UnsupportedModelError
from megatier.integrations.streamed import Streamed
from megatier.models.frozen_parameters import freeze

TIERS = TiersConfig(device="cpu", gpu=8 * MIB, ram=8 * MIB, update_threads=2, io_threads=2)
TRAIN = TrainConfig(steps=5, batch=6)


def loop_losses(streamed: Streamed, steps: Sequence[int]) -> list[float]:
    losses = []
    for step in steps:
        (batch,) = random_groups(TRAIN, 160, step)
        torch.manual_seed(step)
        loss = streamed.model(**batch).loss
        loss.backward()
        streamed.optimizer.step()
        losses.append(loss.item())
    return losses


def test_stream_freezes_what_requires_no_gradient_or_is_named(tmp_path: Path) -> None:
    model = plain_model(exactness_config("tied"))
    patterns = ("model.layers.0", "*.k_proj")
    with megatier.stream(model, tiers=TIERS, lr=1e-2, frozen=patterns) as named:
        freeze(model, patterns)
        with megatier.stream(model, tiers=TIERS, lr=1e-2) as streamed:
            trained = [p for group in streamed.optimizer.param_groups for p in group["params"]]
            assert len(trained) == sum(p.requires_grad for p in model.parameters())
            assert loop_losses(streamed, (1, 2)) == loop_losses(named, (1, 2))
            found = streamed.state_dict()
            streamed.save(tmp_path)
            later = loop_losses(streamed, (3,))
        named.restore(tmp_path)
        assert loop_losses(named, (3,)) == later
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], parameter.detach().bfloat16().float()) != parameter.requires_grad, name
    with (
        megatier.stream(model, tiers=TIERS, frozen=["!*.k_proj"]) as other,
        pytest.raises(CheckpointError, match="has no moments of"),
    ):
        other.restore(tmp_path)


def test_stream_refuses_a_model_of_which_nothing_is_trained() -> None:
    model = plain_model(exactness_config("tied")).requires_grad_(False)
    with pytest.raises(ConfigError, match="frozen: every parameter of this model is frozen"):
        megatier.stream(model, tiers=TIERS)
    with megatier.stream(model, tiers=TIERS, frozen=["!model.norm"]) as streamed:
        assert loop_losses(streamed, (1,))


def test_stream_refuses_a_module_around_a_model() -> None:
    model = plain_model(exactness_config("tied"))
    with pytest.raises(UnsupportedModelError, match="Sequential is no model of transformers"):
        megatier.stream(torch.nn.Sequential(model), tiers=TIERS)


@pytest.mark.parametrize("patterns", [("lm_head",), ("*", "!lm_head"), ("lm_head", "model.layers")])
def test_lent_head_beside_frozen_parameters_gives_the_gradients_of_the_head_itself(patterns: tuple[str, ...]) -> None:
    norms = []
    for is_lent in (False, True):
        (batch,) = random_groups(TRAIN, 2112, 1)
        model = plain_model(exactness_config("untied")).eval()
        with megatier.stream(model, tiers=TIERS, compute_dtype="fp32", fused_loss=False, frozen=patterns) as streamed:
            streamed.model.eval()
            head, inputs = streamed.model.lm_head, batch["input_ids"]
            with streamed.one_forward(), streamed.lent_head() if is_lent else contextlib.nullcontext():
                hidden = streamed.model.model(input_ids=inputs).last_hidden_state
                logits = hidden @ head.weight.t() if is_lent else head(hidden)
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs.flatten())
            loss.backward()
            norms.append(streamed.grad_norm())
            streamed.optimizer.step()
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
