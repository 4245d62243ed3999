"""Trackers: all figures of a run under its name, one run however often it is resumed, and no harm to it."""

from __future__ import annotations

import math
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from crossed import crossed
from small_commands import after_step, command, metrics, outcome
from stand_in_trackers import NAMES, StandIn

from megatier.cli import main
from megatier.config.output_section import TRACKER_NAMES, OutputConfig
from megatier.errors import ConfigError
from megatier.report import trackers
from megatier.report.trackers import TRACKERS, Sender, TrackedRun, load_trackers


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> dict[str, StandIn]:
    found = {name: StandIn(name) for name in NAMES}
    for name, library in found.items():
        monkeypatch.setitem(sys.modules, name, library)
    for name in ("WANDB_PROJECT", "WANDB_DIR", "TRACKIO_PROJECT", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    return found


def test_trackers_of_the_settings_are_those_of_the_table() -> None:
    assert (*TRACKERS, "tensorboard") == TRACKER_NAMES
    assert tuple(TRACKERS) == NAMES


def test_each_tracker_gets_name_config_and_every_figure_of_a_run_that_was_resumed(
    libraries: dict[str, StandIn], tmp_path: Path
) -> None:
    settings = {"output.report_to": ",".join(NAMES), "train.evaluate_every": 2}
    with after_step(2, lambda: signal.raise_signal(signal.SIGINT)):
        assert main(command(tmp_path, settings)) == 0
    assert main(["resume", str(tmp_path / "run")]) == 0

    run_id = (tmp_path / "run" / "run-id").read_text().split()[0]
    records = metrics(tmp_path)
    losses = [(record["step"], record["loss"]) for record in records if "loss" in record]
    ends = {"trackio": [0, 0], "wandb": [0, 0], "mlflow": ["KILLED", "FINISHED"]}
    for name, library in libraries.items():
        ((key, run),) = library.runs.items()
        assert run["name"] == (f"run-{run_id[:6]}" if name == "trackio" else "run")
        assert run["project"] == "megatier"
        assert [(step, value) for step, figure, value in run["points"] if figure == "loss"] == losses
        assert [step for step, figure, _ in run["points"] if figure == "heldout_loss"] == [2, 3]
        steps = [step for step, _, _ in run["points"]]
        assert steps == sorted(steps)

        # A step has its own time, and not that of the evaluation after it.
        seconds = [(record["step"], record["seconds"]) for record in records if "loss" in record]
        assert [(step, value) for step, figure, value in run["points"] if figure == "seconds"] == seconds
        assert [step for step, figure, _ in run["points"] if figure == "evaluation/seconds"] == [2, 3]
        assert run["ends"] == ends[name]
        if name == "wandb":
            assert (key, run["dir"]) == (run_id, str((tmp_path / "run").absolute()))
            assert run["settings"] == {"console": "off", "silent": True}
        if name == "mlflow":
            assert (run["tag"], run["config"]["train.steps"]) == (run_id, "3")
        else:
            assert run["config"]["train"]["steps"] == 3


def test_run_that_fails_and_goes_on_from_an_earlier_step_sends_no_step_twice_or_says_so_once(
    libraries: dict[str, StandIn], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def kill() -> None:
        raise ConfigError("killed")

    more = {"train.steps": 5, "output.checkpoint_every": 2, "train.evaluate_every": 3}
    with after_step(4, kill):
        assert main(command(tmp_path, {"output.report_to": ",".join(NAMES), **more})) == 2
    capsys.readouterr()
    assert main(["resume", str(tmp_path / "run")]) == 0

    said = " ".join(capsys.readouterr().out.split())
    assert said.count("trackio does not say which steps it has: steps 3 to 4 come again, and it may show them") == 1
    records = metrics(tmp_path)
    losses = [(record["step"], record["loss"]) for record in records if "loss" in record]
    held_out = [(record["step"], record["heldout_loss"]) for record in records if "heldout_loss" in record]
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5]
    (run,) = libraries["mlflow"].runs.values()
    assert [(step, value) for step, figure, value in run["points"] if figure == "loss"] == losses
    assert [(step, value) for step, figure, value in run["points"] if figure == "heldout_loss"] == held_out
    assert run["ends"] == ["FAILED", "FINISHED"]

    # It has the same figures twice, in one run.
    (run,) = libraries["trackio"].runs.values()
    points = [(step, value) for step, figure, value in run["points"] if figure == "loss"]
    assert sorted(points) == sorted([*losses, *losses[2:4]])


def test_variables_of_the_environment_name_the_project(
    libraries: dict[str, StandIn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_PROJECT", "TRACKIO_PROJECT", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.setenv(name, "mine")
    run = TrackedRun(name="it", run_id="0123456789ab", directory=tmp_path, config={})
    for name, library in libraries.items():
        with Sender(name, library, run, pytest.fail):
            pass
        assert [found["project"] for found in library.runs.values()] == ["mine"]


def raise_error(*_: Any, **__: Any) -> Any:
    raise RuntimeError("the server is gone.\nTraceback: much more")


def raise_exit(*_: Any, **__: Any) -> Any:
    raise SystemExit("the server is gone")


@pytest.mark.parametrize(("when", "name"), crossed(["init", "log", "end"], NAMES, by=3))
def test_tracker_that_fails_is_given_up_with_one_warning_and_changes_no_bit(
    when: str,
    name: str,
    libraries: dict[str, StandIn],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    untracked: dict[str, Any],
) -> None:
    target = {"init": "__init__", "log": "log", "end": "end"}[when]
    monkeypatch.setattr(TRACKERS[name], target, raise_error)
    assert main(command(tmp_path, {"output.report_to": name})) == 0
    said = capsys.readouterr().out
    assert said.count(f"{name}: the server is gone. The run goes on, and {name} gets no more of it.") == 1
    assert "Traceback" not in said
    assert outcome(tmp_path / "run") == untracked


@pytest.fixture(scope="module")
def untracked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("untracked")
    assert main(command(folder)) == 0
    return outcome(folder / "run")


def test_tracker_that_hangs_holds_no_step_up_and_the_end_for_a_while_alone(
    libraries: dict[str, StandIn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(TRACKERS["wandb"], "log", lambda *_: goes_on.wait())
    monkeypatch.setattr(trackers, "CLOSE_S", 0.0)
    monkeypatch.setattr(trackers, "WAITING_MAX", 2)
    assert main(command(tmp_path, {"output.report_to": "wandb", "train.steps": 6})) == 0
    goes_on.set()
    said = capsys.readouterr().out
    assert said.count("The run goes on, and wandb gets no more of it.") == 1
    assert "wandb: 2 records wait for it. " in said


@pytest.mark.parametrize("target", ["__init__", "log", "end"])
def test_tracker_whose_library_exits_is_given_up_with_a_warning(
    target: str, libraries: dict[str, StandIn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(TRACKERS["wandb"], target, raise_exit)
    run = TrackedRun(name="it", run_id="0123456789ab", directory=tmp_path, config={})
    with Sender("wandb", libraries["wandb"], run, said.append) as sender:
        sender.write({"step": 1, "loss": 2.0})
    assert said == ["wandb: the server is gone. The run goes on, and wandb gets no more of it."]


def test_tracker_that_does_not_end_is_left_with_a_warning(libraries: dict[str, StandIn], tmp_path: Path) -> None:
    goes_on = threading.Event()
    said: list[str] = []
    run = TrackedRun(name="it", run_id="0123456789ab", directory=tmp_path, config={})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TRACKERS["trackio"], "end", lambda *_: goes_on.wait())
        patch.setattr(trackers, "CLOSE_S", 0.0)
        with Sender("trackio", libraries["trackio"], run, said.append) as sender:
            sender.write({"step": 1, "loss": math.nan})
    goes_on.set()
    assert len(said) == 1
    assert said[0].startswith("trackio: it has not taken all figures within 0 seconds. The run goes on")


def test_run_that_fails_is_failed_in_its_trackers(libraries: dict[str, StandIn], tmp_path: Path) -> None:
    run = TrackedRun(name="it", run_id="0123456789ab", directory=tmp_path, config={})
    for name in ("wandb", "mlflow"):
        with pytest.raises(OSError, match="gone"), Sender(name, libraries[name], run, pytest.fail) as sender:
            sender.write({"step": 3, "checkpoint_bytes": 1})
            sender.write({"step": 2, "checkpoint_bytes": 2})
            raise OSError("gone")
    assert [found["ends"] for name in ("wandb", "mlflow") for found in libraries[name].runs.values()] == [
        [1],
        ["FAILED"],
    ]
    (found,) = libraries["wandb"].runs.values()
    assert found["points"] == [(3, "checkpoint_bytes", 1), (3, "checkpoint_bytes", 2)], "no step comes back"


def test_wandb_without_a_login_asks_nobody_and_says_what_to_do(libraries: dict[str, StandIn], tmp_path: Path) -> None:
    said: list[str] = []
    run = TrackedRun(name="it", run_id="0123456789ab", directory=tmp_path, config={})
    libraries["wandb"].is_logged_in = False
    with Sender("wandb", libraries["wandb"], run, said.append):
        pass
    assert said == [
        "wandb: nobody is logged in. Run `wandb login`, or set WANDB_MODE=offline. The run goes on, and wandb gets no "
        "more of it."
    ]
    libraries["wandb"].mode = "offline"
    with Sender("wandb", libraries["wandb"], run, pytest.fail):
        pass


@pytest.mark.parametrize("name", NAMES)
def test_library_that_is_missing_is_refused_before_the_run_with_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    assert main(command(tmp_path, {"output.report_to": name})) == 2
    words = rf"output\.report_to needs {name} \(.*\): pip install 'megatier\[{name}\]', or leave it out\."
    assert re.search(words, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("statement", ["raise TypeError('Descriptors cannot be created')", "raise SystemExit('no')"])
def test_library_that_cannot_be_imported_is_refused_with_its_reason(
    statement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb.py").write_text(statement)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match=r"wandb is installed, and cannot be imported \((Desc|no).*--force"):
        load_trackers(OutputConfig(report_to=("wandb",)))


def test_tensorboard_is_one_of_the_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    output = OutputConfig(report_to=("tensorboard",))
    assert output.writes_tensorboard
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"output\.report_to, needs tensorboard"):
        load_trackers(output)


@pytest.mark.parametrize("names", [("comet",), ("wandb", "wandb"), ("none",)])
def test_tracker_that_is_none_of_these_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"output\.report_to is \[.*must be \[\] or some of trackio, wandb, mlflow"):
        OutputConfig(report_to=names)


# ---------------------------------------------------------------------- the libraries themselves


@pytest.mark.filterwarnings("ignore")
def test_real_libraries_take_a_run_and_go_on_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, with the three libraries at hand; offline."""
    wandb, mlflow = pytest.importorskip("wandb"), pytest.importorskip("mlflow")
    pytest.importorskip("trackio")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlruns'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("WANDB_DIR", raising=False)
    with after_step(2, lambda: signal.raise_signal(signal.SIGINT)):
        assert main(command(tmp_path, {"output.report_to": ",".join(NAMES)})) == 0
    assert main(["resume", str(tmp_path / "run")]) == 0

    run_id = (tmp_path / "run" / "run-id").read_text().split()[0]
    losses = [record["loss"] for record in metrics(tmp_path) if "loss" in record]
    client = mlflow.MlflowClient(f"file:{tmp_path / 'mlruns'}")
    (run,) = client.search_runs([client.get_experiment_by_name("megatier").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["train.steps"] == "3"
    assert [point.value for point in client.get_metric_history(run.info.run_id, "loss")] == losses

    storage = sys.modules["trackio.sqlite_storage"].SQLiteStorage
    points = storage.get_logs("megatier", f"run-{run_id[:6]}")
    assert [point["loss"] for point in points if "loss" in point] == losses
    files = list((tmp_path / "run" / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(files) == 2, "one for each process"
    assert wandb.run is None
