"""Small runs that make savepoints, ended by an error; their savepoints, harmed for a while."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from small_commands import after_step, command

from megatier.cli import main
from megatier.errors import ConfigError

NVME: dict[str, Any] = {"tiers.state": "nvme", "tiers.gpu": "512KiB"}
SPREAD: dict[str, Any] = {"tiers.state": "gpu,ram,nvme", "tiers.gpu": "360KiB", "tiers.ram": "800KiB"}
SPREAD_THRICE: dict[str, Any] = {**SPREAD, "tiers.ram": "1040KiB", "tiers.generations": 3}
STEPS = 7


def settings_of(folder: Path, tiers: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    (folder / "drive").mkdir(parents=True, exist_ok=True)
    return {
        "model.config.attention_dropout": 0.1,
        "model.config.num_hidden_layers": 6,
        "output.export_dtype": "fp32",
        "output.savepoint_every": 2,
        "tiers.generations": 2,
        "tiers.nvme": f"{folder / 'drive'}:64MiB",
        "train.clip": 1.65,  # some steps clip, most do not
        "train.learning_rate": 1e-3,
        "train.steps": STEPS,
        **tiers,
        **more,
    }


@contextlib.contextmanager
def ended_after(step: int) -> Iterator[None]:
    """An error ends the run."""

    def end() -> None:
        raise ConfigError("ended by the test")

    with after_step(step, end):
        yield


def ended(folder: Path, settings: Mapping[str, Any], step: int = 5) -> Path:
    """The directory of a run that an error ended after a step."""
    folder.mkdir(exist_ok=True)
    with ended_after(step):
        assert main(command(folder, settings)) == 2
    return folder / "run"


def ended_beside_a_checkpoint(folder: Path) -> Path:
    """The directory of a run that left a checkpoint of step 3 and a savepoint of step 5."""
    every = {"output.checkpoint_every": 3, "output.savepoint_every": 5}
    return ended(folder, settings_of(folder, SPREAD, **every), step=6)


def on_drive(folder: Path) -> list[str]:
    return sorted(path.name for directory in (folder / "drive").iterdir() for path in directory.iterdir())


def last(folder: Path) -> Path:
    return folder / "run" / "savepoints" / "step-00000005"


@contextlib.contextmanager
def put_back(path: Path) -> Iterator[None]:
    """A file may be harmed meanwhile."""
    raw = path.read_bytes()
    yield
    if path.is_symlink() or path.exists():
        path.unlink()
    path.write_bytes(raw)
    path.chmod(0o600)


def check_refused(folder: Path, words: str, capsys: pytest.CaptureFixture[str], *more: str) -> None:
    """Nothing is changed, and what is to be done instead is said."""
    before = (folder / "run" / "config.yaml").read_bytes()
    assert main(["resume", str(folder / "run"), *more]) == 2
    found = capsys.readouterr().err
    assert re.search(rf"cannot go on from its savepoint {last(folder)}: .*{words}", found), found
    assert f"(move that folder away) the run goes on from {folder / 'run' / 'checkpoints' / 'step-00000003'}." in found
    assert on_drive(folder)[-3:] == ["lock", "note.json", "savepoint"]
    assert (folder / "run" / "config.yaml").read_bytes() == before


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def link(path: Path) -> None:
    path.rename(path.with_name(".elsewhere"))
    path.symlink_to(path.with_name(".elsewhere"))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)
