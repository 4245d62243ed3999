"""Runs that their evaluations end, and the best checkpoint: exact however often they are stopped."""

from __future__ import annotations

import math
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from crossed import crossed
from small_commands import after_step, all_records, command, outcome

from megatier.cli import main
from megatier.models import export
from megatier.optim.gradient_sums import GradientSums
from megatier.report.report_page import build

EARLY: dict[str, Any] = {
    "train.steps": 12,
    "train.schedule": "constant",
    "train.learning_rate": 0.5,
    "train.evaluate_every": 1,
    "train.early_stopping_patience": 3,
}
"""The loss is lowest after step 3, and the run ends after step 6."""
BEST = {**EARLY, "output.load_best_model_at_end": True, "output.keep_checkpoints": 1}
WHY = "3 evaluations did not lower the held-out loss enough: the lowest is 7.1"


def after_steps(folder: Path, steps: int) -> dict[str, Any]:
    """Losses and weights of a run that ends after so many steps as any run does."""
    folder.mkdir()
    plain = {name: value for name, value in EARLY.items() if "early" not in name}
    assert main(command(folder, {**plain, "train.steps": steps})) == 0
    return outcome(folder / "run")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return after_steps(tmp_path_factory.mktemp("three") / "it", 3)


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return after_steps(tmp_path_factory.mktemp("six") / "it", 6)


def kept(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "run" / "checkpoints").iterdir())


def test_run_without_better_evaluations_ends_early_and_says_why(
    tmp_path: Path, six: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path, EARLY)) == 0
    assert outcome(tmp_path / "run") == six
    said = capsys.readouterr().out
    assert f"ended early after step 6: {WHY}" in said
    assert "step 6/12  loss" in said, "the last step has its line"
    *_, last = all_records(tmp_path)
    assert (last["step"], last["run"]) == (6, "early")
    assert last["why"].startswith(WHY)
    found = [record["num_worse"] for record in all_records(tmp_path) if "heldout_loss" in record]
    assert found == [0, 1, 0, 1, 2, 3]
    assert f"The run ended early, because {WHY}" in build(tmp_path / "run")


def test_threshold_ends_a_run_that_gets_better_by_too_little(tmp_path: Path) -> None:
    settings = {**EARLY, "train.early_stopping_threshold": 100.0, "train.early_stopping_patience": 2}
    assert main(command(tmp_path, settings)) == 0
    assert all_records(tmp_path)[-1]["step"] == 3


def test_best_model_is_exported_and_its_checkpoint_is_kept_besides_the_last(
    tmp_path: Path, three: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path, {**BEST, "output.checkpoint_every": 1})) == 0
    assert "the best model is that of step 3, with the held-out loss 7.1" in capsys.readouterr().out
    assert kept(tmp_path) == [3, 6]
    assert outcome(tmp_path / "run")["weights"] == three["weights"]

    # Later too, and another one if it is named.
    capsys.readouterr()
    weights = (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    for number, path in enumerate((tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-00000006")):
        assert main(["export", str(path), str(tmp_path / str(number))]) == 0
        assert ((tmp_path / str(number) / "model.safetensors").read_bytes() == weights) is (number == 0)
        best = "step 3 has the lowest held-out loss of the run, which went on to step 6"
        assert (best in capsys.readouterr().out) is (number == 0)


def test_best_model_of_the_last_step_needs_no_checkpoint(tmp_path: Path, three: dict[str, Any]) -> None:
    assert main(command(tmp_path, {**BEST, "train.steps": 3, "output.checkpoint_every": 0})) == 0
    assert outcome(tmp_path / "run") == three
    assert kept(tmp_path) == [1]


@pytest.mark.parametrize(("step", "every"), crossed([2, 3, 5], [0, "auto"], by=2))
def test_run_that_was_stopped_ends_where_it_would_have_ended(
    step: int, every: object, tmp_path: Path, three: dict[str, Any], six: dict[str, Any]
) -> None:
    with after_step(step, lambda: signal.raise_signal(signal.SIGINT)):
        assert main(command(tmp_path, {**BEST, "output.checkpoint_every": every})) == 0
    assert kept(tmp_path)[-1] == step
    assert main(["resume", str(tmp_path / "run")]) == 0
    assert all_records(tmp_path)[-1]["step"] == 6
    assert outcome(tmp_path / "run") == {"losses": six["losses"], "weights": three["weights"]}
    assert kept(tmp_path)[0] == 3


@pytest.mark.parametrize("more", [{}, {"output.load_best_model_at_end": True}], ids=["last", "best"])
def test_run_that_ended_early_and_whose_export_fails_has_only_that_left(
    more: dict[str, Any],
    tmp_path: Path,
    three: dict[str, Any],
    six: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:

        def refuse(*_: object) -> None:
            raise OSError(28, "No space left on device", "/some/path")

        patch.setattr(export, "_write_settings", refuse)
        assert main(command(tmp_path, {**EARLY, **more})) == 2
    assert "all 6 steps are done" in capsys.readouterr().err
    assert main(["resume", str(tmp_path / "run")]) == 0
    assert f"ended early after step 6: {WHY}" in capsys.readouterr().out
    weights = three if more else six
    assert outcome(tmp_path / "run") == {"losses": six["losses"], "weights": weights["weights"]}


def test_run_that_ended_early_goes_on_only_with_more_patience(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**EARLY, "output.export": False, "output.checkpoint_every": 100}
    assert main(command(tmp_path, settings)) == 0
    assert kept(tmp_path) == [6]
    run = str(tmp_path / "run")
    assert main(["resume", run]) == 2
    words = f"ended early after step 6: {WHY}"
    found = capsys.readouterr().err
    assert words in found
    assert "raise train.early_stopping_patience, or set it to null" in found
    assert main(["resume", run, "--train.early_stopping_patience=null", "--train.steps=7", "--accept-changes"]) == 0
    assert all_records(tmp_path)[-1]["run"] == "whole"


def test_run_whose_best_checkpoint_is_gone_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with after_step(5, lambda: signal.raise_signal(signal.SIGINT)):
        assert main(command(tmp_path, {**BEST, "output.checkpoint_every": 0})) == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000003")
    assert main(["resume", str(tmp_path / "run")]) == 2
    words = "step-00000003 is not there, which has the lowest held-out loss so far. Bring it back, or set"
    assert words in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model")]) == 2
    assert "step-00000003 is not there, which has the lowest held-out loss of" in capsys.readouterr().err
    assert main(["resume", str(tmp_path / "run"), "--output.load_best_model_at_end=false"]) == 0


def test_run_that_ends_by_steps_that_are_not_finite_keeps_its_best_checkpoint(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:

        def harm() -> None:
            patch.setattr(GradientSums, "norm", lambda _: math.nan)

        with after_step(3, harm):
            settings = {**BEST, "numerics.max_skips": 1, "train.early_stopping_patience": 9}
            assert main(command(tmp_path, {**settings, "output.checkpoint_every": 0})) == 2
    assert kept(tmp_path) == [3, 5], "that of step 5 has the same weights, and the state of a later step"


def test_run_without_held_out_text_is_refused_before_it_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path, {**EARLY, "data.holdout_fraction": 0.0})) == 2
    found = capsys.readouterr().err
    assert "no text is held out, and train.early_stopping_patience goes by the held-out loss" in found
    assert "raise data.holdout_fraction" in found
    assert not (tmp_path / "run").exists()
