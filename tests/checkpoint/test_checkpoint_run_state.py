from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatier.checkpoint.environment import read_environment
from megatier.checkpoint.run_state import RunState
from megatier.compute.token_tiles import Decision
from megatier.config.data_section import DataConfig
from megatier.config.output_section import OutputConfig
from megatier.config.schema import ModelConfig, RunConfig, TiersConfig, TrainConfig
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


@pytest.mark.parametrize(
    "name", ["torch", "transformers", "numpy", "matmul precision", "isa", "instructions", "threads"]
)
def test_another_library_or_instruction_set_is_a_change_with_both_values(name: str) -> None:
    state = stored()
    state["environment"][name] = "another"
    (change,) = RunState.read(state).changes(CONFIG, CPU)
    assert change.startswith(f"{name} was 'another' and is ")
    with pytest.raises(ConfigError, match=rf"would change after step 3: {name} was 'another'.*--accept-changes"):
        RunState.read(state).check([change])


def test_variable_by_which_a_library_chooses_its_kernels_is_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    state = RunState.read(stored())
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert state.changes(CONFIG, CPU) == ["variables was {} and is {'ONEDNN_MAX_CPU_ISA': 'AVX2'}"]


def test_environment_is_told_whichever_way_precisions_were_set() -> None:
    assert read_environment(CPU)["matmul precision"] == "highest"
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert read_environment(CPU)["matmul precision"].startswith("cuda tf32, mkldnn ")
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert read_environment(CPU)["matmul precision"] == "highest"


def test_environment_that_an_older_version_noted_is_compared_in_its_own_names() -> None:
    state = stored()
    for name in ("numpy", "matmul precision", "variables", "instructions"):
        del state["environment"][name]
    assert RunState.read(state).changes(CONFIG, CPU) == []


def test_order_of_attention_kernels_that_torch_sets_after_a_save_is_no_change() -> None:
    state = RunState.read(stored())
    before = torch._C._get_sdp_priority_order()
    try:
        # As the first attention of a process does on some GPUs.
        torch._C._set_sdp_priority_order([before[-1], *before[:-1]])
        later = RunState.read(stored())
        assert later.environment != state.environment
        assert state.changes(CONFIG, CPU) == []
    finally:
        torch._C._set_sdp_priority_order(before)
    assert later.changes(CONFIG, CPU) == []


TILES = {"layers.0.mlp": Decision("it draws", ()), "layers.0.norm": Decision(None, ("x",))}


def test_run_state_notes_which_modules_run_in_tiles_and_older_ones_do_not() -> None:
    state = RunState.of(3, CONFIG, CPU, TEXT, tiles=TILES)
    found = json.loads(json.dumps(state.to_dict()))
    assert RunState.read(found).tiles == TILES
    del found["tiles"]
    assert RunState.read(found).tiles == {}


@pytest.mark.parametrize("told", [3, [], {"why_whole": None}, {"why_whole": 3, "keywords": []}])
def test_read_of_damaged_notes_of_tiles_is_refused(told: object) -> None:
    keywords = {"why_whole": None, "keywords": [3]}
    for tiles in (told, {"layers.0": told}, {"layers.0": keywords}):
        if tiles != []:
            with pytest.raises(CheckpointError, match="damaged: tiles is"):
                RunState.read({**stored(), "tiles": tiles})


def test_read_of_a_state_of_an_older_version_takes_no_notice_of_its_random_states() -> None:
    assert RunState.read({**stored(), "random": {"torch": "AAAA"}}) == RunState.of(3, CONFIG, CPU, TEXT)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"train": TrainConfig(groups=2)}, "train.groups was 1 and is 2"),
        ({"train": TrainConfig(moments="bf16")}, "train.moments was 'fp32' and is 'bf16'"),
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


def test_changes_of_a_run_of_a_version_without_narrow_moments_are_none() -> None:
    before = stored()
    del before["config"]["train"]["moments"]
    state = RunState.read(before)
    assert state.changes(CONFIG, CPU) == []
    assert state.changes_of_blocks(CONFIG) == []
    narrow = replace(CONFIG, train=TrainConfig(moments="bf16"))
    expected = ["train.moments was 'fp32' and is 'bf16'"]
    assert state.changes(narrow, CPU) == state.changes_of_blocks(narrow) == expected


def test_another_optimizer_is_refused_even_if_the_user_accepts_it() -> None:
    before = stored()
    del before["config"]["train"]["optimizer"]  # an older version
    state = RunState.read(before)
    assert state.changes(CONFIG, CPU) == []
    changes = state.changes(replace(CONFIG, train=TrainConfig(optimizer="muon")), CPU)
    assert changes == ["train.optimizer was 'adamw' and is 'muon'"]
    with pytest.raises(ConfigError, match=r"is 'muon', whose state step \d+ does not have. Go on with what it was, or"):
        state.check(changes, changes)


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
