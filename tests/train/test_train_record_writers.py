"""Runs whose records cannot be written: they save what they have, and go on to the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from small_commands import after_step, command, metrics, outcome

from megatier.cli import main
from megatier.errors import ConfigError
from megatier.report import metrics as report_metrics
from megatier.report.metrics import MetricsLog

SIX: dict[str, Any] = {"train.steps": 6}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Losses and weights of a run that saves nothing."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(command(folder, {**SIX, "output.checkpoint_every": 0})) == 0
    return outcome(folder / "run")


def refuse_record(*_: object) -> None:
    raise ConfigError("cannot write metrics.jsonl: No space left on device.")


def fill_drive(patch: pytest.MonkeyPatch) -> None:
    """From here on the drive takes no record."""
    patch.setattr(report_metrics, "refusing", refuse_record)


@pytest.mark.parametrize(("every", "kept"), [(0, [4]), (3, [3, 4])])
def test_run_whose_records_cannot_be_written_saves_its_last_step_and_goes_on_to_the_same_bits(
    every: int, kept: list[int], tmp_path: Path, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint that is on its way is waited for."""
    with after_step(3, lambda: fill_drive(patch)), pytest.MonkeyPatch.context() as patch:
        assert main(command(tmp_path, {**SIX, "output.checkpoint_every": every, "output.keep_checkpoints": 3})) == 2
    said = capsys.readouterr()
    assert "No space left on device." in said.err
    assert f"stopped; `megatier resume {tmp_path / 'run'}` goes on" in said.out
    saved = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert [int(path.name.removeprefix("step-")) for path in saved] == kept

    assert main(["resume", str(tmp_path / "run")]) == 0
    assert outcome(tmp_path / "run")["weights"] == whole["weights"]
    assert [record["step"] for record in metrics(tmp_path) if "loss" in record] == [1, 2, 3, 5, 6]


def test_run_whose_records_are_refused_for_a_moment_writes_all_of_them_and_does_not_end(
    tmp_path: Path, whole: dict[str, Any]
) -> None:
    """An evaluation's record comes after that of its step, before the loop looks."""
    with pytest.MonkeyPatch.context() as patch:
        real = MetricsLog.write
        num_refused = [0]

        def write(self: MetricsLog, record: Mapping[str, object]) -> None:
            if record["step"] == 6 and num_refused[0] == 0:
                num_refused[0] += 1
                refuse_record()
            real(self, record)

        patch.setattr(MetricsLog, "write", write)
        assert main(command(tmp_path, {**SIX, "output.checkpoint_every": 0})) == 0
    assert outcome(tmp_path / "run") == whole


def test_run_whose_last_records_cannot_be_written_is_exported_all_the_same(
    tmp_path: Path, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with after_step(6, lambda: fill_drive(patch)), pytest.MonkeyPatch.context() as patch:
        assert main(command(tmp_path, {**SIX, "output.checkpoint_every": 0})) == 2
    assert "No space left on device." in capsys.readouterr().err
    assert outcome(tmp_path / "run") == whole
