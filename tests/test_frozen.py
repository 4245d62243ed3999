"""Frozen parameters cost no gradient and no state, and change no bit of what is trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crossed import some
from safetensors.torch import load_file
from small_commands import after_step, command
from small_commands import outcome as outcome_of
from small_setups import elsewhere
from small_timelines import RATES
from tiny_gradients import attention_of, plain_gradients, streamed_gradients
from tiny_models import tiny_config
from tiny_runs import (
    KIB,
    MIB,
    PLACES,
    SMALL,
    ModelWeights,
    Outcome,
    Place,
    opened,
    outcome,
    plain_model,
    random_groups,
    read_parameters,
    run_steps,
)
from transformers import AutoModelForCausalLM

from megatier.checkpoint.savepoint import drop_savepoint, save_savepoint
from megatier.cli import main
from megatier.config.data_section import DataConfig
from megatier.config.schema import ModelConfig, NumericsConfig, RunConfig, TiersConfig, TrainConfig
from megatier.drives.blockfile import IoOptions
from megatier.errors import ConfigError
from megatier.layout import CHECKED_ELEMENTS, Layout
from megatier.models.decoder import find_units
from megatier.models.frozen_parameters import freeze
from megatier.planner.plan import make_plan
from megatier.schedule.budgets import Budgets
from megatier.setup.skeleton import skeleton_of
from megatier.tier import Kind, Tier

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
    assert IoOptions().granule_bytes == 2 * CHECKED_ELEMENTS


FEW = ("ram", "nvme", "gpu_ram_nvme")
MORE = (*FEW, "gpu")
SUMMED = tuple(name for name in ROOMY if name != "nvme_grads")


@pytest.mark.parametrize(
    ("frozen", "groups", "names"),
    [
        pytest.param("below", 1, FEW, id="below"),
        pytest.param("above", 1, FEW, id="above"),
        pytest.param("inside", 1, (*FEW, "ram_streamed", "nvme_twice"), id="inside"),
        pytest.param("inside", 1, tuple(ROOMY), id="inside-all-places", marks=pytest.mark.slow),
        pytest.param("mixed", 3, FEW, id="mixed"),
        *(pytest.param(frozen, 3, SUMMED, id=f"{frozen}-all", marks=pytest.mark.slow) for frozen in FROZEN),
    ],
)
def test_frozen_run_gives_the_same_bits_on_any_tier(
    frozen: str, groups: int, names: tuple[str, ...], tmp_path: Path
) -> None:
    policies = ("keep", "recompute", "offload")
    found = {
        name: trained_on(ROOMY[name], frozen, tmp_path, settings(groups=groups, activations=policies[index % 3]))
        for index, name in enumerate(names)
    }
    assert [name for name, result in found.items() if result != found["ram"]] == []
    assert found["ram"] != trained_on(ROOMY["ram"], "model.norm", tmp_path, settings(groups=groups))


@pytest.mark.parametrize(
    ("frozen", "names"),
    [("inside", FEW), *(pytest.param(frozen, MORE, marks=pytest.mark.slow) for frozen in ("below", "inside"))],
)
def test_frozen_run_without_clipping_gives_the_same_bits_on_any_tier(
    frozen: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    train = settings(clip=None, slices=2)
    found = [trained_on(ROOMY[name], frozen, tmp_path, train, fused_loss=True) for name in names]
    assert found == [found[0]] * len(names)


def test_frozen_weights_on_nvme_alone_need_no_slots_for_updates_and_give_the_same_bits(tmp_path: Path) -> None:
    where, patterns = Place(tiers=("gpu", "nvme"), gpu=100 * KIB), ("*", "!model.layers.0")
    with opened(CONFIG, tmp_path, where, settings(), frozen=patterns) as session:
        assert not session.placement.spilled
        assert {plan.kind for plan in session.placement.slots if plan.tier is Tier.RAM} == {Kind.WEIGHT}
        spilled = outcome(session, run_steps(session, settings(), 4))
    with opened(CONFIG, tmp_path, ROOMY["ram"], settings(), frozen=patterns) as session:
        assert outcome(session, run_steps(session, settings(), 4)) == spilled


@pytest.mark.gpu
@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_run_on_a_gpu_gives_the_same_bits_on_any_tier(frozen: str, tmp_path: Path) -> None:
    names = ("gpu", "ram", "ram_streamed", "nvme", "nvme_twice", "gpu_ram_nvme")
    options: dict[str, Any] = {"device": "cuda", "compile": False}
    found = [trained_on(ROOMY[name], frozen, tmp_path, settings(), **options) for name in names]
    assert found == [found[0]] * len(names)


@pytest.mark.parametrize("clip", [0.5, None])
def test_frozen_all_but_a_fused_head_moves_what_is_demanded(clip: float | None, tmp_path: Path) -> None:
    train = settings(clip=clip)
    with opened(CONFIG, tmp_path, ROOMY["nvme"], train, frozen=("*", "!lm_head"), fused_loss=True) as session:
        before = session.store.moved_bytes.copy()
        run_steps(session, train, 3)
        session.player.drain()
        assert session.store.moved_bytes - before == session.player.demanded
        assert session.player.demanded["gpu_to_ram"]


def test_frozen_weights_stay_and_have_no_state(tmp_path: Path) -> None:
    patterns = FROZEN["mixed"]
    source = plain_model(CONFIG)
    freeze(source, patterns)
    train = settings()
    with opened(CONFIG, tmp_path, ROOMY["nvme_twice"], train, source=ModelWeights(source), frozen=patterns) as session:
        run_steps(session, train)
        weights, moments = read_parameters(session, Kind.WEIGHT), read_parameters(session, Kind.EXP_AVG)
        units = {unit.name: unit for unit in session.blocks.units.values()}
        assert units["model.embed_tokens"].num_trained == 0
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


@pytest.mark.parametrize("case", some(CASES, by=2))
def test_gradients_beside_frozen_parameters_are_those_of_the_plain_model(case: str, tmp_path: Path) -> None:
    family, patterns = CASES[case]
    config = tiny_config(family)
    loss, expected, source = plain_gradients(config, attention_of(config), frozen=patterns)
    others = [] if case == "per_layer" else [("offload", "ram")]  # whose hidden states are four
    for activations, name in [("keep", "ram"), ("recompute", "ram_nvme"), *others]:
        place = replace(PLACES[name], ram=MIB)
        found_loss, found = streamed_gradients(config, tmp_path, source, activations, place=place, frozen=patterns)
        assert found_loss == loss
        assert found.keys() == expected.keys()
        assert [name for name, grad in expected.items() if not torch.equal(found[name], grad)] == [], activations


def test_frozen_model_is_counted_by_what_is_trained(tmp_path: Path) -> None:
    train, patterns = settings(), FROZEN["below"]
    with opened(CONFIG, tmp_path, ROOMY["nvme"], train, frozen=patterns, numerics=NumericsConfig()) as session:
        units = session.blocks.units.values()
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
    model.model.embed_tokens.requires_grad_(False)
    assert [unit.name for unit in find_units(model) if not unit.layout.num_trained] == ["model.embed_tokens"]


def test_frozen_run_updated_before_the_norm_is_known_gives_the_same_bits(tmp_path: Path) -> None:
    """Of two generations each has the frozen weights; one of the steps is clipped."""
    train = settings(clip=1e9)
    norms = trained_on(ROOMY["ram"], "inside", tmp_path, train).norms
    train = settings(clip=0.999 * max(norms))
    with opened(CONFIG, tmp_path, ROOMY["ram_nvme_twice"], train, frozen=FROZEN["inside"]) as session:
        found = outcome(session, run_steps(session, train, 4))
        assert session.speculation.outcomes["void"] == 1
        assert session.speculation.outcomes["confirmed"]
    assert found == trained_on(ROOMY["gpu"], "inside", tmp_path, train)


@pytest.mark.parametrize("generations", [2, 3])
def test_frozen_run_with_savepoints_gives_the_same_bits(generations: int, tmp_path: Path) -> None:
    train, results = settings(clip=1e9), []
    place = Place(tiers=("nvme",), generations=generations, savepoints=True)
    with opened(CONFIG, tmp_path, place, train, frozen=FROZEN["mixed"]) as session:
        for step in (1, 2, 3, 4):
            results.append(session.engine.train_step(step, 1e-2, random_groups(train, CONFIG.vocab_size, step)))
            session.player.drain()
            if step in (1, 3):
                save_savepoint(session, tmp_path / "savepoints", step, {})
        found = outcome(session, results)
        drop_savepoint(session, tmp_path / "savepoints")
    assert found == trained_on(ROOMY["ram"], "mixed", tmp_path, train)


@pytest.mark.parametrize(("fused", "activations"), [(False, "offload"), (True, "keep")])
@pytest.mark.parametrize(
    ("frozen", "place"), [("below", "ram_streamed"), ("above", "gpu_ram_nvme"), ("inside", "nvme"), ("mixed", "nvme")]
)
def test_plan_foretells_the_order_and_the_bytes_of_a_frozen_run(
    frozen: str, place: str, fused: bool, activations: str, tmp_path: Path
) -> None:
    train, patterns = TrainConfig(batch=6, activations=activations), FROZEN[frozen]  # type: ignore[arg-type]
    with opened(CONFIG, tmp_path, ROOMY[place], train, frozen=patterns, fused_loss=fused) as session:
        before: Counter[str] = Counter()
        for step in (1, 2, 3):
            before = session.player.demanded
            session.engine.train_step(step, 1e-2, random_groups(train, CONFIG.vocab_size, step))
        demanded = session.player.demanded - before
        order = tuple(session.player.accesses)
        budgets = Budgets(*(session.store.usage(tier)["budget"] for tier in (Tier.GPU, Tier.RAM, Tier.NVME)))
        placement, units = session.placement, session.own_units
    where = ROOMY[place]
    config = RunConfig(
        model=ModelConfig(config=CONFIG.to_dict(), fused_loss=fused, frozen=patterns),
        data=DataConfig(files=("python-stdlib",), tokenizer="bytes", sequence_length=16),
        tiers=TiersConfig(state=where.tiers, streamed_share=where.streamed),
        train=train,
    )
    plan = make_plan(elsewhere(config, RATES, budgets, compiles=False))
    assert plan.accesses == order
    assert plan.placement.homes == placement.homes
    assert plan.placement.activation_homes == placement.activation_homes
    assert plan.placement.other_bytes == placement.other_bytes
    assert Counter({queue: round(size) for queue, size in plan.forecast.moved_bytes.items()}) == demanded
    sizes = [(unit.layout.num_elements, unit.layout.num_trained) for unit in units]
    assert sum(plan.state_bytes.values()) == sum(2 * whole + 10 * trained for whole, trained in sizes)
    assert plan.num_trained < plan.num_parameters
    assert plan.space.checkpoint_bytes == 4 * plan.num_parameters + 8 * plan.num_trained
    assert (
        plan.compute_seconds
        < make_plan(
            elsewhere(
                config,
                RATES,
                budgets_for_all(budgets),
                compiles=False,
                model=skeleton_of(replace(config.model, frozen=())),
            )
        ).compute_seconds
    )


def budgets_for_all(budgets: Budgets) -> Budgets:
    return Budgets(budgets.gpu + 64 * MIB, budgets.ram + 64 * MIB, budgets.nvme + 64 * MIB)


# ---------------------------------------------------------------------- whole runs

RUN: dict[str, Any] = {
    "model.frozen": "model.embed_tokens,model.layers.0,*.k_proj,model.layers.1.mlp",
    "model.config.attention_dropout": 0.1,
    "output.export_dtype": "fp32",
    "train.steps": 5,
}
NVME: dict[str, Any] = {"tiers.state": "nvme", "tiers.gpu": "768KiB"}
SPREAD: dict[str, Any] = {"tiers.state": "ram,nvme", "tiers.ram": "2600KiB", "tiers.gpu": "768KiB"}


def ended_run(folder: Path, run: Mapping[str, Any], step: int = 4) -> Path:
    def end() -> None:
        raise ConfigError("ended by the test")

    folder.mkdir(exist_ok=True)
    (folder / "drive").mkdir(exist_ok=True)
    words = {**run, "tiers.nvme": f"{folder / 'drive'}:64MiB"}
    with after_step(step, end):
        assert main(command(folder, words)) == 2
    return folder / "run"


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_frozen_run_goes_on_from_checkpoints_and_savepoints_to_the_same_bits(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = {**RUN, "model.compute_dtype": dtype}
    (tmp_path / "whole").mkdir()
    assert main(command(tmp_path / "whole", run)) == 0
    assert "trained) in 6 units" in capsys.readouterr().out
    whole = outcome_of(tmp_path / "whole" / "run")

    saved = ended_run(tmp_path / "checkpoint", {**run, "output.checkpoint_every": 2})
    arrays = {path.name for path in (saved / "checkpoints" / "step-00000002" / "exp_avg").iterdir()}
    assert "model.layers.1.self_attn.q_proj.weight" in arrays
    assert not {"model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight"} & arrays
    assert main(["resume", str(saved), *(f"--{name}={value}" for name, value in SPREAD.items())]) == 0
    assert outcome_of(saved) == whole
    again = tmp_path / "exported"
    assert main(["export", str(saved), str(again), "--dtype", "fp32"]) == 0
    for name in ("model.safetensors", "config.json"):
        assert (again / name).read_bytes() == (saved / "model" / name).read_bytes()

    more = {**NVME, "output.savepoint_every": 2, "tiers.generations": 3}
    kept = ended_run(tmp_path / "savepoint", {**run, **more}, 5)
    assert " units spill to NVMe and are updated in the backward" in capsys.readouterr().out
    assert main(["resume", str(kept)]) == 0
    assert "savepoint step-00000004: weights and moments in place" in capsys.readouterr().out
    assert outcome_of(kept) == whole


def test_frozen_weights_are_those_that_the_run_began_with(tmp_path: Path) -> None:
    first = {"train.steps": 1, "train.learning_rate": 0, "output.export_dtype": "fp32"}
    assert main(command(tmp_path, {**first, "output.directory": str(tmp_path / "first")})) == 0
    start = tmp_path / "first" / "model"
    run = {**RUN, "model.path": str(start), "data.tokenizer": None, "model.config.attention_dropout": None}
    assert main(command(tmp_path, run)) == 0
    before = load_file(start / "model.safetensors")
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    same = {name for name in before if torch.equal(before[name], after[name])}
    model = AutoModelForCausalLM.from_pretrained(start)
    freeze(model, RUN["model.frozen"].split(","))
    assert same == {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def test_train_and_plan_refuse_a_pattern_that_names_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = command(tmp_path, {"model.frozen": "model.embed_token"})
    assert main(words) == 2
    assert "names no parameter of this model. Near it are model.embed_tokens" in " ".join(
        capsys.readouterr().err.split()
    )
    assert main(command(tmp_path, {"model.frozen": "*"})) == 2
    assert "nothing to train" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run" / "model").exists()


def test_resume_with_other_parameters_frozen_is_refused_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = ended_run(tmp_path, {**RUN, "output.checkpoint_every": 2})
    assert main(["resume", str(saved), "--model.frozen=model.embed_tokens"]) == 2
    assert "model.frozen was" in capsys.readouterr().err
    assert main(["resume", str(saved), "--model.frozen=model.embed_tokens", "--accept-changes"]) == 2
    assert "has no moments of model.layers.0" in " ".join(capsys.readouterr().err.split())
    everything = f"{RUN['model.frozen']},lm_head"
    assert main(["resume", str(saved), f"--model.frozen={everything}", "--accept-changes"]) == 0
