"""Experts in parts: the numbers of the plain model, the same bits on every tier, and smaller slots."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from crossed import some
from small_setups import sections
from tiny_gradients import Gradients, attention_of, exact_gradients, far, plain_gradients, streamed_gradients
from tiny_models import BASE, FUSED, IS_OLD, LATENT, tiny_config
from tiny_runs import (
    PLACES,
    Run,
    exactness_config,
    opened,
    outcome,
    run_in_fresh_process,
    run_steps,
)
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from megatier.config.schema import ModelConfig, NumericsConfig, TiersConfig, TrainConfig
from megatier.engine.expert_parts import check_knows_of_others
from megatier.errors import PlanError, UnsupportedModelError
from megatier.models.decoder import build_skeleton
from megatier.models.frozen_parameters import freeze
from megatier.models.initialiser import Initialiser
from megatier.session.session import Session
from megatier.setup.setup import Setup
from megatier.tier import Kind, Tier

NEAR = 1e-5
MOE = Run(model="moe", expert_parts=2)


def unlike(found: Gradients, expected: Gradients, config: PretrainedConfig) -> dict[str, float]:
    """Gradients that are not near the plain model's, and further from them than those are from the exact ones.

    Where the terms of a gradient cancel, fp32 is not as near to the exact sum: in one layer of Qwen3-Next those of
    `A_log` and `dt_bias` come to 2e-6, and the plain model's are 5e-3 off.
    """
    distances = far(found, expected, NEAR)
    if distances:
        exact = exact_gradients(config, attention_of(config))
        assert far(expected, exact, 1e-2) == {}
        rounding = far(expected, exact, 0.0)
        distances = {name: distance for name, distance in distances.items() if distance > rounding.get(name, 0.0)}
    return distances


def skip_if_refused(config: PretrainedConfig) -> None:
    """Older versions of transformers cannot compute some experts in parts; a test of its own shows the refusal."""
    for module in build_skeleton(config, attention_of(config)).modules():
        if IS_OLD and type(module).__name__.endswith("Experts"):
            try:
                check_knows_of_others(module)
            except UnsupportedModelError as refusal:
                pytest.skip(str(refusal))


@pytest.mark.parametrize("family", some(FUSED, by=3))
def test_family_in_parts_has_the_loss_and_nearly_the_gradients_of_the_plain_model(family: str, tmp_path: Path) -> None:
    """A token goes to two experts, whose outputs make the same sum in any parts: in the forward no bit changes."""
    config = tiny_config(family)
    skip_if_refused(config)
    loss, expected, source = plain_gradients(config, attention_of(config))
    for parts, activations in ((2, "keep"), (3, "recompute")):
        try:
            found_loss, found = streamed_gradients(config, tmp_path, source, activations, expert_parts=parts)
        except UnsupportedModelError as refusal:
            if IS_OLD and "all of its experts or none" in str(refusal):
                pytest.skip(str(refusal))
            raise
        assert found_loss == loss
        assert found.keys() == expected.keys()
        assert unlike(found, expected, config) == {}


@pytest.mark.parametrize("family", some(FUSED, by=3, first=1))
def test_family_in_parts_and_slices_has_nearly_the_gradients_of_the_plain_model(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    loss, expected, source = plain_gradients(config, attention_of(config))
    found_loss, found = streamed_gradients(config, tmp_path, source, slices=2, expert_parts=2)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert unlike(found, expected, config) == {}


KIMI: dict[str, Any] = {
    "text_config": {"model_type": "deepseek_v3", **BASE, **LATENT, "first_k_dense_replace": 1, "n_group": 2},
    "vision_config": {
        "patch_size": 4,
        "pos_emb_height": 4,
        "pos_emb_width": 4,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
    },
    "projection_hidden_size": 32,
    "image_token_id": 150,
    "video_token_id": 151,
    "vision_start_token_id": 152,
    "vision_end_token_id": 153,
    "tie_word_embeddings": False,
}


@pytest.mark.skipif("kimi_k25" not in CONFIG_MAPPING, reason="this transformers has no Kimi-K2.5")
def test_largest_layers_there_are_run_in_parts_inside_a_vision_language_model(tmp_path: Path) -> None:
    """A layer of Kimi-K2.5 has 11.5 billion parameters."""
    config = AutoConfig.for_model("kimi_k25", **KIMI)
    loss, expected, source = plain_gradients(config, "sdpa")
    found_loss, found = streamed_gradients(config, tmp_path, source, "recompute", expert_parts=3)
    assert found_loss == loss
    assert found.keys() == expected.keys()
    assert far(found, expected, NEAR) == {}


def test_router_in_parts_learns_from_the_auxiliary_loss_too(tmp_path: Path) -> None:
    gates = []
    for coefficient in (0.0, 0.5):
        config = tiny_config("qwen3_moe", router_aux_loss_coef=coefficient)
        loss, expected, source = plain_gradients(config, "sdpa")
        found_loss, found = streamed_gradients(config, tmp_path, source, expert_parts=2)
        assert found_loss == loss
        assert far(found, expected, NEAR) == {}
        gates.append(found["model.layers.0.mlp.gate.weight"])
    assert not torch.allclose(gates[0], gates[1], rtol=1e-2)


def test_experts_one_by_one_have_the_loss_of_the_plain_model(tmp_path: Path) -> None:
    config = tiny_config("qwen3_moe")
    loss, expected, source = plain_gradients(config, "sdpa")
    found_loss, found = streamed_gradients(config, tmp_path, source, expert_parts=8)
    assert found_loss == loss
    assert far(found, expected, NEAR) == {}


ACTIVATIONS = ("keep", "recompute", "offload")
PAIRS = [(place, ACTIVATIONS[(row + shift) % 3]) for shift in range(3) for row, place in enumerate(PLACES)]
"""Of every nine all places, and each policy with a third of them."""


MATRIX = [
    pytest.param(replace(MOE, steps=3), 11, id="bf16"),
    pytest.param(replace(MOE, steps=3, dtype="fp32", clip=None, groups=3), 11, id="fp32-unclipped-3x1"),
    pytest.param(replace(MOE, steps=3, groups=3, slices=2), 15, id="bf16-3x2"),
    pytest.param(replace(MOE, steps=3, expert_parts=3, fused_loss=True, clip=None), 11, id="bf16-unclipped-three"),
    pytest.param(MOE, 1, id="all", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("run", "every"), MATRIX)
def test_parts_give_the_same_bits_on_any_tier_with_any_activation_policy(run: Run, every: int, tmp_path: Path) -> None:
    pairs = [pair for pair in PAIRS if pair[0] != "nvme_grads" or (run.clip and run.groups == 1)][::every]
    found = {pair: replace(run, place=pair[0], activations=pair[1])(tmp_path) for pair in pairs}
    first = next(iter(found.values()))
    assert [pair for pair, result in found.items() if result != first] == []


FROZEN = {
    "layer": ("model.embed_tokens", "model.layers.0.mlp.experts"),
    "half": ("*.experts.down_proj", "*.self_attn"),
    "all but routers": ("*", "!*.mlp.gate"),
}


@pytest.mark.parametrize(
    ("frozen", "clip"),
    some([("all but routers", 0.5), ("layer", 0.5), ("half", None), ("all but routers", None)], by=2),
)
def test_parts_with_frozen_parameters_give_the_same_bits_on_any_tier(
    frozen: str, clip: float | None, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"expert_parts": 2, "frozen": FROZEN[frozen]}
    pairs: list[tuple[str, Any]] = [("gpu", "keep"), ("nvme", "recompute"), ("ram", "offload")]
    found = []
    for place, activations in pairs:
        train = TrainConfig(steps=4, batch=6, clip=clip, activations=activations, weight_decay=0.1)
        with opened(exactness_config("moe"), tmp_path, PLACES[place], train, **options) as session:
            found.append(outcome(session, run_steps(session, train, 4)))
    assert found[1:] == found[:2]


@pytest.mark.parametrize("frozen", FROZEN)
def test_parts_with_frozen_parameters_have_nearly_the_gradients_of_the_plain_model(frozen: str, tmp_path: Path) -> None:
    config = tiny_config("qwen3_moe")
    loss, expected, source = plain_gradients(config, "sdpa")
    skeleton = build_skeleton(config, "sdpa")
    freeze(skeleton, FROZEN[frozen])
    trained = {name: expected[name] for name, parameter in skeleton.named_parameters() if parameter.requires_grad}
    found_loss, found = streamed_gradients(config, tmp_path, source, expert_parts=2, frozen=FROZEN[frozen])
    assert found_loss == loss
    assert found.keys() == trained.keys()
    assert far(found, trained, NEAR) == {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")  # in transformers
def test_compiled_parts_give_the_same_bits_by_every_policy(tmp_path: Path) -> None:
    run = replace(MOE, compile=True)
    pairs = [("gpu", "keep"), ("nvme", "recompute"), ("ram_streamed", "offload")]
    results = [replace(run, place=place, activations=a)(tmp_path) for place, a in pairs]
    assert results[1:] == results[:2]
    assert results[0] != MOE(tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("compiles", [False, True])
def test_parts_on_cuda_give_the_same_bits_on_any_tier_with_any_activation_policy(
    compiles: bool, tmp_path: Path
) -> None:
    run = replace(MOE, device="cuda", compile=compiles, fused_loss=True)
    runs = [replace(run, place=place, activations=activations) for place, activations in PAIRS[::4]]
    first, *others = run_in_fresh_process(runs, tmp_path)
    assert [other for other in others if other != first] == []


def tiers(gpu: int) -> TiersConfig:
    return TiersConfig(device="cpu", gpu=gpu, ram=64 << 20, state=("ram",))


def session_of(gpu: int, parts: int, **options: Any) -> Session:
    skeleton = build_skeleton(tiny_config("qwen3_moe", moe_intermediate_size=96, **options), "sdpa")
    model = ModelConfig(config={"model_type": "qwen3_moe"}, expert_parts=parts)
    train = TrainConfig(steps=1, batch=2)
    return Session(Setup.here(sections(model, tiers(gpu), train, NumericsConfig(), 16), skeleton))


def test_layer_too_large_for_its_slots_is_refused_and_runs_in_the_parts_that_are_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"Or set model\.expert_parts to 4: then slots take part") as refused:
        session_of(400 << 10, 1)
    assert refused.value.what == "GPU slots for the largest unit, model.layers.0"
    with pytest.raises(PlanError, match=r"model\.expert_parts to 4"):
        session_of(400 << 10, 2)
    with session_of(400 << 10, 4) as session:
        session.load(Initialiser(session.model, 0))
        ids = torch.arange(32).view(2, 16)
        assert session.engine.train_step(1, 1e-3, [{"input_ids": ids, "labels": ids}]).loss > 0
        assert session.placement.other_bytes[Tier.GPU] <= 400 << 10


def test_parts_that_do_not_help_are_not_named() -> None:
    with pytest.raises(PlanError, match=r"at least [\d.]+ MiB\.$") as refused:
        session_of(4 << 10, 1)
    assert "expert_parts" not in str(refused.value)


def test_slots_of_parts_are_as_small_as_the_largest_part() -> None:
    sizes = []
    for parts in (1, 4):
        with session_of(8 << 20, parts, vocab_size=32) as session:
            [slots] = [plan for plan in session.placement.slots if (plan.tier, plan.kind) == (Tier.GPU, Kind.WEIGHT)]
            sizes.append(slots.slot_bytes)
            assert slots.slot_bytes == 2 * max(unit.layout.num_elements for unit in session.own_units)
    assert sizes[1] < sizes[0] / 3


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "read",
    [lambda gate, x: nn.functional.linear(x, gate.weight), lambda gate, x: x.float() @ gate.weight.float().T],
    ids="ab",
)
def test_router_that_is_read_past_its_own_forward_is_refused(
    read: Any, training: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = import_module("transformers.models.qwen3_moe.modeling_qwen3_moe").Qwen3MoeSparseMoeBlock
    forward = block.forward
    monkeypatch.setattr(block, "forward", lambda self, x: forward(self, x) + 0 * read(self.gate, x).sum())
    config = tiny_config("qwen3_moe")
    train = TrainConfig(steps=1, batch=2)
    batch = {"input_ids": torch.tensor([[5, 9]] * 2), "labels": torch.tensor([[5, 9]] * 2)}
    for parts in (1, 2):
        with opened(config, tmp_path, PLACES["ram"], train, expert_parts=parts) as session, ExitStack() as stack:
            if parts > 1:
                stack.enter_context(pytest.raises(UnsupportedModelError, match=r"outside of the module .*expert_parts"))
            if training:
                session.engine.train_step(1, 1e-3, [batch])
            else:
                session.engine.evaluate([batch])


@pytest.mark.parametrize("implementation", ["batched_mm", "eager"])
def test_parts_of_experts_that_do_not_know_of_others_are_refused(implementation: str) -> None:
    """As in transformers 5.17, where a product of all experts took the last one for those that are elsewhere."""
    experts: Any = nn.Linear(1, 1)
    experts.config = SimpleNamespace(_experts_implementation=implementation)
    with pytest.raises(UnsupportedModelError, match=r"all of its experts or none .*Set model.expert_parts to 1"):
        check_knows_of_others(experts)
    experts._is_expert_parallel = False
    check_knows_of_others(experts)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_parts_to_which_no_token_is_sent_have_gradients_of_zero(implementation: str, tmp_path: Path) -> None:
    """What a product leaves unset is NaN in the deterministic mode."""
    config = tiny_config("qwen3_moe", output_router_logits=False)
    config._experts_implementation = implementation
    skip_if_refused(config)
    ids = torch.tensor([[5, 9]] * 4)
    source = plain_gradients(config, "sdpa")[2]
    torch.use_deterministic_algorithms(True)
    batch = {"input_ids": ids, "labels": ids}
    results = [streamed_gradients(config, tmp_path, source, batch=batch, expert_parts=parts) for parts in (1, 8)]
    (loss, expected), (found_loss, found) = results
    assert found_loss == loss
    assert far(found, expected, NEAR) == {}
    experts = found["model.layers.0.mlp.experts.down_proj"].flatten(1).any(1)
    assert 2 <= int(experts.sum()) <= 4
