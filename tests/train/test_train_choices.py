"""What a run decides before it begins: how long its sequences are where the model's positions end, how many steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_commands import command
from tiny_models import FAMILIES, tiny_config
from transformers import AutoModelForCausalLM

from megatier.cli import main
from megatier.config.data_section import DataConfig
from megatier.config.file import load
from megatier.config.schema import ModelConfig, RunConfig
from megatier.errors import ConfigError
from megatier.models.decoder import build_skeleton
from megatier.models.limits import has_position_table, max_positions
from megatier.train.choices import check_positions, fit_positions

GIVEN = frozenset({"data.sequence_length"})


def run_config(length: int) -> RunConfig:
    data = DataConfig(files=("python-stdlib",), tokenizer="bytes", sequence_length=length)
    return RunConfig(model=ModelConfig(config={"model_type": "gpt2"}), data=data)


def test_sequences_beyond_a_table_of_positions_are_refused_if_given_and_cut_if_not() -> None:
    model = build_skeleton(tiny_config("gpt2"), "eager")
    assert max_positions(model.config) == 128
    assert fit_positions(run_config(128), GIVEN, model.config) == run_config(128)
    check_positions(run_config(128), model)
    with pytest.raises(
        ConfigError, match=r"is 129, but the model looks up positions in a table of 128 .* to 128 or less"
    ):
        check_positions(fit_positions(run_config(129), GIVEN, model.config), model)
    assert fit_positions(run_config(1024), frozenset(), model.config) == run_config(128)


def test_sequences_beyond_rotary_positions_are_taken_if_given() -> None:
    model = build_skeleton(tiny_config("llama"), "eager")
    assert fit_positions(run_config(129), GIVEN, model.config) == run_config(129)
    check_positions(run_config(129), model)
    assert fit_positions(run_config(1024), frozenset(), model.config) == run_config(128)


@pytest.mark.parametrize("family", sorted({"gpt2", "llama", "gpt_neo", "opt", "gptj", "bloom", "xglm"} & {*FAMILIES}))
def test_position_table_is_found_where_a_longer_sequence_fails(family: str) -> None:
    config = tiny_config(family)
    model = AutoModelForCausalLM.from_config(config)
    tokens = torch.zeros(1, (max_positions(config) or 64) + 1, dtype=torch.long)
    if has_position_table(build_skeleton(config, "eager")):
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=tokens)
    else:
        model(input_ids=tokens)


@pytest.mark.parametrize("word", ["train", "plan"])
def test_command_with_sequences_beyond_a_table_of_positions_is_refused(
    word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpt2 = {"model.config.model_type": "gpt2", "model.config.n_positions": 16, "data.sequence_length": 32}
    words = command(tmp_path, gpt2)
    words = [item for item in words if "max_position" not in item]
    (tmp_path / "empty.yaml").write_text("train: {}")
    assert main([word, str(tmp_path / "empty.yaml"), *words[1:]]) == 2
    assert "data.sequence_length is 32, but the model looks up positions in a table of 16" in capsys.readouterr().err


def test_train_by_epochs_of_the_file_ends_at_steps_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "epochs.yaml").write_text("train: {epochs: 1.0}")
    words = command(tmp_path, {"train.steps": 2})
    assert main([words[0], str(tmp_path / "epochs.yaml"), *words[1:]]) == 0
    said = capsys.readouterr().out
    assert "and train.steps is 2: the smaller one ends the run, after 2 steps." in said
    assert "step 2/2" in said
    made = load(tmp_path / "run" / "config.yaml").train
    assert (made.steps, made.epochs) == (2, None)


def test_train_by_epochs_counts_its_steps_and_says_how_much_text_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command(tmp_path, {"train.epochs": 0.1, "train.steps": None})
    assert main(words) == 0
    said = capsys.readouterr().out
    made = load(tmp_path / "run" / "config.yaml")
    assert made.train.epochs is None
    assert f"step {made.train.steps}/{made.train.steps}" in said
    assert f"and {made.train.steps} steps are 0.1" in said
    assert main(["resume", str(tmp_path / "run"), "--train.epochs", "2", "--output.export", "false"]) == 2


@pytest.mark.parametrize(
    ("epochs", "said"),
    [
        (0.0, "train.epochs is 0.0; it must be above 0"),
        (-1.0, "train.epochs is -1.0; it must be above 0"),
        (float("inf"), "train.epochs is inf"),
    ],
)
def test_epochs_that_are_no_number_of_times_are_refused(epochs: float, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(run_config(8).train, epochs=epochs)
    with pytest.raises(ConfigError, match=r"null with data\.streaming, whose end is not known"):
        stream = DataConfig(dataset="a/b", streaming=True, tokenizer="bytes")
        replace(run_config(8), data=stream, train=replace(run_config(8).train, epochs=1))
