"""Frozen parameters cost no gradient and no state, and change no bit of what is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_config
from tiny_runs import (
    KIB,
    MIB,
    PLACES,
    SMALL,
    ModelWeights,
    Outcome,
    Place,
    one_thread,
    opened,
    outcome,
    plain_model,
    random_groups,
    read_parameters,
    run_steps,
)
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from megatier.config import NumericsConfig, TrainConfig
from megatier.models.decoder import find_units
from megatier.models.frozen import freeze
from megatier.store.blockfile import IoOptions
from megatier.store.layout import CHECKED_ELEMENTS, Layout
from megatier.store.tier import Kind, Tier

FROZEN = {
    "below": ("model.embed_tokens", "model.layers.0"),  # the backward ends above them
    "above": ("lm_head", "model.norm", "model.layers.1"),  # gradients pass through
    "inside": ("*", "!*.q_proj", "!*.down_proj", "!lm_head"),
    "mixed": ("model.embed_tokens", "model.layers.0.self_attn", "model.layers.1", "!model.layers.1.mlp.up_proj"),
}
CONFIG = tiny_config("llama", **SMALL, vocab_size=6336, num_hidden_layers=4, attention_dropout=0.2)
ROOMY = {
    # Trained parts of units have at least 32,768 elements.
    "gpu": PLACES["gpu"],
    "ram": PLACES["ram"],
    "ram_streamed": replace(PLACES["ram_streamed"], gpu=4 * MIB),
    "nvme": PLACES["nvme"],
    "nvme_twice": PLACES["nvme_twice"],
    "nvme_grads": PLACES["nvme_grads"],
    "ram_nvme": replace(PLACES["ram_nvme"], ram=140 * KIB),
    "ram_nvme_twice": Place(tiers=("ram", "nvme"), ram=280 * KIB, generations=2),
    "gpu_ram_nvme": replace(PLACES["gpu_ram_nvme"], gpu=900 * KIB, ram=140 * KIB),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def trained_on(place: Place, frozen: str, mount: Path, train: TrainConfig, **options: Any) -> Outcome:
    """Five steps; what moved is what the placement demands."""
    patterns = FROZEN.get(frozen, (frozen,))
    with opened(CONFIG, mount, place, train, frozen=patterns, **options) as session:
        held = {tier for tier, size in session.placement.state_bytes.items() if size}
        assert held == {Tier(name) for name in place.tiers}
        assert bool(session.placement.streamed) == bool(place.streamed and train.clip)
        before = session.store.moved_bytes.copy()
        results = run_steps(session, train, 4)
        session.player.drain()
        assert session.store.moved_bytes - before == session.player.demanded
        return outcome(session, results)


def settings(**changes: Any) -> TrainConfig:
    return TrainConfig(**{"steps": 5, "batch": 6, "clip": 0.5, "weight_decay": 0.1, **changes})


def test_layout_puts_frozen_tensors_behind_the_trained_ones() -> None:
    shapes = [("a", (3, 5)), ("b", (130,)), ("c", (2,))]
    assert Layout.of(shapes).trained == Layout.of(shapes)
    layout = Layout.of(shapes, {"a"})
    assert [(t.name, t.start) for t in layout.tensors] == [("b", 0), ("c", 256), ("a", CHECKED_ELEMENTS)]
    assert (layout.num_trained, layout.num_elements) == (CHECKED_ELEMENTS, CHECKED_ELEMENTS + 2048)
    assert [t.name for t in layout.trained.tensors] == ["b", "c"]
    whole = Layout.of(shapes, {"a", "b", "c"})
    assert (whole.num_trained, whole.num_elements, whole.trained.tensors) == (0, 2048, ())
    assert IoOptions().chunk_bytes == 2 * CHECKED_ELEMENTS


@pytest.mark.parametrize(("frozen", "groups"), [("below", 1), ("above", 3), ("inside", 1), ("mixed", 3)])
def test_frozen_run_gives_the_same_bits_on_any_tier(frozen: str, groups: int, tmp_path: Path) -> None:
    policies = ("keep", "recompute", "offload")
    found = {
        name: trained_on(place, frozen, tmp_path, settings(groups=groups, activations=policies[index % 3]))
        for index, (name, place) in enumerate(ROOMY.items())
        if groups == 1 or name != "nvme_grads"
    }
    assert [name for name, result in found.items() if result != found["ram"]] == []
    assert found["ram"] != trained_on(ROOMY["ram"], "model.norm", tmp_path, settings(groups=groups))


@pytest.mark.parametrize("frozen", ["below", "inside"])
def test_frozen_run_without_clipping_gives_the_same_bits_on_any_tier(frozen: str, tmp_path: Path) -> None:
    train = settings(clip=None, slices=2)
    names = ("gpu", "ram", "nvme", "gpu_ram_nvme")
    found = [trained_on(ROOMY[name], frozen, tmp_path, train, fused_loss=True) for name in names]
    assert found == [found[0]] * len(names)


def test_frozen_weights_stay_and_have_no_state(tmp_path: Path) -> None:
    patterns = FROZEN["mixed"]
    source = plain_model(CONFIG)
    freeze(source, patterns)
    train = settings()
    with opened(CONFIG, tmp_path, ROOMY["nvme_twice"], train, source=ModelWeights(source), frozen=patterns) as session:
        run_steps(session, train)
        weights, moments = read_parameters(session, Kind.WEIGHT), read_parameters(session, Kind.EXP_AVG)
        units = {unit.name: unit for unit in session.player.units.values()}
        assert units["model.embed_tokens"].num_trained == 0
        assert session.store.usage(Tier.NVME)
        homes = {kind for unit, kind in session.placement.homes if unit == "model.embed_tokens"}
        assert homes == {Kind.WEIGHT}
        assert "model.embed_tokens" not in session.placement.grad_homes
    for name, parameter in source.named_parameters():
        assert (name in moments) == parameter.requires_grad
        before = parameter.detach()
        if parameter.requires_grad:
            assert not torch.equal(weights[name], before)
        else:
            assert torch.equal(weights[name], before.bfloat16().float()), name


CASES = {
    "below": ("llama", ("model.embed_tokens", "model.layers.0")),
    "above": ("llama", ("lm_head", "model.layers.1")),
    "inside": ("llama", ("*", "!*.q_proj")),
    "tied": ("llama_tied", ("lm_head",)),
    "tied_alone": ("llama_tied", ("*", "!lm_head")),
    "router": ("qwen3_moe", ("*.gate", "model.embed_tokens")),
    "experts": ("qwen3_moe", ("*", "!*.gate")),
    "embeddings": ("gpt2", ("transformer.wpe", "*.bias")),
    "per_layer": ("gemma3n_text", ("*", "!model.embed_tokens_per_layer")),
}


def plain_gradients(
    config: PretrainedConfig, model: PreTrainedModel, train: TrainConfig
) -> tuple[float, dict[str, Tensor]]:
    (batch,) = random_groups(train, config.get_text_config().vocab_size, 1)
    torch.manual_seed(5)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    found = {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters() if p.requires_grad
    }
    return loss.item(), found


@pytest.mark.parametrize("case", CASES)
def test_gradients_beside_frozen_parameters_are_those_of_the_plain_model(case: str, tmp_path: Path) -> None:
    family, patterns = CASES[case]
    config = tiny_config(family)
    attention = str(getattr(config, "_attn_implementation", None) or "sdpa")
    model = plain_model(config, attention)
    freeze(model, patterns)
    train = TrainConfig(steps=1, batch=6, beta1=0.0, clip=1e9)
    loss, expected = plain_gradients(config, model, train)
    others = [] if case == "per_layer" else [("offload", "ram")]  # whose hidden states are four
    for activations, place in [("keep", "ram"), ("recompute", "ram_nvme"), *others]:
        run = replace(train, activations=activations)  # type: ignore[arg-type]
        options: dict[str, Any] = {"compute_dtype": "fp32", "source": ModelWeights(model), "frozen": patterns}
        place_ = replace(PLACES[place], ram=MIB)
        with opened(config, tmp_path, place_, run, attention=attention, **options) as session:
            (result,) = run_steps(session, replace(run, learning_rate=0.0), 1)
            found = read_parameters(session, Kind.EXP_AVG)
        assert result.loss == loss
        assert found.keys() == expected.keys()
        assert [name for name, grad in expected.items() if not torch.equal(found[name], grad)] == [], activations


def test_frozen_model_is_counted_by_what_is_trained(tmp_path: Path) -> None:
    train, patterns = settings(), FROZEN["below"]
    with opened(CONFIG, tmp_path, ROOMY["nvme"], train, frozen=patterns, numerics=NumericsConfig()) as session:
        units = session.player.units.values()
        state = session.placement.state_bytes[Tier.NVME]
        assert state == sum(2 * unit.num_elements + 10 * unit.num_trained for unit in units)
        trained = sum(unit.num_trained for unit in units)
        accesses, backward = [], []
        for number in (1, 2, 3):
            before = session.store.moved_bytes.copy()
            session.engine.train_step(number, 1e-2, random_groups(train, CONFIG.vocab_size, number))
            moved = session.store.moved_bytes - before
            accesses = session.player.accesses
            if number > 1:
                assert moved["ram_to_nvme"] == 12 * trained
                assert moved["gpu_to_ram"] == 2 * trained
        backward = [access.unit for access in accesses if access.phase == "backward"]
        assert backward == ["lm_head", "model.norm", *(f"model.layers.{number}" for number in (3, 2, 1))]


def test_units_of_a_model_whose_parameters_require_no_gradient_are_frozen() -> None:
    model = plain_model(CONFIG)
    model.model.embed_tokens.requires_grad_(False)  # type: ignore[union-attr]
    assert [unit.name for unit in find_units(model) if not unit.layout.num_trained] == ["model.embed_tokens"]
