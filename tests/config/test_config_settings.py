"""Numeric settings of optimizers: one check, whichever way they come in."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from streamed_loops import TIERS
from tiny_runs import exactness_config, plain_model
from torch import nn

import megatier
from megatier import TieredAdamW, TieredMuon
from megatier.config.file import from_dict
from megatier.config.lora import LoraConfig
from megatier.config.schema import CONFIG_SECTIONS, TrainConfig
from megatier.config.values import ByteCount, check_setting, clip_of
from megatier.errors import ConfigError
from megatier.store.store import TieredStore

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


NO_NUMBERS: list[Any] = [
    "x",
    "",
    True,
    math.nan,
    math.inf,
    -math.inf,
    -1,
    10**400,
    10**5000,
    Decimal("0.1"),
    torch.tensor(0.1),
    torch.tensor([1]),
    1j,
    [1],
    {},
    b"1",
    np.bool_(True),
    np.float32("nan"),
]
"""Values that no numeric setting takes."""
NUMERIC = (int, float, ByteCount)
NEEDED: dict[str, dict[str, Any]] = {"model": {"path": "x"}, "data": {"files": ["x"]}}
"""What a section has besides."""


def fields() -> list[tuple[str, str]]:
    """Every numeric setting of a config, by section and name, and whether it may be None."""
    return [
        (name, key)
        for name, section in CONFIG_SECTIONS.items()
        for key, hint in get_type_hints(section, include_extras=True).items()
        if any(kind in NUMERIC for kind in (hint, *get_args(hint)))
        if get_origin(hint) is not tuple
    ]


def doors() -> dict[str, Callable[[Any], object]]:
    """Every way by which a number comes in, but those of `fields`."""

    def by_name(make: Callable[..., object], name: str) -> Callable[[Any], object]:
        return lambda value: make(**{name: value})

    def adamw(**given: Any) -> object:
        return TieredAdamW([nn.Parameter(torch.ones(4))], **{"ram": "1MiB", **given})

    def unopened(**given: Any) -> object:
        return megatier.stream("/none/such", **given)

    def in_group(name: str) -> Callable[[Any], object]:
        def step(value: Any) -> object:
            weight = nn.Parameter(torch.ones(4))
            weight.grad = torch.ones(4)
            with TieredAdamW([weight], ram="1MiB") as optimizer:
                optimizer.param_groups[0][name] = value
                return optimizer.step()

        return step

    tuned = ("lr", "betas", "eps", "weight_decay")
    streamed = (*tuned, "momentum", "clip", "seed", "accumulation_steps", "num_labels", "expert_parts", "tile_tokens")
    tiers = ("ram", "gpu", "chunk", "io_threads", "streamed_share")
    found: dict[str, Callable[[Any], object]] = {"the norm to clip to": clip_of}
    found |= {f"model.lora.{name}": by_name(LoraConfig, name) for name in ("rank", "alpha", "dropout")}
    found |= {f"stream: {name}": by_name(unopened, name) for name in streamed}
    found |= {f"stream: tiers.{name}": lambda v, n=name: unopened(tiers={n: v}) for name in tiers}  # type: ignore[misc]
    found |= {f"TieredAdamW: {name}": by_name(adamw, name) for name in (*tuned, "ram", "seed")}
    found |= {f"TieredAdamW, a group: {name}": in_group(name) for name in tuned}
    matrix = nn.Parameter(torch.ones(4, 4))
    found["TieredMuon: momentum"] = lambda value: TieredMuon([matrix], momentum=value, ram="1MiB")
    return found | {f"TieredStore: {name}": by_name(TieredStore.open, name) for name in ("gpu", "ram")}


@pytest.mark.parametrize(("section", "name"), fields())
def test_setting_of_a_config_that_is_no_number_is_refused_by_name(section: str, name: str) -> None:
    hint = get_type_hints(CONFIG_SECTIONS[section])[name]
    for value in (*NO_NUMBERS, *(() if NoneType in get_args(hint) else (None,))):
        with pytest.raises(ConfigError, match=rf"{section}\.{name}"):
            CONFIG_SECTIONS[section](**{**NEEDED.get(section, {}), name: value})


def test_setting_of_a_file_or_the_command_line_that_is_no_number_is_refused_by_name() -> None:
    # The reader takes a tenth of a second each time, so each setting has one value and comes in by one of the two.
    values = itertools.cycle([True, math.nan, 10**400, "x", [1], {}])
    texts = itertools.cycle(["x", "", "true", ".nan", ".inf", "-1", "9" * 400, "1j", "[1]", "{a: 1}", "1,5"])
    for index, ((section, name), value, text) in enumerate(zip(fields(), values, texts, strict=False)):
        tree, words = {**NEEDED, section: {**NEEDED.get(section, {}), name: value}}, [f"--{section}.{name}={text}"]
        with pytest.raises(ConfigError, match=rf"{section}\.{name}"):
            from_dict(NEEDED, words) if index % 2 else from_dict(tree)


@pytest.mark.parametrize("door", doors())
def test_number_that_is_none_is_refused_by_name_at_every_door(door: str) -> None:
    name = door.rpartition(" ")[2] if ": " in door else door
    given = doors()[door]
    for value in NO_NUMBERS:
        # At 0 and below other programs' clipping is off.
        if given is clip_of and value == -1:
            continue
        with pytest.raises(ConfigError, match=name):
            given(value)


def test_number_of_another_library_is_taken_as_the_same_one_of_python(tmp_path: Path) -> None:
    foreign: dict[str, Any] = {"steps": np.int64(7), "learning_rate": np.float32(0.5), "eps": Fraction(1, 4)}
    made = TrainConfig(**foreign, clip=np.float64(2))
    assert made == TrainConfig(steps=7, learning_rate=0.5, eps=0.25, clip=2.0)
    assert [type(value) for value in (made.steps, made.learning_rate, made.eps, made.clip)] == [int, *[float] * 3]

    # Schedules in numpy give such numbers, which are saved as JSON.
    with megatier.stream(plain_model(exactness_config("tied")), tiers=TIERS) as streamed:
        for group in streamed.optimizer.param_groups:
            group.update(lr=np.float32(0.5), betas=(np.float32(0.5), 0.75))
        streamed.save(tmp_path / "saved")
        streamed.restore(tmp_path / "saved")
        assert streamed.optimizer.param_groups[0]["lr"] == 0.5
        assert streamed.optimizer.param_groups[0]["betas"] == (0.5, 0.75)
