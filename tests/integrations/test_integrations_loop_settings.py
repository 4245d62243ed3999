"""`megatier.stream` takes a TrainConfig in the place of short arguments, and follows or refuses each field of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from streamed_loops import TIERS, loop, same, train_config
from tiny_runs import exactness_config, plain_model

import megatier
from megatier.config.file import from_dict
from megatier.config.schema import ModelConfig, NumericsConfig, TrainConfig
from megatier.errors import ConfigError
from megatier.integrations.loop_settings import FOLLOWED_FIELDS, NOT_OF_LOOPS, SHORT, ShortArguments, loop_config
from megatier.tier import Activations

OTHERS: dict[str, Any] = {
    "steps": 7,
    "epochs": 2.0,
    "batch": 16,
    "slices": 2,
    "offload_attention": True,
    "schedule": "linear",
    "warmup_steps": 3,
    "warmup_ratio": 0.1,
    "decay_ratio": 0.2,
    "min_learning_rate_ratio": 0.1,
    "evaluate_every": 5,
    "evaluate_batches": 3,
    "early_stopping_threshold": 0.1,
    "early_stopping_patience": 2,
    "stall_timeout": 60.0,
}
"""Another value than the default of each field that is no loop's."""
BESIDE = {"early_stopping_threshold": {"early_stopping_patience": 2}}
"""What a field is refused without, whoever reads it."""


def test_fields_of_a_train_config_are_each_followed_or_refused() -> None:
    names = {field.name for field in fields(TrainConfig)}
    assert names == {*FOLLOWED_FIELDS, *NOT_OF_LOOPS}
    assert len(names) == len(FOLLOWED_FIELDS) + len(NOT_OF_LOOPS)
    assert OTHERS.keys() == NOT_OF_LOOPS.keys()


def test_short_arguments_are_the_table_and_name_settings_that_exist() -> None:
    assert list(SHORT) == list(ShortArguments.__annotations__)
    sections = {kind.NAME: kind.__dataclass_fields__ for kind in (TrainConfig, ModelConfig, NumericsConfig)}
    for argument in SHORT.values():
        for section, _, name in (setting.partition(".") for setting in argument.settings):
            assert name in sections[section]
            assert section != "train" or name in FOLLOWED_FIELDS
    documented = re.findall(r"^ {8}(\w+): ", megatier.stream.__doc__ or "", re.MULTILINE)
    assert documented == ["model", "tiers", "train", *SHORT]


@pytest.mark.parametrize("name", sorted(NOT_OF_LOOPS))
def test_field_that_is_no_loops_is_refused_by_name(name: str) -> None:
    train = TrainConfig(**{name: OTHERS[name], **BESIDE.get(name, {})})
    with pytest.raises(ConfigError, match=rf"^train\.{name} is .*which a loop does not follow: .*Leave it out\.$"):
        megatier.stream("nowhere", train=train)


def test_activations_that_leave_the_gpu_are_refused_in_a_loop() -> None:
    with pytest.raises(ConfigError, match=r"train\.activations is 'offload'; it must be keep or recompute"):
        megatier.stream("nowhere", train=TrainConfig(activations="offload"))


@pytest.mark.parametrize("name", [name for name, one in SHORT.items() if any("train." in s for s in one.settings)])
def test_short_argument_beside_a_train_config_that_says_the_same_is_refused_by_name(name: str) -> None:
    given: dict[str, Any] = {name: SHORT[name].default}
    with pytest.raises(ConfigError, match=rf"{name} and train are given, and both say train\..*Leave out {name}\."):
        megatier.stream("nowhere", train=TrainConfig(), **given)


def test_train_that_is_no_train_config_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"train is 3; it must be a TrainConfig or keys with values"):
        megatier.stream("nowhere", train=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"unknown setting train\.lr; did you mean train\.learning_rate\?"):
        megatier.stream("nowhere", train={"lr": 1})


def test_train_as_a_mapping_is_the_train_config_of_its_keys() -> None:
    given = {"groups": 2, "batch": 2, "learning_rate": 1e-2, "schedule": "constant"}
    assert loop_config({}, None, given, "sdpa") == loop_config({}, None, TrainConfig(**given), "sdpa")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(NOT_OF_LOOPS))
def test_field_that_is_no_loops_is_refused_at_its_default_too_if_it_is_given(name: str) -> None:
    default: Any = TrainConfig.__dataclass_fields__[name].default
    for train in (TrainConfig(**{name: default}), {name: default}):
        with pytest.raises(ConfigError, match=rf"^train\.{name} is .*which a loop does not follow"):
            loop_config({}, None, train, "sdpa")

    # Nobody knows what was given of a copy, so its defaults count as not given.
    assert loop_config({}, None, replace(TrainConfig(), groups=8), "sdpa").train.groups == 8


@pytest.mark.parametrize("moments", ["bf16", "fp8"])
def test_narrow_moments_of_lion_are_refused_at_every_door(moments: Any) -> None:
    message = rf"train\.moments is '{moments}'; it must be fp32 with train\.optimizer lion, whose state is always fp32"
    short: dict[str, Any] = {"optimizer": "lion", "moments": moments}
    doors: list[Callable[[], object]] = [
        lambda: TrainConfig(**short),
        lambda: megatier.stream("nowhere", **short),
        lambda: megatier.stream("nowhere", train=short),
        lambda: from_dict({"model": {"path": "m"}, "data": {"files": "x"}, "train": short}),
    ]
    for door in doors:
        with pytest.raises(ConfigError, match=message):
            door()
    assert TrainConfig(optimizer="muon", moments=moments).moments == moments


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"frozen": 5}, "frozen is 5; it must be a list of texts"),
        ({"frozen": ["a", 5]}, r"frozen is \['a', 5\]; it must be a list of texts"),
        ({"products_except": 5}, "products_except is 5; it must be"),
        ({"attention": ""}, "attention is ''; it must be"),
    ],
)
def test_argument_of_a_wrong_kind_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        megatier.stream(plain_model(exactness_config("tied")), tiers=TIERS, **given)


def test_mounts_of_tiered_adamw_that_are_no_texts_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="nvme is 5; it must be a list of texts"):
        megatier.TieredAdamW([torch.nn.Parameter(torch.ones(2))], ram="1MiB", nvme=5)  # type: ignore[arg-type]


def test_learning_rate_and_settings_without_effect_are_told_by_stream() -> None:
    refused = pytest.raises(ConfigError, match="model is ''")
    with pytest.warns(UserWarning, match=r"^lr is 1\. A step moves each weight") as caught, refused:
        megatier.stream("", lr=1.0)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=r"^train\.kept_layers is 2 and has no effect, because"), refused:
        megatier.stream("", train=TrainConfig(kept_layers=2))


def test_defaults_of_a_train_config_differ_from_the_short_ones_in_rate_and_decay_alone() -> None:
    short = loop_config({}, None, None, "sdpa").train
    long = loop_config({}, None, TrainConfig(), "sdpa").train
    assert replace(long, learning_rate=short.learning_rate, weight_decay=short.weight_decay) == short
    assert (short.learning_rate, short.weight_decay) == (1e-3, 1e-2)
    assert (long.learning_rate, long.weight_decay) == (3e-4, 0.0)
    said = " ".join((megatier.stream.__doc__ or "").split())
    assert "The learning rate is 3e-4 by default here, and there is no decay." in said


def test_train_config_and_short_arguments_are_one_config() -> None:
    short = {"accumulation_steps": 4, "lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1, "seed": 3}
    other = {"optimizer": "muon", "momentum": 0.9, "clip": None, "moments": "bf16", "activations": "recompute"}
    train = TrainConfig(
        groups=4,
        learning_rate=1e-2,
        beta1=0.8,
        beta2=0.9,
        eps=1e-6,
        weight_decay=0.1,
        seed=3,
        optimizer="muon",
        momentum=0.9,
        clip=None,
        moments="bf16",
        activations="recompute",
    )
    beside = {"compute_dtype": torch.float32, "tile_tokens": 8}
    assert loop_config({**short, **other, **beside}, None, None, "eager") == loop_config(beside, None, train, "eager")


def test_stream_with_a_train_config_has_the_bits_of_short_arguments_and_keeps_the_layers_that_it_names() -> None:
    found = []
    train = TrainConfig(groups=2, learning_rate=1e-2, weight_decay=0.1, clip=0.5, seed=2)
    short: dict[str, Any] = {"accumulation_steps": 2, "lr": 1e-2, "weight_decay": 0.1, "clip": 0.5, "seed": 2}
    kept = replace(train, activations="recompute", kept_layers=1, kept_attention=True)
    for given in (short, {"train": train}, {"train": kept}):
        with megatier.stream(plain_model(exactness_config("tied")), tiers=TIERS, **given) as streamed:
            work = streamed._session.setup.work
            layers = [policy for name, policy in work.activations.items() if name.startswith("model.layers.")]
            if given.get("train") is kept:
                assert layers == [*[Activations.RECOMPUTE] * 3, Activations.KEEP]
                assert work.keeps_attention
            loop(streamed, train_config("tied", groups=2), 160, last=2)
            found.append(streamed.state_dict())
    assert same(found[0], found[1])
    assert same(found[0], found[2])
