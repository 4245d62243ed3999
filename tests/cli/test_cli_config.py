"""`megatier config show`: all settings, and where they come from."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatier import hardware
from megatier.cli import config, main
from megatier.config import file as config_file
from megatier.config import text as config_text
from megatier.config.schema import CONFIG_SECTIONS
from megatier.config.values import parse_bytes
from megatier.measure.probe import cache_rates
from megatier.schedule.drive_rates import DriveRates
from megatier.schedule.rates_file import read_rates

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.yaml"


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["config", "show", *words]) == 0
    return capsys.readouterr().out


def remark(text: str, key: str) -> str | None:
    (line,) = [line for line in text.splitlines() if line.strip().startswith(f"{key}:")]
    return line.partition("  # ")[2] or None


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (hardware, config):
        monkeypatch.setattr(module, "gpus", tuple)


def test_config_show_json_has_settings_and_their_sources(capsys: pytest.CaptureFixture[str], no_gpu: None) -> None:
    document = json.loads(shown(capsys, str(QUICKSTART), "--json", "--train.steps=70", "--tiers.ram=null"))
    assert document.keys() == {"settings", "sources"}
    assert document["settings"]["train"]["steps"] == 70
    assert document["settings"]["tiers"]["ram"] > 0
    sources = document["sources"]
    names = ("train.steps", "train.groups", "tiers.ram")
    assert [sources[name] for name in names] == ["given", "default", "from this machine"]
    assert sources.keys() == {f"{name}.{key}" for name, keys in document["settings"].items() for key in keys}


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_config_show_is_the_same_config_again(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_gpu: None
) -> None:
    again = tmp_path / "all.yaml"
    again.write_text(shown(capsys, str(path)))
    was, now = config_file.load(path), config_file.load(again)
    assert (now.model.config, now.train, now.data, now.output) == (was.model.config, was.train, was.data, was.output)
    assert (now.tiers.gpu, now.tiers.ram, now.tiers.nvme) == (was.tiers.gpu, was.tiers.ram, was.tiers.nvme)
    found = yaml.safe_load(again.read_text())
    assert {name: list(keys) for name, keys in found.items()} == {
        name: list(section.__dataclass_fields__) for name, section in CONFIG_SECTIONS.items()
    }


def test_config_show_marks_where_settings_come_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_gpu: None
) -> None:
    monkeypatch.setattr(config, "default_budgets", lambda device: hardware.DefaultBudgets(1 << 30, 3 << 30))
    words = ["--model.path=m", "--data.files", "texts", "--train.steps=7", "--tiers.nvme", "/mnt/a:5GiB"]
    text = shown(capsys, *words)
    assert "  steps: 7\n" in text
    assert "  nvme: ['/mnt/a:5GiB']\n" in text
    assert remark(text, "batch") == "default"
    assert remark(text, "ram") == "from this machine, 3.0 GiB"
    assert "  gpu: 1GiB  # from this machine, 1.0 GiB\n" in text
    assert "  device: cpu  # from this machine\n" in text
    assert "  compile: false  # from this machine\n" in text
    assert remark(shown(capsys, *words, "--tiers.ram", "2GiB"), "ram") is None


def test_config_show_takes_io_threads_as_a_run_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_gpu: None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = [str(QUICKSTART), "--tiers.nvme", str(tmp_path)]
    assert "  io_threads: 4  # from this machine\n" in shown(capsys, *words)
    drive = DriveRates(
        directory=str(tmp_path), read_bytes_per_s=1e9, write_bytes_per_s=1e9, mixed_bytes_per_s=1e9, io_threads=16
    )
    cache_rates(replace(read_rates(ROOT / "examples/machines/h200.yaml"), drives=(drive,)), "cpu")
    assert "  io_threads: 16  # from this machine\n" in shown(capsys, *words)
    assert "  io_threads: 7\n" in shown(capsys, *words, "--tiers.io_threads=7")
    assert "  io_threads: null  # default\n" in shown(capsys, *words, "--tiers.nvme=")


@pytest.mark.parametrize("name", ["2e-5", "no", "a: b", "ünïcode"])
def test_config_show_keeps_names_that_look_like_something_else(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_gpu: None
) -> None:
    source, again = tmp_path / "source.yaml", tmp_path / "again.yaml"
    source.write_text(json.dumps({"model": {"path": name}, "data": {"files": [name], "text_field": name}}))
    again.write_text(shown(capsys, str(source)), encoding="utf-8")
    found = config_file.load(again)
    assert (found.model.path, found.data.files, found.data.text_field) == (name, (name,), name)


def test_config_show_of_a_gpu_that_is_not_here_leaves_its_budgets_open(
    capsys: pytest.CaptureFixture[str], no_gpu: None
) -> None:
    text = shown(capsys, str(QUICKSTART), "--tiers.device", "cuda", "--tiers.update_threads", "null")
    assert "  compile: true  # from this machine\n" in text
    assert "  update_threads: null\n" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", str(QUICKSTART), "--train.stesp", "3"], "did you mean train.steps?"),
        (["show", str(QUICKSTART), "--train.batch", "0"], "train.batch is 0; it must be at least 1"),
        (["show", "none.yaml"], "cannot read none.yaml"),
    ],
)
def test_config_show_of_a_bad_config_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", *words]) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert message in error


def test_config_show_of_a_converted_config(tmp_path: Path, capsys: pytest.CaptureFixture[str], no_gpu: None) -> None:
    source, made = ROOT / "examples" / "convert" / "megatrain.yaml", tmp_path / "run.yaml"
    assert main(["convert", str(source), "--output", str(made)]) == 0
    capsys.readouterr()
    text = shown(capsys, str(made))
    assert remark(text, "learning_rate") is None
    assert remark(text, "slices") == "default"


@pytest.mark.parametrize("num_bytes", [1, 1000, 1024, 17 << 20, 3 << 30, (3 << 30) + 1, 1 << 40])
def test_exact_size_is_exact(num_bytes: int) -> None:
    assert parse_bytes(str(config_text.exact_size(num_bytes))) == num_bytes


def test_config_show_of_a_pipe_reads_it_once(capsys: pytest.CaptureFixture[str], no_gpu: None) -> None:
    reading, writing = os.pipe()
    os.write(writing, QUICKSTART.read_bytes())
    os.close(writing)
    try:
        assert shown(capsys, f"/dev/fd/{reading}", "--json") == shown(capsys, str(QUICKSTART), "--json")
    finally:
        os.close(reading)


def test_options_are_written_as_the_command_line_reads_them() -> None:
    settings = {"train.kept_attention": False, "train.clip": None, "tiers.gpu": 3 << 30, "train.slices": 2}
    words = config_text.format_options(settings)
    assert words == "--train.kept_attention false --train.clip null --tiers.gpu 3GiB --train.slices 2"
