"""The search for settings: as good as trying everything, and inside the memory there is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatier.config import DataConfig, ModelConfig, RunConfig, TiersConfig, TrainConfig
from megatier.errors import PlanError
from megatier.schedule.placement import Budgets
from megatier.schedule.rates import DriveRates, Rates
from megatier.train import search as searching
from megatier.train.search import MARGIN, WORTH, changed, search
from megatier.train.trial import Trial, skeleton_of

MIB = 1 << 20
LLAMA = {"model_type": "llama", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 1024}
LLAMA |= {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
"""7.7M parameters: 92 MB of state."""
RATES = Rates((DriveRates("a", 3e9, 2e9, 2.5e9),), 5e9, 5e9, 1e9, 20e9, 15e9, 2e12, gpu_bytes=1.6e9)
CASES = {
    "free": (RATES, ("gpu", "ram"), 256 * MIB),
    "a small GPU": (replace(RATES, gpu_bytes=1.08e9), ("gpu", "ram"), 256 * MIB),
    "no state on the GPU": (RATES, ("ram",), 256 * MIB),
    "slow updates": (replace(RATES, update_parameters_per_s=5e7), ("ram",), 256 * MIB),
    "slow links": (replace(RATES, to_gpu_bytes_per_s=3e8, to_ram_bytes_per_s=3e8), ("ram",), 256 * MIB),
    "short of RAM": (RATES, ("ram", "nvme"), 96 * MIB),
}


def config_of(state: tuple[str, ...]) -> RunConfig:
    return RunConfig(
        model=ModelConfig(config=LLAMA),
        data=DataConfig(files=("random",), tokenizer="bytes", sequence_length=256),
        tiers=TiersConfig(state=state),
        train=TrainConfig(batch=8),
    )


@pytest.mark.parametrize("case", CASES)
def test_search_finds_what_trying_everything_finds(case: str) -> None:
    rates, state, ram = CASES[case]
    config, budgets = config_of(state), Budgets(64 * MIB, ram, 512 * MIB)
    model = skeleton_of(config.model)
    seconds = []
    for _, variant in searching._variants(config, compiles=True):
        try:
            trial = searching._fitted(Trial.of(model, variant, rates, budgets, compiles=True))
            placement = trial.placed()
        except PlanError:
            continue
        seconds.append(trial.forecast(placement).seconds)
        assert searching._floor(trial, placement) <= seconds[-1] + 1e-9
    choice = search(model, config, rates, budgets, compiles=True)
    assert min(seconds) <= choice.seconds <= min(seconds) / (1 - WORTH) ** 2


def test_search_choice_is_what_its_settings_make() -> None:
    rates, state, ram = CASES["a small GPU"]
    config = config_of(state)
    model = skeleton_of(config.model)
    choice = search(model, config, rates, Budgets(64 * MIB, ram, 0), compiles=True)
    budgets = Budgets(choice.settings["tiers.gpu"], ram, 0)
    trial = Trial.of(model, changed(config, choice.settings), rates, budgets, compiles=True)
    assert trial.forecast(trial.placed()).seconds == choice.seconds
    assert rates.gpu_bytes is not None
    assert budgets.gpu + trial.activations.peak <= rates.gpu_bytes * (1 - MARGIN) + 1
    assert choice.tokens_per_s == 8 * 256 / choice.seconds


def test_search_with_nothing_that_fits_says_what_is_short() -> None:
    config = config_of(("ram",))
    with pytest.raises(PlanError, match="RAM"):
        search(skeleton_of(config.model), config, RATES, Budgets(64 * MIB, 8 * MIB, 0), compiles=True)
    with pytest.raises(PlanError, match="GPU memory for activations"):
        rates = replace(RATES, gpu_bytes=1e8)
        search(skeleton_of(config.model), config, rates, Budgets(64 * MIB, 256 * MIB, 0), compiles=True)
