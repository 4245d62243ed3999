"""Figures for TensorBoard: under the names of `metrics.jsonl`, through a stop, and refused where nothing takes them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from small_commands import command, metrics

from megatier.cli import main
from megatier.errors import ConfigError
from megatier.report.tensorboard import ScalarEvents


def scalars(folder: Path) -> dict[str, Any]:
    """Lists of (step, value) by name, as TensorBoard shows them."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_train_writes_every_figure_of_a_step_for_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    assert main(command(tmp_path, {"output.tensorboard": True, "tiers.state": "ram", "tiers.gpu": "512KiB"})) == 0
    found, records = scalars(tmp_path / "run" / "tensorboard"), metrics(tmp_path)
    assert found["loss"] == [(r["step"], pytest.approx(r["loss"])) for r in records if "loss" in r]
    assert found["heldout_loss"] == [(3, pytest.approx(records[-1]["heldout_loss"]))]
    assert [step for step, _ in found["moved_bytes/ram_to_gpu"]] == [1, 2, 3]
    assert "step" not in found
    assert not any(name.startswith("homes") for name in found)


def test_scalars_of_a_process_that_goes_on_hide_later_steps_of_the_one_before(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for first, losses in ((1, (5.0, 4.0, 3.0)), (3, (2.0,))):
        with ScalarEvents(tmp_path, first) as writer:
            for step, loss in enumerate(losses, first):
                writer.write({"step": step, "loss": loss})
    assert scalars(tmp_path)["loss"] == [(1, 5.0), (2, 4.0), (3, 2.0)]


def test_scalars_that_cannot_be_written_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write to .*file/a: Not a directory"):
        ScalarEvents(tmp_path / "file" / "a", 1)

    def full(*words: Any) -> None:
        raise OSError(28, "No space left on device")

    with ScalarEvents(tmp_path / "events", 1) as writer:
        monkeypatch.setattr(writer._writer, "add_scalar", full)
        with pytest.raises(ConfigError, match=r"cannot write to .*events: No space left on device\. "):
            writer.write({"step": 1, "loss": 2.0})


def test_train_without_tensorboard_installed_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert main(command(tmp_path, {"output.tensorboard": True})) == 2
    message = capsys.readouterr().err
    assert message.startswith("megatier: error: output.tensorboard, or output.report_to, needs tensorboard (")
    assert message.endswith("pip install 'megatier[tensorboard]', or leave it out.\n")
    assert not (tmp_path / "run").exists()
