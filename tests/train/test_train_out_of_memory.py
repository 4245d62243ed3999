"""A step that runs out of GPU memory: one typed error, and what can be saved is saved first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from small_commands import IMMEDIATE, PLACES, command, metrics
from torch import Tensor

from megatier.cli import main
from megatier.engine.gradient import Gradients
from megatier.optim.optimizer import RunOptimizer

SAID = "CUDA out of memory. Tried to allocate 3.20 GiB"
RUN: dict[str, Any] = {"train.steps": 4, "output.checkpoint_every": 0}


@contextmanager
def short_of_memory(unit: str, step: int) -> Iterator[None]:
    """The backward of a unit finds no memory in one step."""
    current, begin, add = [0], RunOptimizer.begin_step, Gradients.add

    def begin_step(self: RunOptimizer, number: int, rate: float) -> None:
        current[0] = number
        begin(self, number, rate)

    def short(self: Gradients, name: str, parts: list[tuple[str, Tensor | None]]) -> None:
        if (name, current[0]) == (unit, step):
            raise torch.OutOfMemoryError(SAID)
        add(self, name, parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunOptimizer, "begin_step", begin_step)
        patch.setattr(Gradients, "add", short)
        yield


@pytest.mark.parametrize("place", ["gpu", "gpu_ram_nvme"])
def test_train_that_runs_out_of_gpu_memory_saves_the_last_whole_step_and_goes_on_to_the_same_bits(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**RUN, **PLACES[place], "tiers.nvme": f"{tmp_path}:16MiB"}
    with short_of_memory("model.layers.1", 3):
        assert main(command(tmp_path, settings)) == 2
    said = capsys.readouterr()
    error = " ".join(said.err.split())
    assert "step 3 ran out of GPU memory (CUDA out of memory). Resume the run with a lower tiers.gpu" in error
    assert "or model.saved_share" in error
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000002"]
    assert "goes on from" in " ".join(said.out.split())

    assert main(["resume", str(tmp_path / "run")]) == 0
    assert [record["step"] for record in metrics(tmp_path) if "loss" in record] == [1, 2, 3, 4]
    whole = tmp_path / "whole"
    whole.mkdir()
    assert main(command(whole, {**RUN, **PLACES["gpu"]})) == 0
    model = "run/model/model.safetensors"
    assert (tmp_path / model).read_bytes() == (whole / model).read_bytes()


@pytest.mark.parametrize(("step", "settings"), [(1, {}), (3, IMMEDIATE)], ids=["first step", "immediate"])
def test_train_that_runs_out_of_gpu_memory_saves_nothing_that_is_not_a_step(
    step: int, settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing was learnt yet, or units that were updated inside the backward are a step ahead."""
    with short_of_memory("model.layers.1", step):
        assert main(command(tmp_path, {**RUN, **settings, "tiers.state": "ram"})) == 2
    said = capsys.readouterr()
    assert f"step {step} ran out of GPU memory" in said.err
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))
    assert ("no checkpoint" in said.out) is bool(settings)
