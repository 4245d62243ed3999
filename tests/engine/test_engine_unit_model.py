"""Nodes in a Hugging Face model: its losses, its random numbers, and what survives a step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection
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
    opened,
    plain_model,
    random_groups,
    read_parameters,
    run_steps,
)
from torch import Tensor

from megatier.config.schema import TrainConfig
from megatier.tier import Kind


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

        def record(name: str, text_groups: Collection[int] = ()) -> None:
            passes.append(name)
            begin(name, text_groups)

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


@pytest.mark.gpu
def test_batch_with_an_expanded_tensor_is_moved_to_the_gpu(tmp_path: Path) -> None:
    """Positions of images in packed rows may be one row for three axes."""
    positions = torch.arange(8).expand(3, 2, 8)
    train = TrainConfig(steps=1, batch=BATCH)
    options: dict[str, Any] = {"device": "cuda", "compile": False}
    with opened(exactness_config("tied"), tmp_path, PLACES["ram"], train, **options) as session:
        [moved] = session.engine.model.on_device({"position_ids": positions}).values()
    assert moved.is_cuda
    assert torch.equal(moved.cpu(), positions)
