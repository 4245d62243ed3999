from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatier.checkpoint.run_state import RunState
from megatier.config.data_section import DataConfig
from megatier.config.schema import ModelConfig, OutputConfig, RunConfig, TiersConfig, TrainConfig
from megatier.errors import CheckpointError, ConfigError, DataError

CPU = torch.device("cpu")
CONFIG = RunConfig(
    model=ModelConfig(config={"model_type": "llama", "hidden_size": 64}),
    data=DataConfig(files=("python-stdlib",), tokenizer="bytes"),
)
TEXT = {"num_tokens": 100, "crc32": 7}


def stored() -> dict[str, Any]:
    """As a checkpoint gives it back."""
    found: dict[str, Any] = json.loads(json.dumps(RunState.of(3, CONFIG, CPU, TEXT).to_dict()))
    return found


def test_run_state_written_and_read_is_the_same() -> None:
    state = RunState.of(3, CONFIG, CPU, TEXT)
    again = RunState.read(json.loads(json.dumps(state.to_dict())))
    assert again.step == 3
    assert again.changes(CONFIG, CPU) == []
    again.check_text(TEXT)


def test_set_random_goes_on_with_every_kind_of_numbers() -> None:
    state = stored()
    expected = torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    RunState.read(state).set_random(CPU)
    assert (
        torch.rand(3).tolist(),
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
    ) == expected


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"train": TrainConfig(groups=2)}, "train.groups was 1 and is 2"),
        ({"train": TrainConfig(steps=7)}, "train.steps was 1000 and is 7"),
        ({"data": DataConfig(files=("other",), tokenizer="bytes")}, "data.files"),
        ({"model": ModelConfig(config={"model_type": "llama", "hidden_size": 65})}, "model.config"),
    ],
    ids=str,
)
def test_check_of_a_numeric_choice_that_changed_is_refused_by_name(change: dict[str, Any], name: str) -> None:
    state = RunState.read(stored())
    changes = state.changes(replace(CONFIG, **change), CPU)
    with pytest.raises(ConfigError, match=f"{name}.*--accept-changes"):
        state.check(changes)
    state.check(changes, accepted=[*changes, "more"])


def test_changes_of_what_changes_no_number_are_none() -> None:
    config = replace(
        CONFIG,
        tiers=TiersConfig(device="cpu", ram=1 << 30, state=("ram",), io_threads=7, generations=2),
        train=TrainConfig(activations="recompute", evaluate_every=3, kept_layers=1),
        output=OutputConfig(directory="elsewhere", checkpoint_every=5),
    )
    assert RunState.read(stored()).changes(config, CPU) == []


def test_check_on_another_library_or_device_is_refused() -> None:
    state = stored()
    state["environment"]["torch"] = "1.0"
    with pytest.raises(ConfigError, match=r"torch was '1.0' and is"):
        RunState.read(state).check(RunState.read(state).changes(CONFIG, CPU))


def test_check_text_that_changed_is_refused() -> None:
    with pytest.raises(DataError, match="101 tokens to train on instead of 100"):
        RunState.read(stored()).check_text({"num_tokens": 101, "crc32": 7})
    with pytest.raises(DataError, match="its tokens differ"):
        RunState.read(stored()).check_text({"num_tokens": 100, "crc32": 8})


def test_check_text_compares_what_is_held_out_where_the_checkpoint_notes_it() -> None:
    found = {**TEXT, "held_out": {"num_tokens": 9, "crc32": 1}}
    RunState.read(stored()).check_text(found)
    state = RunState.of(3, CONFIG, CPU, found)
    state.check_text(found)
    with pytest.raises(DataError, match="the text is not that of the checkpoint"):
        state.check_text({**TEXT, "held_out": {"num_tokens": 9, "crc32": 2}})


HARMS: list[tuple[tuple[str, ...], object]] = [
    (("step",), "3"),
    (("step",), -1),
    (("step",), True),
    (("step",), None),
    (("config",), []),
    (("config",), {"train": 3}),
    (("environment",), 1),
    (("random",), None),
    (("text",), []),
]


@pytest.mark.parametrize(("path", "value"), HARMS, ids=str)
def test_read_of_a_damaged_state_is_refused(path: tuple[str, ...], value: object) -> None:
    state = stored()
    state[path[0]] = value
    with pytest.raises(CheckpointError, match=f"damaged: (its )?{path[0]}"):
        RunState.read(state)
    del state[path[0]]
    with pytest.raises(CheckpointError, match=f"damaged: {path[0]}"):
        RunState.read(state)


@pytest.mark.parametrize(
    "harm",
    [
        {"torch": "AAAA"},
        {"torch": "no base64 !"},
        {"torch": 3},
        {"python": [3, [1, 2], None]},
        {"python": 3},
        {"python": [3, ["a"] * 625, None]},
        {"numpy": ["MT19937", [1], 0, 0, 0.0]},
        {"numpy": ["MT19937", [-1] * 624, 0, 0, 0.0]},
        {"numpy": ["MT19937", [1] * 624, 1 << 20, 0, 0.0]},
        {"numpy": ["MT19937", [1] * 624, -5, 0, 0.0]},
        {"numpy": None},
        {"python": [3, [*range(1, 625), 624], "x"]},
    ],
    ids=str,
)
def test_set_random_of_damaged_states_is_refused(harm: dict[str, Any]) -> None:
    state = stored()
    before = copy.deepcopy(state["random"])
    state["random"] |= harm
    with pytest.raises(CheckpointError, match="random states"):
        RunState.read(state).set_random(CPU)
    RunState.read({**state, "random": before}).set_random(CPU)
