"""Files of a config: what is no YAML, too large or too deep is refused, and says why."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest
from test_config_schema import LEAST, YAML, least

from megatier.config.file import load
from megatier.errors import ConfigError

UNFOLDING = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 30))
"""Thirty lines that stand for 10^29 values."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {stesp: 3}", r"bad\.yaml: unknown setting train\.stesp; did you mean train\.steps\?"),
        ("trainn: {steps: 3}", r"bad\.yaml: unknown setting trainn; did you mean train\?"),
        ("train: 3", r"train is a section, so `key: value` lines belong below it; found 3"),
        ("[1, 2]", r"must hold sections"),
        ("", r"bad\.yaml is empty; it must hold sections"),
        ("train: {steps: [", r"is no valid YAML: .*line 1, column 17"),
        ("train: {steps: true}", r"train\.steps is True; it must be a whole number below 2\*\*63"),
        ("tiers: {ram: 1.5}", r"tiers\.ram is 1\.5, and a number without a unit is bytes"),
        ("tiers: {nvme: [1]}", r"tiers\.nvme is \[1\]; it must be a list of text"),
        ("train: {steps: null}", r"train\.steps is null; it must be a whole number below 2\*\*63"),
        ("train:\n  steps: 1\n  lr: 2\n  steps: 3", r"is no valid YAML: steps is given twice, again in line 4"),
        ("train: {steps: 1}\ntrain: {batch: 8}", r"train is given twice, again in line 2"),
        ("model: {config: {a: 1, a: 2}}", r"a is given twice, again in line 1"),
        ("tiers: {nvme: null}", r"tiers\.nvme is null"),
        ("train: {steps: !!timestamp x}", r"is no valid YAML"),
        (
            f"train: {{learning_rate: {'9' * 400}}}",
            r"train\.learning_rate is 9+\.\.\.; it must be a finite number",
        ),
        (f"train: {{steps: {'9' * 5000}}}", r"is no valid YAML: Exceeds the limit"),
        ("[" * 5000, r"is no valid YAML: it has more than .* 50 nested levels"),
        ("train: &a [*a]", r"is no valid YAML: it has more than 100000 values, .* or 50 nested levels"),
        (UNFOLDING, r"is no valid YAML: it has more than 100000 values"),
        ("{zero_optimization: {stage: 3}, train_batch_size: 8}", r"megatier convert .*bad\.yaml --output run\.yaml"),
        (
            UNFOLDING.replace("[*", "{<<: [*").replace("]\n", "]}\n"),
            r"is no valid YAML: it has more than 100000 values",
        ),
    ],
)
def test_load_bad_file_says_why(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        load(path, LEAST)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["12:30:00", "010"])
def test_load_number_in_another_base_is_refused_and_stays_text_in_a_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"train: {{steps: {text}, warmup_steps: 3}}\n")
    message = rf"train\.steps is '{text}'; it must be a whole number"
    with pytest.raises(ConfigError, match=message):
        load(path, LEAST)
    with pytest.raises(ConfigError, match=message):
        least(f"--train.steps={text}")
    path.write_text(f"output: {{directory: {text}}}\nmodel: {{config: {{model_type: llama, a: {text}}}}}\n")
    config = load(path, LEAST)
    assert (config.output.directory, (config.model.config or {})["a"]) == (text, text)


@pytest.mark.parametrize("text", ["train:", "train:\n", "train:\n  # steps: 3\n", "model:\ntrain:\n", "{}"])
def test_load_file_of_empty_sections_has_the_defaults(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert load(path, LEAST) == least()


def test_load_missing_file_says_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.yaml: No such file"):
        load(tmp_path / "none.yaml")


def test_load_binary_file_says_no_yaml(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="no valid YAML"):
        load(path)


def test_load_of_a_file_with_a_bit_flipped_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for bit in range(0, 8 * len(YAML), 11):
        harmed = bytearray(YAML.encode())
        harmed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(harmed)
        with contextlib.suppress(ConfigError):
            load(path, [])


def test_load_aliases_of_a_long_text_are_counted_by_their_characters(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(f"a: &a {'x' * 50_000}\nb: [{'*a, ' * 100}]\n")
    with pytest.raises(ConfigError, match=r"bad\.yaml is no valid YAML: it has more than .* 4194304 characters"):
        load(path)


def test_load_file_of_any_size_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(ConfigError, match=r"bad\.yaml has more than 1\.0 MiB"):
        load(path)


def test_load_of_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no regular file"):
        load(tmp_path)


def test_load_takes_a_pipe_that_the_user_named(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(
        target=path.write_text, args=["train: {steps: 7}\nmodel: {path: m}\ndata: {files: [a]}\n"]
    )
    writer.start()
    assert load(path).train.steps == 7
    writer.join()


def test_load_wrong_value_as_long_as_a_file_makes_a_short_message(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(f"train: {'x' * 500_000}\n")
    with pytest.raises(ConfigError, match="train is a section") as caught:
        load(path)
    assert len(str(caught.value)) < 1000
