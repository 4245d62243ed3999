"""Adapters over a frozen base give the numbers of PEFT over plain transformers, on any tier."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crossed import some
from tiny_adapters import ATTENTION, check_gradients_of_peft, check_steps_of_peft, peft_model
from tiny_models import tiny_config
from tiny_runs import (
    KIB,
    MIB,
    PLACES,
    SMALL,
    ModelWeights,
    Outcome,
    opened,
    outcome,
    read_parameters,
    run_steps,
)

from megatier.config.lora import LoraConfig
from megatier.config.schema import TrainConfig
from megatier.tier import Kind, Tier

CASES: dict[str, tuple[str, dict[str, Any], LoraConfig]] = {
    "llama": ("llama", {"attention_dropout": 0.2}, LoraConfig(rank=4, dropout=0.1)),
    "tied": ("llama_tied", {}, LoraConfig(rank=3, alpha=7.0, targets=("q_proj", "v_proj", "down_proj"))),
    "qwen2": ("qwen2", {}, LoraConfig(rank=4, rslora=True)),
    "fused": ("phi3", {}, LoraConfig(rank=4)),
    "gemma": ("gemma2", {}, LoraConfig(rank=2, dropout=0.3)),
    "moe": ("qwen3_moe", {}, LoraConfig(rank=4, targets=ATTENTION)),
    "mixtral": ("mixtral", {}, LoraConfig(rank=4, targets=ATTENTION)),
    "transposed": ("gpt2", {}, LoraConfig(rank=4)),
    "head": ("llama", {}, LoraConfig(rank=4, targets=("q_proj", "embed_tokens", "lm_head"))),
    "saved": ("llama", {}, LoraConfig(rank=4, targets=("v_proj",), modules_to_save=("lm_head", "model.norm"))),
    "dora": ("llama", {}, LoraConfig(rank=4, dora=True)),
    "recurrent": ("qwen3_5_text", {}, LoraConfig(rank=4)),
}


POLICIES = ("keep", "recompute", "offload")
ROOMY = {
    # The adapters of a layer take 32,768 elements of each plane that is updated, and weights are slots beside them.
    "ram": PLACES["ram"],
    "gpu": PLACES["gpu"],
    "ram_streamed": replace(PLACES["ram_streamed"], gpu=4 * MIB),
    "nvme": PLACES["nvme"],
    "nvme_twice": PLACES["nvme_twice"],
    "gpu_ram_nvme": replace(PLACES["gpu_ram_nvme"], gpu=500 * KIB, ram=32 * KIB),
}


@pytest.mark.parametrize(
    ("case", "name", "activations"),
    [
        *((case, list(ROOMY)[number % len(ROOMY)], POLICIES[number % 3]) for number, case in enumerate(CASES)),
        *some([("llama", name, "keep") for name in list(ROOMY)[1:]], by=3),
    ],
)
def test_adapters_take_three_steps_like_peft_over_a_plain_model_bit_for_bit(
    case: str, name: str, activations: Any, tmp_path: Path
) -> None:
    family, options, lora = CASES[case]
    config = tiny_config(family, **options)
    train = TrainConfig(steps=3, batch=6, clip=0.5, weight_decay=0.1, activations=activations)
    check_steps_of_peft(config, lora, ROOMY[name], train, tmp_path)


CONFIG = tiny_config("llama", **SMALL, vocab_size=6336, num_hidden_layers=4, attention_dropout=0.2)
LORA = LoraConfig(rank=4, dropout=0.1)


def trained_on(name: str, mount: Path, train: TrainConfig, **options: Any) -> Outcome:
    """Four steps; what moved is what the placement demands."""
    place = ROOMY[name]
    with opened(CONFIG, mount, place, train, **options) as session:
        assert {tier for tier, size in session.placement.state_bytes.items() if size} == {Tier(t) for t in place.tiers}
        before = session.store.moved_bytes.copy()
        results = run_steps(session, train, 4)
        session.player.drain()
        assert session.store.moved_bytes - before == session.player.demanded
        return outcome(session, results)


@pytest.mark.parametrize(
    ("groups", "clip", "names", "moments"),
    [
        pytest.param(1, 0.5, tuple(ROOMY), "fp32", id="all"),
        pytest.param(3, None, ("ram", "nvme", "gpu_ram_nvme"), "fp32", id="groups-unclipped", marks=pytest.mark.slow),
        pytest.param(1, 0.5, ("ram", "nvme", "gpu"), "bf16", id="moments in bf16", marks=pytest.mark.slow),
    ],
)
def test_adapters_in_bf16_give_the_same_bits_on_any_tier(
    groups: int, clip: float | None, names: tuple[str, ...], moments: Any, tmp_path: Path
) -> None:
    source = ModelWeights(peft_model(CONFIG, LORA))
    found = {}
    for index, name in enumerate(names):
        policy: Any = POLICIES[index % 3]
        train = TrainConfig(steps=5, batch=6, clip=clip, weight_decay=0.1, groups=groups, activations=policy)
        train = replace(train, moments=moments)
        found[name] = trained_on(name, tmp_path, train, lora=LORA, source=source)
    assert [name for name, result in found.items() if result != found["ram"]] == []
    assert len(set(found["ram"].losses)) == 4


def test_adapters_beside_experts_in_parts_give_the_bits_of_whole_layers(tmp_path: Path) -> None:
    config = tiny_config("qwen3_moe")
    lora = LoraConfig(rank=4)
    source = ModelWeights(peft_model(config, LoraConfig(rank=4, targets=ATTENTION)))
    train = TrainConfig(steps=2, batch=6, clip=0.5)
    found = []
    for parts in (1, 2):
        with opened(config, tmp_path, PLACES["ram"], train, source=source, lora=lora, expert_parts=parts) as session:
            results = run_steps(session, train, 2)
            found.append((results[0].loss, read_parameters(session, Kind.EXP_AVG).keys()))
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.parametrize("compiles", [False, True])
def test_adapters_on_a_gpu_give_the_same_bits_on_any_tier(compiles: bool, tmp_path: Path) -> None:
    source = ModelWeights(peft_model(CONFIG, LORA))
    train = TrainConfig(steps=5, batch=6, clip=0.5, weight_decay=0.1)
    options: dict[str, Any] = {"lora": LORA, "source": source, "device": "cuda", "compile": compiles}
    found = [trained_on(name, tmp_path, train, **options) for name in ROOMY]
    assert found == [found[0]] * len(ROOMY)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "name", "activations"),
    [("llama", "ram", "keep"), ("tied", "gpu", "recompute"), ("dora", "nvme", "offload"), ("saved", "ram", "keep")],
)
def test_adapters_on_a_gpu_have_the_gradients_of_peft_over_a_plain_model_bit_for_bit(
    case: str, name: str, activations: Any, tmp_path: Path
) -> None:
    family, options, lora = CASES[case]
    check_gradients_of_peft(tiny_config(family, **options), lora, ROOMY[name], activations, tmp_path, "cuda")


def test_adapters_beside_a_head_that_is_trained_whole_have_a_fused_loss(tmp_path: Path) -> None:
    lora = LoraConfig(rank=4, targets=("v_proj",), modules_to_save=("lm_head",))
    source = ModelWeights(peft_model(CONFIG, lora))
    train = TrainConfig(steps=3, batch=6, clip=0.5, weight_decay=0.1, beta1=0.0)
    losses, grads = [], []
    for fused in (False, True):
        options: dict[str, Any] = {"lora": lora, "source": source, "compute_dtype": "fp32", "fused_loss": fused}
        with opened(CONFIG, tmp_path, PLACES["ram"], train, **options) as session:
            assert session.engine.model.fuses_loss == fused
            losses.append(run_steps(session, train, 1)[0].loss)
            grads.append(read_parameters(session, Kind.EXP_AVG))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert "lm_head.modules_to_save.default.weight" in grads[0]
    for name, expected in grads[0].items():
        assert (grads[1][name] - expected).norm() <= 1e-4 * expected.norm(), name

    found = [trained_on(name, tmp_path, train, lora=lora, source=source, fused_loss=True) for name in ("ram", "nvme")]
    assert found[0] == found[1]
