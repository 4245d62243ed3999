"""The search for settings: as good as trying everything, and inside the memory there is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from crossed import some
from small_setups import elsewhere

from megatier.config.data_section import DataConfig
from megatier.config.schema import ModelConfig, RunConfig, TiersConfig, TrainConfig
from megatier.errors import PlanError
from megatier.planner import search as searching
from megatier.planner import trial as trials
from megatier.planner.search import GPU_MARGIN, LEAST_GAIN, search
from megatier.planner.trial import Trial
from megatier.schedule.budgets import Budgets
from megatier.schedule.drive_rates import DriveRates
from megatier.schedule.rates import Rates
from megatier.schedule.world import World
from megatier.setup import setup as setups
from megatier.setup.skeleton import skeleton_of

MIB = 1 << 20
LLAMA = {"model_type": "llama", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 1024}
LLAMA |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
"""7.7M parameters: 92 MB of state."""
RATES = Rates(
    drives=(DriveRates(directory="a", read_bytes_per_s=3e9, write_bytes_per_s=2e9, mixed_bytes_per_s=2.5e9),),
    to_gpu_bytes_per_s=5e9,
    to_ram_bytes_per_s=5e9,
    update_parameters_per_s=1e9,
    memory_bytes_per_s=20e9,
    gpu_update_parameters_per_s=15e9,
    flops_per_s=2e12,
    gpu_bytes=1.6e9,
)
CASES = {
    "free": (RATES, ("gpu", "ram"), 256 * MIB),
    "a small GPU": (replace(RATES, gpu_bytes=1.13e9), ("gpu", "ram"), 256 * MIB),
    "no state on the GPU": (RATES, ("ram",), 256 * MIB),
    "slow updates": (replace(RATES, update_parameters_per_s=5e7), ("ram",), 256 * MIB),
    "slow links": (replace(RATES, to_gpu_bytes_per_s=3e8, to_ram_bytes_per_s=3e8), ("ram",), 256 * MIB),
    "short of RAM": (RATES, ("ram", "nvme"), 96 * MIB),
    "a slow drive": (
        replace(
            RATES,
            drives=(DriveRates(directory="a", read_bytes_per_s=3e8, write_bytes_per_s=2e8, mixed_bytes_per_s=2.5e8),),
        ),
        ("ram", "nvme"),
        96 * MIB,
    ),
    "all on a drive": (RATES, ("nvme",), 96 * MIB),
}
FEW_CASES = ("slow updates", "short of RAM")
"""What binds a step is the updates, or RAM; in the test of updates in the backward it is a drive."""
LARGE = LLAMA | {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 42}
LARGE |= {"num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256}
"""A third of the layers of 405B parameters."""


def config_of(state: tuple[str, ...]) -> RunConfig:
    return RunConfig(
        model=ModelConfig(config=LLAMA),
        data=DataConfig(files=("random",), tokenizer="bytes", sequence_length=256),
        tiers=TiersConfig(state=state),
        train=TrainConfig(batch=8),
    )


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in FEW_CASES else [pytest.mark.slow]) for case in CASES]
)
def test_search_finds_what_trying_everything_finds(case: str) -> None:
    rates, state, ram = CASES[case]
    config, budgets = config_of(state), Budgets(64 * MIB, ram, 512 * MIB)
    model = skeleton_of(config.model)
    seconds = []
    for _, wanted in searching._list_trials(elsewhere(config, rates, budgets, model=model), frozenset()):
        try:
            trial = searching._fit_gpu_budget(wanted)
            placement = trial.placed()
        except PlanError:
            continue
        seconds.append(trial.forecast(placement).seconds)
        assert trial.compute_seconds <= trial.least_seconds(placement) <= seconds[-1] + 1e-9
    choice = search(elsewhere(config, rates, budgets, model=model))
    assert min(seconds) <= choice.seconds <= min(seconds) / (1 - LEAST_GAIN)


def test_search_for_ranks_finds_what_trying_everything_finds() -> None:
    rates, state, ram = CASES["short of RAM"]
    rates = replace(rates, gather_bytes_per_s=1e10, scatter_bytes_per_s=1e10, ranks_slowdown=0.2)
    config, budgets = config_of(state).changed({"train.groups": 2}), Budgets(64 * MIB, ram, 512 * MIB)
    world = World(2)
    model = skeleton_of(config.model)
    trials = searching._list_trials(elsewhere(config, rates, budgets, world=world, model=model), frozenset())
    fitted = [(settings, searching._fit_gpu_budget(trial)) for settings, trial in trials]
    assert {settings["train.groups"] for settings, _ in fitted} == {2, 4, 8}
    assert {settings["tiers.streamed_share"] for settings, _ in fitted} == set(searching.STREAMED_SHARES_SEARCHED)
    least = min(trial.forecast(trial.placed()).seconds for _, trial in fitted)
    choice = search(elsewhere(config, rates, budgets, world=world, model=model))
    assert least <= choice.seconds <= least / (1 - LEAST_GAIN)
    assert choice.trial.budgets == replace(
        Budgets(64 * MIB, ram, 512 * MIB).of_rank(world), gpu=choice.trial.budgets.gpu
    )


def test_search_cuts_no_mask_that_cannot_be_cut() -> None:
    rates, state, ram = CASES["short of RAM"]
    config = config_of(state)
    model = replace(config.model, attention="flex_attention")
    config = replace(config, model=model, data=replace(config.data, cross_documents=False))
    skeleton, budgets = skeleton_of(config.model), Budgets(64 * MIB, ram, 512 * MIB)
    trials = searching._list_trials(elsewhere(config, rates, budgets, model=skeleton), frozenset())
    assert {settings["train.slices"] for settings, _ in trials} == {1}


@pytest.mark.parametrize(
    "given",
    some(
        [
            {"train.groups": 4},
            {"model.saved_share": 0.5},
            {"train.slices": 2, "train.activations": "keep"},
            {"tiers.generations": 2},
            {"tiers.gpu": 20 * MIB, "tiers.streamed_share": 0.1},
        ],
        by=2,
    ),
)
def test_search_leaves_settings_that_were_given(given: dict[str, Any]) -> None:
    rates, state, ram = CASES["short of RAM"]
    config = config_of(state).changed(given)
    model, fixed = skeleton_of(config.model), frozenset(given)
    budgets = Budgets(given.get("tiers.gpu", 64 * MIB), ram, 512 * MIB)
    for settings, trial in searching._list_trials(elsewhere(config, rates, budgets, model=model), fixed):
        assert {name: settings[name] for name in given if name != "tiers.gpu"}.items() <= given.items()
        assert trial.work.policy.generations == settings["tiers.generations"]
    choice = search(elsewhere(config, rates, budgets, model=model), fixed)
    assert fixed.isdisjoint(choice.settings)
    free = search(elsewhere(config, rates, budgets, model=model))
    assert free.seconds <= choice.seconds / (1 - LEAST_GAIN)


@pytest.mark.parametrize(
    "setting",
    [{"train.clip": None, "numerics.guard": False}, pytest.param({"tiers.generations": 2}, marks=pytest.mark.slow)],
)
def test_search_with_updates_in_the_backward_finds_what_trying_everything_finds(setting: dict[str, Any]) -> None:
    rates, state, ram = CASES["a slow drive"]
    config, budgets = config_of(state).changed(setting), Budgets(64 * MIB, ram, 512 * MIB)
    model = skeleton_of(config.model)
    fitted = [
        searching._fit_gpu_budget(trial)
        for _, trial in searching._list_trials(elsewhere(config, rates, budgets, model=model), frozenset())
    ]
    least = min(trial.forecast(trial.placed()).seconds for trial in fitted)
    assert least <= search(elsewhere(config, rates, budgets, model=model)).seconds <= least / (1 - LEAST_GAIN)


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_search_tries_what_needs_the_norm_where_updates_wait_for_it(clip: float | None, guard: bool) -> None:
    rates, state, ram = CASES["a slow drive"]
    config = config_of(state).changed({"train.clip": clip, "numerics.guard": guard})
    skeleton, budgets = skeleton_of(config.model), Budgets(64 * MIB, ram, 512 * MIB)
    trials = searching._list_trials(elsewhere(config, rates, budgets, model=skeleton), frozenset())
    policies = [trial.work.policy for _, trial in trials]
    waits = guard or clip is not None
    assert {policy.deferred for policy in policies} == {waits}
    assert {policy.generations for policy in policies} == ({1, 2} if waits else {1})


def test_search_of_as_many_tokens_in_more_groups_takes_the_fewest() -> None:
    config = config_of(("gpu", "ram"))
    choice = search(elsewhere(config, RATES, Budgets(64 * MIB, 256 * MIB, 0)))
    assert (choice.settings["train.groups"], choice.settings["train.slices"]) == (1, 1)


def test_search_of_many_layers_finds_units_once_and_simulates_few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    done: Counter[str] = Counter()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **names: Any) -> Any:
            done[function.__name__] += 1
            return function(*args, **names)

        return call

    for module, name in (
        (setups, "cut_units"),
        (trials, "place"),
        (trials, "least_step_seconds"),
        (trials, "forecast"),
    ):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    drives = (DriveRates(directory="a", read_bytes_per_s=14e9, write_bytes_per_s=12e9, mixed_bytes_per_s=20e9),)
    rates = Rates(
        drives=drives,
        to_gpu_bytes_per_s=53e9,
        to_ram_bytes_per_s=53e9,
        update_parameters_per_s=6.3e9,
        memory_bytes_per_s=181e9,
        gpu_update_parameters_per_s=160e9,
        flops_per_s=590e12,
        gpu_bytes=150.7e9,
    )
    config = config_of(("ram", "nvme"))
    config = replace(
        config,
        model=replace(config.model, config=LARGE),
        data=replace(config.data, sequence_length=4096),
        train=replace(config.train, batch=64),
    )
    budgets = Budgets(60 << 30, 1843 << 30, 16 << 40)
    fixed = frozenset({"train.offload_attention"})
    choice = search(elsewhere(config, rates, budgets), fixed)
    assert choice.settings["train.activations"] == "offload"
    assert done["cut_units"] == 1
    assert done["forecast"] <= 6  # of 320 trials
    assert done["least_step_seconds"] <= 24
    assert done["place"] <= 160


def long_config(tokens: int) -> RunConfig:
    config = config_of(("gpu", "ram"))
    model = replace(config.model, config=LLAMA | {"intermediate_size": 8192})
    return replace(
        config, model=model, data=replace(config.data, sequence_length=tokens), train=replace(config.train, batch=1)
    )


def test_search_takes_tiles_where_a_long_sequence_does_not_fit_without_them() -> None:
    config, budgets = long_config(32_768), Budgets(64 * MIB, 512 * MIB, 0)
    model, rates = skeleton_of(config.model), replace(RATES, gpu_bytes=3.2e9)
    with pytest.raises(PlanError, match="GPU memory for activations"):
        search(elsewhere(config, rates, budgets, model=model), frozenset({"model.tile_tokens"}))
    choice = search(elsewhere(config, rates, budgets, model=model))
    assert choice.settings["model.tile_tokens"] == searching.TILE_TOKENS
    again = Trial.of(elsewhere(config.changed(choice.settings), rates, budgets, model=model))
    assert again.activations == choice.trial.activations
    assert again.seconds == choice.trial.seconds
    with pytest.raises(PlanError, match="GPU memory for activations"):
        search(elsewhere(config, replace(rates, gpu_bytes=1.1e9), budgets, model=model))


def test_search_takes_no_tiles_where_they_do_not_make_a_step_shorter() -> None:
    budgets = Budgets(64 * MIB, 512 * MIB, 0)
    for tokens in (searching.TILE_TOKENS, 32_768):
        config = long_config(tokens)
        choice = search(elsewhere(config, replace(RATES, gpu_bytes=80e9), budgets))
        assert "model.tile_tokens" not in choice.settings


def test_search_choice_is_what_its_settings_make() -> None:
    rates, state, ram = CASES["a small GPU"]
    config = config_of(state)
    model = skeleton_of(config.model)
    choice = search(elsewhere(config, rates, Budgets(64 * MIB, ram, 0), model=model))
    budgets = Budgets(choice.settings["tiers.gpu"], ram, 0)
    trial = Trial.of(elsewhere(config.changed(choice.settings), rates, budgets, model=model))
    assert trial.forecast(trial.placed()).seconds == choice.seconds
    assert rates.gpu_bytes is not None
    assert budgets.gpu + trial.activations.peak <= rates.gpu_bytes * (1 - GPU_MARGIN) + 1


def test_search_with_nothing_that_fits_says_what_is_short() -> None:
    config = config_of(("ram",))
    with pytest.raises(PlanError, match="RAM"):
        search(elsewhere(config, RATES, Budgets(64 * MIB, 8 * MIB, 0)))
    with pytest.raises(PlanError, match="GPU memory for activations"):
        rates = replace(RATES, gpu_bytes=1e8)
        search(elsewhere(config, rates, Budgets(64 * MIB, 256 * MIB, 0)))
