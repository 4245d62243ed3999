"""Whatever is wrong with the input: one message that tells the remedy, exit code 2, nothing of the user's touched."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_commands import MODEL, command, leftovers, metrics
from small_drive import NO_NAMESPACES
from test_train_numbers import saved_model
from warm_python import WarmPython

from megatier.cli import main
from megatier.errors import ConfigError, PlanError

MAIN = "import sys; from megatier.cli import main; sys.exit(main(sys.argv[1:]))"


RUN_AS_MAIN = [sys.executable, "-c", MAIN]


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[dict[str, Any]], str]:
    """Runs a command that must be refused; gives its message."""

    def run(settings: dict[str, Any]) -> str:
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "notes.txt").write_text("mine")
        capsys.readouterr()
        words = command(tmp_path, settings)
        before = tree(tmp_path)
        assert main(words) == 2
        message = capsys.readouterr().err
        assert re.fullmatch(r"megatier: error: .+\n", message), message
        assert "Traceback" not in message
        assert list(leftovers(tmp_path)) == []
        after = tree(tmp_path)
        assert {path: after.get(path) for path in before} == before, "something of the user's was touched"
        return message

    return run


def tree(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"train.learning_rte": 0.1}, "did you mean train.learning_rate?"),
        ({"train.steps": "many"}, "train.steps is 'many'; it must be a whole number"),
        ({"tiers.ram": "12 parsecs"}, "tiers.ram"),
        ({"tiers.ram": "100PiB"}, "tiers.ram is 102400.0 TiB, but this machine, or its container, has "),
        ({"train.batch": 3, "train.groups": 2}, "multiple of groups"),
        ({"tiers.state": "ram,cloud"}, "tiers.state"),
        ({"data.tokenizer": None}, "data.tokenizer"),
        ({"model.config.model_type": "llamma"}, "Did you mean llama?"),
        ({"model.config.num_attention_heads": 5}, "5"),
        ({"model.config.hidden_size": "wide"}, "hidden_size"),
        ({"model.config.hiddn_size": 64}, "Did you mean hidden_size?"),
        ({"model.config.num_hidden_layers": 0}, "Layer"),
        ({"model.config.hidden_act": "none such"}, "none such"),
        ({"model.config.vocab_size": 200}, "tokens up to 256"),
    ],
)
def test_train_bad_setting_is_refused(
    settings: dict[str, Any], expected: str, refused: Callable[[dict[str, Any]], str]
) -> None:
    assert expected in refused(settings)


@pytest.mark.parametrize("model_type", ["t5", "bert", "vit", "mamba", "rwkv", "clip"])
def test_train_unsupported_architecture_is_refused(model_type: str, tmp_path: Path, capsys: Any) -> None:
    given = {f"model.config.{key}": None for key in MODEL} | {"model.config.model_type": model_type}
    assert main(command(tmp_path, given)) == 2
    message = capsys.readouterr().err
    assert re.fullmatch(r"megatier: error: .+\n", message), message
    assert list(leftovers(tmp_path)) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_train_cuda_without_a_gpu_is_refused(refused: Callable[[dict[str, Any]], str]) -> None:
    assert "torch sees no GPU" in refused({"tiers.device": "cuda"})


# ---------------------------------------------------------------------- budgets and drives


def test_train_too_small_a_gpu_budget_states_a_minimum_that_works(
    tmp_path: Path, refused: Callable[[dict[str, Any]], str]
) -> None:
    settings = {"tiers.gpu": "10KiB", "tiers.state": "ram", "output.directory": str(tmp_path / "other")}
    message = refused(settings)
    assert re.search(r"largest unit, model\.\S+: needs \S+ \S+, there is 10.0 KiB", message), message
    least = stated_minimum(message, "tiers.gpu")
    assert main(command(tmp_path, {**settings, "tiers.gpu": least})) == 0, "the same directory, nothing in its way"


@pytest.mark.parametrize("clip", [1.0, "null"])
@pytest.mark.parametrize("mounted", [False, True])
def test_train_too_small_a_ram_budget_states_minima_that_work(
    clip: object, mounted: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {"tiers.gpu": "512KiB", "tiers.ram": "4KiB", "tiers.state": "ram,nvme"}
    settings |= {"train.groups": 2, "train.clip": clip, "numerics.guard": clip != "null"}
    if mounted:
        settings["tiers.nvme"] = f"{tmp_path}:4MiB"
    for _ in range(3):  # gradients, then slots for updates: each is named on its own
        if main(command(tmp_path, settings)) == 0:
            break
        settings["tiers.ram"] = stated_minimum(capsys.readouterr().err, "tiers.ram")
    else:
        pytest.fail("no stated minimum was enough")


def test_train_budgets_that_are_all_too_small_are_named_in_one_message(
    tmp_path: Path, refused: Callable[[dict[str, Any]], str]
) -> None:
    settings = {"tiers.gpu": "2KiB", "tiers.ram": "2KiB", "tiers.state": "ram,nvme", "tiers.nvme": f"{tmp_path}:4KiB"}
    message = refused(settings)
    assert message.count("there is 2.0 KiB") == 2
    for setting in ("tiers.gpu", "tiers.ram"):
        settings[setting] = stated_minimum(message, setting)
    found = re.search(r"Besides, state on NVMe: needs (\S+) (\S+), there is 4\.0 KiB", message)
    assert found is not None, message
    settings |= {"tiers.nvme": f"{tmp_path}:{found[1]}{found[2]}", "output.directory": str(tmp_path / "other")}
    assert main(command(tmp_path, {**settings, "train.steps": 1})) == 0


def stated_minimum(message: str, setting: str) -> str:
    found = re.search(rf"Raise {setting} to at least ([\d.]+ [KMG]?i?B)", message)
    assert found is not None, message
    return found[1]


def test_train_too_small_an_nvme_budget_is_refused(tmp_path: Path, refused: Callable[[dict[str, Any]], str]) -> None:
    message = refused({"tiers.state": "nvme", "tiers.nvme": f"{tmp_path}:100KiB"})
    assert "state on NVMe: needs 624.0 KiB, there is 100.0 KiB" in message


def test_train_without_any_room_for_state_is_refused(refused: Callable[[dict[str, Any]], str]) -> None:
    assert "give tiers.nvme a mount" in refused({"tiers.state": "nvme"})


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm here")
def test_train_mount_in_ram_is_refused(refused: Callable[[dict[str, Any]], str]) -> None:
    message = refused({"tiers.state": "nvme", "tiers.nvme": "/dev/shm:4MiB"})
    assert (
        "tiers.nvme: files in /dev/shm lie in RAM (tmpfs on /dev/shm), outside tiers.ram. Name a directory" in message
    )
    assert not [path for path in Path("/dev/shm").iterdir() if path.name.startswith("megatier-")]


ON_SMALL_DRIVE = """
import os, sys
from small_drive import mount_small_drive
from megatier import hardware
from megatier.cli import main
mount_small_drive(*sys.argv[1:3])
hardware.MEMORY_FILE_SYSTEMS.clear()  # a tmpfs counts as a drive
os.posix_fallocate = lambda *_: sys.exit("filled the disk")
code = main(sys.argv[3:])
print(os.listdir(sys.argv[1]))
sys.exit(code)
"""


@pytest.fixture
def on_small_drive(tmp_path: Path, python: WarmPython) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command where `drive` is a small one."""

    def run(options: str, settings: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        drive = tmp_path / "drive"
        drive.mkdir()
        done = python.run(["-c", ON_SMALL_DRIVE, drive, options, *command(tmp_path, settings)])
        if done.returncode == NO_NAMESPACES:
            pytest.skip("no mount namespaces for this user")
        return done

    return run


def test_train_disk_smaller_than_its_mount_budget_is_refused_before_it_is_full(
    tmp_path: Path, on_small_drive: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = on_small_drive("size=400k", {"tiers.state": "nvme", "tiers.nvme": f"{tmp_path / 'drive'}:1GiB"})
    assert done.returncode == 2, done.stderr
    expected = r"megatier: error: tiers.nvme gives .*drive 1.0 GiB, but its drive has 400.0 KiB in all\. .*\n"
    assert re.fullmatch(expected, done.stderr), done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_train_read_only_file_system_is_refused(
    tmp_path: Path, on_small_drive: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = on_small_drive("ro", {"output.directory": f"{tmp_path / 'drive'}/run"})
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(r"megatier: error: .*drive.*Read-only file system.*\n", done.stderr), done.stderr


def test_train_read_only_mount_is_refused(
    tmp_path: Path, on_small_drive: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    drive = tmp_path / "drive"
    done = on_small_drive("ro", {"tiers.state": "nvme", "tiers.nvme": f"{drive}:1MiB"})
    assert done.returncode == 2, done.stderr
    expected = (
        f"megatier: error: cannot use {drive}: Read-only file system. Name a directory that exists and is yours.\n"
    )
    assert done.stderr == expected


# ---------------------------------------------------------------------- paths


@pytest.mark.parametrize("setting", ["data.files", "model.path", "tiers.nvme"])
def test_train_missing_path_is_refused(setting: str, tmp_path: Path, refused: Callable[[dict[str, Any]], str]) -> None:
    assert "none/such" in refused({setting: f"{tmp_path}/none/such"})


@pytest.mark.parametrize("setting", ["output.directory", "tiers.nvme"])
@pytest.mark.parametrize("below", [True, False])
def test_train_file_where_a_directory_belongs_is_refused(
    setting: str, below: bool, tmp_path: Path, refused: Callable[[dict[str, Any]], str]
) -> None:
    (tmp_path / "file").write_text("mine")
    assert "file" in refused({setting: f"{tmp_path}/file/deeper" if below else f"{tmp_path}/file"})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do everything")
@pytest.mark.parametrize("setting", ["output.directory", "tiers.nvme", "data.files"])
def test_train_without_permission_is_refused(
    setting: str, tmp_path: Path, refused: Callable[[dict[str, Any]], str]
) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555 if setting != "data.files" else 0)
    assert "ermission denied" in refused({setting: f"{locked}/run" if setting == "output.directory" else str(locked)})
    locked.chmod(0o755)


def test_train_rerun_in_a_finished_runs_directory_is_refused(
    tmp_path: Path, refused: Callable[[dict[str, Any]], str]
) -> None:
    assert main(command(tmp_path)) == 0
    assert "holds a run already" in refused({})


def test_train_folder_without_weights_is_refused(tmp_path: Path, refused: Callable[[dict[str, Any]], str]) -> None:
    source = tmp_path / "source"
    saved_model(source, torch.float32)
    (source / "model.safetensors").unlink()
    settings = {"model.path": str(source), "data.tokenizer": None, "tiers.ram": "16MiB"}
    assert "model.safetensors" in refused(settings)
    (source / "config.json").write_text("{")
    assert "config" in refused(settings)
    (source / "config.json").unlink()
    assert "config" in refused(settings)


# ---------------------------------------------------------------------- data


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("empty.txt", "", "no text"),
        ("short.txt", "too short", "less than one sequence"),
        ("bad.jsonl", '{"text": "fine"}\n{"text": \n', "bad.jsonl, line 2: no valid JSON"),
        ("key.jsonl", '{"body": "fine"}\n', "no text under 'text'"),
    ],
)
def test_train_bad_data_is_refused(
    name: str, content: str, expected: str, tmp_path: Path, refused: Callable[[dict[str, Any]], str]
) -> None:
    (tmp_path / name).write_text(content)
    assert expected in refused({"data.files": str(tmp_path / name)})


# ---------------------------------------------------------------------- numbers that are not finite


UNGUARDED: list[dict[str, Any]] = [
    {"train.clip": 1.0, "numerics.max_skips": 0},
    {"train.clip": 1.0, "numerics.guard": False},
    {"train.clip": "null", "numerics.guard": False},
]
"""The first step that is not finite ends the run."""


@pytest.mark.parametrize("mode", UNGUARDED)
@pytest.mark.parametrize(
    ("weight", "unit"),
    [
        ("model.layers.1.mlp.up_proj.weight", "model.layers.1"),
        ("model.norm.weight", "model.norm"),
        ("lm_head.weight", "lm_head"),
    ],
)
def test_train_nan_in_a_checkpoint_stops_and_names_step_and_unit_alone(
    weight: str, unit: str, mode: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    saved_model(source, torch.float32)
    capsys.readouterr()
    weights = load_file(source / "model.safetensors")
    weights[weight].view(-1)[7] = float("nan")
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    before = tree(source)
    settings = {"model.path": str(source), "data.tokenizer": None, "tiers.state": "ram", **mode}
    assert main(command(tmp_path, {**settings, "tiers.ram": "32MiB"})) == 2
    message = capsys.readouterr().err
    assert re.fullmatch(
        rf"megatier: error: the loss of step 1 is not finite; a weight of unit {re.escape(unit)} .*\n",
        message,
    ), message
    assert metrics(tmp_path) == []
    assert not (tmp_path / "run" / "model").exists()
    assert tree(source) == before
    assert list(leftovers(tmp_path)) == []


@pytest.mark.parametrize("mode", UNGUARDED)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_train_exploding_rate_stops_and_names_step_and_unit(
    mode: dict[str, Any], dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"train.learning_rate": 1e38, "train.steps": 9, "model.compute_dtype": dtype, **mode}
    waits = mode.get("train.clip") != "null" or mode.get("numerics.guard", True) is not False
    assert main(command(tmp_path, {**settings, "tiers.state": "nvme", "tiers.nvme": f"{tmp_path}:16MiB"})) == 2
    message = capsys.readouterr().err
    assert re.fullmatch(r"megatier: error: .*step \d.* (model\.\S+|lm_head\S*).*\n", message), message
    step = re.search(r"step (\d)", message)
    assert step is not None
    assert [record["step"] for record in metrics(tmp_path) if "loss" in record] == list(range(1, int(step[1])))
    saved = [path.name for path in tmp_path.glob("run/checkpoints/*")]
    assert saved == ([f"step-{int(step[1]):08d}"] if waits else []), "of weights that no bad step has touched"
    assert list(leftovers(tmp_path)) == []


def test_train_refused_with_debug_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        main([*command(tmp_path, {"train.steps": 0}), "--debug"])
    with pytest.raises(PlanError):
        main([*command(tmp_path, {"tiers.gpu": "10KiB"}), "--debug"])
    assert list(leftovers(tmp_path)) == []
