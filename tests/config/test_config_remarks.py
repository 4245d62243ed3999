"""What is said about settings that are allowed and do not do what they seem to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatier.config.file import from_dict
from megatier.config.remarks import list_remarks
from megatier.config.schema import RunConfig, TrainConfig

PLAIN = from_dict({"model": {"path": "m"}, "data": {"files": ["x"]}})


def with_train(**given: Any) -> RunConfig:
    return replace(PLAIN, train=TrainConfig(**given))


@pytest.mark.parametrize(("rate", "is_remarked"), [(0.0, False), (1e-3, False), (0.9, False), (1.0, True), (1e6, True)])
def test_learning_rate_that_no_model_stands_is_remarked_on(rate: float, is_remarked: bool) -> None:
    said = list(list_remarks(with_train(learning_rate=rate), "lr"))
    assert [words.startswith(f"lr is {rate:g}. A step moves each weight") for words in said] == [True] * is_remarked


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (with_train(kept_layers=2), "train.kept_layers"),
        (with_train(kept_attention=True), "train.kept_attention"),
        (with_train(offload_attention=True, activations="recompute"), "train.offload_attention"),
        (with_train(momentum=0.5), "train.momentum"),
        (with_train(optimizer="lion", eps=1e-6), "train.eps"),
        (with_train(schedule="constant", min_learning_rate_ratio=0.1), "train.min_learning_rate_ratio"),
        (PLAIN.changed({"numerics.guard": False, "numerics.max_skips": 1}), "numerics.max_skips"),
        (
            PLAIN.changed({"numerics.guard": False, "train.clip": None, "tiers.generations": 2}),
            "tiers.generations",
        ),
    ],
)
def test_setting_without_effect_is_named_with_the_reason(config: RunConfig, name: str) -> None:
    (said,) = list_remarks(config)
    assert said.startswith(f"{name} is ")
    assert " has no effect, because " in said


def test_settings_that_take_effect_are_not_remarked_on() -> None:
    given = with_train(activations="offload", kept_layers=1, kept_attention=True, offload_attention=True)
    muon = with_train(optimizer="muon", momentum=0.9, min_learning_rate_ratio=0.1)
    assert not [*list_remarks(given), *list_remarks(muon), *list_remarks(PLAIN)]
