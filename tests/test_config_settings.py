"""Numeric settings of optimizers: one check, whichever way they come in."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from megatier.config.schema import TrainConfig
from megatier.config.values import check_setting, clip_of
from megatier.errors import ConfigError

GOOD: dict[str, list[Any]] = {
    "lr": [0, 1e-3, np.float32(0.5), 1],
    "weight_decay": [0.0, 3],
    "eps": [1e-8, 1.0],
    "betas": [(0.9, 0.999), [0, 0.5]],
    "momentum": [0.0, 0.95],
    "clip": [None, 1e-3, 5],
}
NEVER: list[Any] = ["1e-3", True, math.nan, math.inf, -1.0, 1e39, torch.tensor(0.1), 1j, [0.1]]
BAD: dict[str, list[Any]] = {
    "lr": [*NEVER, None],
    "weight_decay": [*NEVER, None],
    "eps": [*NEVER, 0.0, 1e-40, None],
    "betas": [0.9, (0.9,), (0.9, 1.0), (-0.1, 0.9), (0.9, "0.9"), (0.9, math.nan), "ab", None],
    "momentum": [*NEVER, 1.0, None],
    "clip": [*NEVER, 0, 0.0],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD.items() for value in values])
def test_setting_in_its_range_is_taken(name: str, value: object) -> None:
    check_setting(name, value)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_setting_out_of_its_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"the {name}|{name}"):
        check_setting(name, value, f"the {name}")


@pytest.mark.parametrize(("given", "expected"), [(None, None), (0, None), (-1.0, None), (0.5, 0.5)])
def test_norm_of_another_trainer_at_0_or_below_is_off(given: float | None, expected: float | None) -> None:
    assert clip_of(given) == expected


@pytest.mark.parametrize("given", ["1.0", math.nan, math.inf, True])
def test_norm_of_another_trainer_that_is_no_number_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="the norm to clip to"):
        clip_of(given)


def test_settings_of_a_run_are_refused_by_their_own_names() -> None:
    with pytest.raises(ConfigError, match=r"train\.learning_rate is -1\.0; it must be at least 0"):
        TrainConfig(learning_rate=-1.0)
    with pytest.raises(ConfigError, match=r"train\.clip is 0"):
        TrainConfig(clip=0)
