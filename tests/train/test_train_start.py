"""The point from which a run trains on: what it goes by there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from savepoint_runs import ended
from small_commands import command, outcome

from megatier.cli import main
from megatier.engine import unit_model


@pytest.mark.parametrize("saved", ["checkpoint", "savepoint"])
def test_run_that_is_resumed_goes_by_what_it_found_out_about_tiles(
    saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"model.tile_tokens": 20, "train.steps": 4}
    settings["output.export_dtype"] = "fp32"
    (tmp_path / "whole").mkdir()
    assert main(command(tmp_path / "whole", settings)) == 0
    run = ended(tmp_path / "stopped", {**settings, f"output.{saved}_every": 2}, step=4)

    # Tried again, all would run whole, and with other bits.
    monkeypatch.setattr(unit_model, "why_joined", lambda *_: "the test says so")
    assert main(["resume", str(run)]) == 0
    assert outcome(run) == outcome(tmp_path / "whole" / "run")
    with pytest.warns(UserWarning, match="runs whole, without tiles of tokens: the test says so"):
        assert main(command(tmp_path / "whole", {**settings, "output.directory": str(tmp_path / "other")})) == 0
    assert outcome(tmp_path / "other") != outcome(run)


def test_run_whose_checkpoints_are_gone_is_refused_and_goes_on_when_they_are_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if their drive was not mounted: then an empty folder lies in its place."""
    run = ended(tmp_path, {"train.steps": 6, "output.checkpoint_every": 2}, step=5)
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    folder = run / "checkpoints"
    folder.rename(tmp_path / "drive")
    folder.mkdir()
    capsys.readouterr()
    assert main(["resume", str(run)]) == 2
    errors = capsys.readouterr().err
    assert f"{folder} holds no checkpoint, but metrics.jsonl says that one was written after step" in errors
    assert {path: path.read_bytes() for path in run.iterdir() if path.is_file()} == before

    folder.rmdir()
    folder.symlink_to(tmp_path / "nowhere")
    assert main(["resume", str(run)]) == 2
    folder.unlink()
    (tmp_path / "drive").rename(folder)
    assert main(["resume", str(run)]) == 0
    assert "begins again" not in capsys.readouterr().out
