"""Parameters that stay in fp32 beside bf16 are trained as plain torch trains them, with the same bits on any tier."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from crossed import some
from safetensors.torch import load_file
from streamed_loops import TIERS
from test_checkpoint_checkpoint import go_on_elsewhere
from tiny_gradients import BATCH, TOKENS, attention_of, far, padded_batch
from tiny_models import IN_FP32, known_config
from tiny_runs import (
    PLACES,
    ModelWeights,
    Run,
    exactness_config,
    opened,
    outcome,
    plain_model,
    read_parameters,
    run_in_fresh_process,
    run_steps,
)
from torch import Tensor
from transformers import PreTrainedModel

import megatier
from megatier.config.schema import TrainConfig
from megatier.errors import UnsupportedModelError
from megatier.models.export import export
from megatier.models.frozen_parameters import freeze
from megatier.models.weights import SafetensorsFolder
from megatier.session.session import Session
from megatier.tier import Kind

ALL_BUT_ROUTERS = ("*", "!*.gate.weight")
RUNS: dict[str, tuple[Run, dict[str, str]]] = {
    "clipped": (Run(model="routers"), {"ram": "keep", "ram_streamed": "offload", "nvme": "recompute"}),
    "groups in slices": (Run(model="routers", groups=3, slices=2), {"gpu": "recompute", "gpu_ram_nvme": "offload"}),
    "updates in the backward": (Run(model="routers", groups=3, clip=None), {"gpu": "keep", "nvme": "offload"}),
    "experts in parts": (Run(model="routers", slices=2, expert_parts=3), {"gpu_ram": "keep", "nvme": "recompute"}),
}
"""Runs that change numbers, each with places and activation policies, which must not."""
BF16: dict[str, Any] = {"compute_dtype": "bf16", "tokens": TOKENS}


@pytest.fixture
def ernie(tmp_path: Path) -> PreTrainedModel:
    """A tiny ERNIE as Hugging Face loads it in bf16. Its routers are fp32, with a bias in each that is not trained."""
    config = known_config("ernie4_5_moe", **IN_FP32["ernie4_5_moe"])
    source = plain_model(config, attention_of(config))
    source.save_pretrained(tmp_path / "model")
    loaded: PreTrainedModel = type(source).from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    loaded.train()
    return loaded


def routers_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if name.endswith("gate.weight")}


def grads_of(model: PreTrainedModel) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


# ---------------------------------------------------------------------- against plain torch


def alone(model: PreTrainedModel, mount: Path, train: TrainConfig) -> AbstractContextManager[Session]:
    """A session with the weights of a model, of which the routers alone are trained."""
    options: dict[str, Any] = {"source": ModelWeights(model), "frozen": ALL_BUT_ROUTERS, **BF16}
    return opened(model.config, mount, PLACES["ram"], train, **options)


def test_routers_are_trained_as_torchs_adamw_trains_fp32_parameters(ernie: PreTrainedModel, tmp_path: Path) -> None:
    freeze(ernie, ALL_BUT_ROUTERS)
    optimizer = torch.optim.AdamW([p for p in ernie.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    train = TrainConfig(steps=3, batch=BATCH, clip=None, weight_decay=0.1, beta1=0.9, beta2=0.999)
    before = routers_of(ernie)
    assert {parameter.dtype for parameter in before.values()} == {torch.float32}

    with alone(ernie, tmp_path, train) as session:
        for step in (1, 2, 3):
            found = session.engine.train_step(step, 1e-2, [padded_batch()])
            loss = ernie(**padded_batch(), use_cache=False).loss
            loss.backward()
            assert found.grad_norm == pytest.approx(torch.nn.utils.get_total_norm(grads_of(ernie)).item(), rel=1e-5)
            optimizer.step()
            optimizer.zero_grad()
            assert found.loss == (loss.item() if step == 1 else pytest.approx(loss.item(), rel=1e-5))
        masters = read_parameters(session, Kind.WEIGHT)

    after = routers_of(ernie)
    assert far({name: masters[name] for name in after}, after, 1e-6) == {}
    assert far(before, after, 1e-2).keys() == after.keys()


def test_step_too_small_for_bf16_shows_in_the_next_forward(ernie: PreTrainedModel, tmp_path: Path) -> None:
    freeze(ernie, ALL_BUT_ROUTERS)
    batch = padded_batch()
    with torch.no_grad():
        for name in routers_of(ernie):
            weight = ernie.get_parameter(name)
            weight.copy_(torch.where(weight > 0, 1.5, -1.5))

    before = routers_of(ernie)
    train = TrainConfig(steps=2, batch=BATCH, clip=None)
    with alone(ernie, tmp_path, train) as session:
        first = session.engine.train_step(1, 1e-3, [batch]).loss
        masters = read_parameters(session, Kind.WEIGHT)
        second = session.engine.train_step(2, 1e-3, [batch]).loss

    assert first == ernie(**batch, use_cache=False).loss.item()
    with torch.no_grad():
        for name, old in before.items():
            assert not torch.equal(masters[name], old)
            assert torch.equal(masters[name].bfloat16(), old.bfloat16())
            ernie.get_parameter(name).copy_(masters[name])
    assert second == ernie(**batch, use_cache=False).loss.item() != first


# ---------------------------------------------------------------------- on any tier


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "groups in slices")) for name in RUNS]
)
def test_routers_in_fp32_have_the_same_bits_on_any_tier_and_under_any_policy(name: str, tmp_path: Path) -> None:
    run, settings = RUNS[name]
    first, *others = (replace(run, place=place, activations=how)(tmp_path) for place, how in settings.items())
    assert [other == first for other in others] == [True] * len(others)


@pytest.mark.parametrize("place", [pytest.param("ram", marks=pytest.mark.slow), "nvme"])
def test_frozen_routers_keep_their_fp32_bits_and_change_none_of_the_others(
    place: str, ernie: PreTrainedModel, tmp_path: Path
) -> None:
    train = TrainConfig(steps=2, batch=6, groups=2, weight_decay=0.1)
    outcomes = []
    for where, activations in (("gpu", "keep"), (place, "recompute")):
        policy = replace(train, activations=activations)  # type: ignore[arg-type]
        options: dict[str, Any] = {"source": ModelWeights(ernie), "frozen": ("*.gate",), "compute_dtype": "bf16"}
        with opened(ernie.config, tmp_path, PLACES[where], policy, **options) as session:
            outcomes.append(outcome(session, run_steps(session, policy, 2)))
            masters = read_parameters(session, Kind.WEIGHT)
        assert all(torch.equal(masters[name], weight) for name, weight in routers_of(ernie).items())
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(("before", "after"), some([("ram", "nvme"), ("gpu_ram_nvme", "gpu")], by=2))
def test_run_with_routers_in_fp32_goes_on_from_a_checkpoint_to_the_same_bits(
    before: str, after: str, tmp_path: Path
) -> None:
    go_on_elsewhere(Run(model="routers"), before, after, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("name", RUNS)
def test_routers_in_fp32_on_cuda_have_the_same_bits_on_any_tier(name: str, compiles: bool, tmp_path: Path) -> None:
    run = replace(RUNS[name][0], device="cuda", compile=compiles)
    placed = [("gpu", "keep"), ("ram", "recompute"), ("ram_streamed", "offload"), ("nvme", "keep")]
    first, *others = run_in_fresh_process(
        [replace(run, place=place, activations=how) for place, how in placed], tmp_path
    )
    assert [other == first for other in others] == [True] * len(others)


# ---------------------------------------------------------------------- in and out of files


def test_export_has_the_dtypes_of_hugging_face_and_loads_as_it_was(ernie: PreTrainedModel, tmp_path: Path) -> None:
    train = TrainConfig(steps=1, batch=BATCH)
    with opened(ernie.config, tmp_path, PLACES["ram"], train, source=ModelWeights(ernie), **BF16) as session:
        session.engine.train_step(1, 1e-2, [padded_batch()])
        masters = read_parameters(session, Kind.WEIGHT)
        export(tmp_path / "out", session.model, session.own_units, session.read_master, torch.bfloat16, 1 << 30)
        session.load(SafetensorsFolder(tmp_path / "out", session.model))
        read_again = read_parameters(session, Kind.WEIGHT)

    ernie.save_pretrained(tmp_path / "plain")
    expected = {name: tensor.dtype for name, tensor in load_file(tmp_path / "plain" / "model.safetensors").items()}
    assert {
        name: tensor.dtype for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items()
    } == expected
    again = type(ernie).from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, masters[name].to(parameter.dtype))
        assert torch.equal(parameter.float(), read_again[name])


def test_stream_of_a_folder_trains_routers_in_fp32(ernie: PreTrainedModel, tmp_path: Path) -> None:
    ernie.save_pretrained(tmp_path / "mixed")
    batch = padded_batch()
    loss = ernie(**batch, use_cache=False).loss
    loss.backward()
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.0, "eps": 1.0, "clip": None, "fused_loss": False}
    # A plain model multiplies in bf16 on any processor; a streamed one in fp32 where bf16 has no instructions.
    with (
        patch("megatier.setup.machine.cpu_has_bf16", return_value=True),
        megatier.stream(tmp_path / "mixed", tiers=TIERS, **options) as streamed,
    ):
        found = streamed.model(**batch).loss
        found.backward()
        streamed.optimizer.step()
        masters = streamed.state_dict()

    assert found.item() == loss.item()
    for name, old in routers_of(ernie).items():
        # With eps of 1 and no moments, a step is lr g / (|g| + 1).
        grad = ernie.get_parameter(name).grad
        assert grad is not None
        assert torch.allclose(masters[name], old - 1e-2 * grad / (grad.abs() + 1), rtol=0, atol=1e-8)


def test_layer_that_is_called_without_what_is_lent_to_it_is_refused(tmp_path: Path) -> None:
    train = TrainConfig(steps=1, batch=BATCH)
    with opened(exactness_config("routers"), tmp_path, PLACES["ram"], train, compute_dtype="bf16") as session:
        layer = session.model.get_submodule("model.layers.1")
        if "gate.weight" not in (session.model._keep_in_fp32_modules_strict or ()):
            pytest.skip("this transformers keeps no router of GLM-4 in fp32, so none is lent")
        refused = pytest.raises(
            UnsupportedModelError, match=r"layers\.1 was called by itself, .* lends it .*gate\.weight"
        )
        rows = torch.zeros(1, 4, 32, dtype=torch.bfloat16)
        with refused, session.engine.evaluation("a layer"):
            places = session.model.get_submodule("model.rotary_emb")(rows, torch.arange(4)[None])
            layer(rows, position_embeddings=places)
