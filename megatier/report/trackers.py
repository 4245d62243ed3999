"""Sends the figures of a run to experiment trackers (trackio, wandb and MLflow) by their own libraries.

A tracker does not affect the run. Each has its own thread, so a slow or missing network holds no step up. An error of
its library ends the tracker, which is printed once, and the run goes on. Addresses, tokens and offline modes are set as
the library wants it, by environment variables or its login.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, Self

from megatier import _native
from megatier.config.output_section import OutputConfig
from megatier.errors import ConfigError
from megatier.foreign import reason_of
from megatier.report.tensorboard import load_tensorboard, numbers

PROJECT = "megatier"
"""Name of the project, or of MLflow's experiment, unless the environment gives another one."""
WAITING_MAX = 10_000
"""Most records that wait for a tracker."""
CLOSE_S = 30.0
"""Most seconds that the end of a run waits for a tracker."""
PARAMETERS_MAX = 100
"""Most parameters that MLflow accepts in one request."""
PARAMETER_CHARACTERS_MAX = 6000
"""Most characters of a parameter that MLflow accepts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """The run as trackers know it."""

    name: str
    """The name of the run directory."""
    run_id: str
    """A unique name, which stays when the run is resumed."""
    directory: Path
    """The run directory."""
    config: Mapping[str, Mapping[str, Any]]
    """The sections of the resolved config."""
    repeated: range = range(0)
    """Steps that are repeated after a resume, which trackers may have already."""


class Tracker(Protocol):
    """A run in the library of a tracker."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Send the figures of a step. Step numbers never decrease."""

    def end(self, outcome: str) -> None:
        """Send all that is left. The outcome is `whole`, `early`, `stopped` or `failed`."""


class Trackio:
    """A run in trackio, which keeps it in a folder, on a server or in a Space."""

    def __init__(self, library: Any, run: TrackedRun) -> None:  # noqa: ANN401 - a library without types
        """Begin or resume the run. Trackio identifies a run by its name alone."""
        self._run = library.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            # Directories in different places may have the same name.
            name=f"{run.name}-{run.run_id[:6]}",
            config=dict(run.config),
            resume="allow",
            # The records have memory and times, and a sampling thread would cost compute.
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Send the figures of a step."""
        self._run.log(dict(figures), step=step)

    def end(self, outcome: str) -> None:
        """Send all that is left."""
        self._run.finish()


class Wandb:
    """A run in Weights & Biases, online or in files below the run directory (`WANDB_MODE=offline`)."""

    def __init__(self, library: Any, run: TrackedRun) -> None:  # noqa: ANN401
        """Begin or resume the run.

        Raises:
            ConfigError: nobody is logged in, so it would ask for a key.
        """
        is_online = library.setup().settings.mode == "online"
        if is_online and not library.login(prompt=False):
            raise ConfigError("nobody is logged in. Run `wandb login`, or set WANDB_MODE=offline.")
        self._run = library.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=run.run_id,
            resume="allow",
            config=dict(run.config),
            # The default of wandb is the working directory.
            dir=os.environ.get("WANDB_DIR", str(run.directory)),
            # Otherwise wandb would capture the console of the run.
            settings=library.Settings(console="off", silent=True),
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Send the figures of a step. wandb ignores steps that it has from before a resume."""
        self._run.log(dict(figures), step=step)

    def end(self, outcome: str) -> None:
        """Send all that is left."""
        self._run.finish(exit_code=int(outcome == "failed"))


class Mlflow:
    """A run in MLflow, wherever MLFLOW_TRACKING_URI says."""

    STATUS: Mapping[str, str] = {"stopped": "KILLED", "failed": "FAILED"}
    """MLflow's names of outcomes; all others are FINISHED."""

    def __init__(self, library: Any, run: TrackedRun) -> None:  # noqa: ANN401
        """Begin the run, or resume the one that has its id as a tag."""
        # The client is used because the module's functions keep their open run by thread.
        self._metric = library.entities.Metric
        self._client = library.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = self._client.create_experiment(name) if experiment is None else experiment.experiment_id

        self._last_steps: dict[str, int] = {}
        """The last step that MLflow has of each figure that may come again."""
        before = self._client.search_runs([experiment_id], f"tags.`{PROJECT}.run_id` = '{run.run_id}'")
        if before:
            self._id = before[0].info.run_id

            # The process before may have set it to killed or failed.
            self._client.update_run(self._id, status="RUNNING")
            if run.repeated:
                self._find_last_steps()
            return
        tags = {f"{PROJECT}.run_id": run.run_id}
        self._id = self._client.create_run(experiment_id, run_name=run.name, tags=tags).info.run_id

        # MLflow refuses changed parameters, so those of a resumed run are not sent again.
        parameters = [
            library.entities.Param(f"{section}.{key}", str(value)[:PARAMETER_CHARACTERS_MAX])
            for section, settings in run.config.items()
            for key, value in settings.items()
        ]
        for first in range(0, len(parameters), PARAMETERS_MAX):
            self._client.log_batch(self._id, params=parameters[first : first + PARAMETERS_MAX])

    def _find_last_steps(self) -> None:
        """Find the last step of each figure that MLflow has already."""
        # They may differ, because a kill may come between a step and the evaluation after it.
        for name in self._client.get_run(self._id).data.metrics:
            history = self._client.get_metric_history(self._id, name)
            self._last_steps[name] = max(point.step for point in history)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Send the figures of a step, except those that MLflow has from before a resume."""
        milliseconds = time.time_ns() // 1_000_000
        metrics = []
        for name, value in figures.items():
            if step > self._last_steps.get(name, -1):
                metric = self._metric(name, value, milliseconds, step)
                metrics.append(metric)
        if metrics:
            self._client.log_batch(self._id, metrics=metrics)

    def end(self, outcome: str) -> None:
        """Send how the run ended."""
        self._client.set_terminated(self._id, self.STATUS.get(outcome, "FINISHED"))


REPEATING = ("trackio",)
"""Trackers that show a repeated step twice, because they do not say which steps they have."""
TRACKERS: Mapping[str, Callable[[Any, TrackedRun], Tracker]] = {"trackio": Trackio, "wandb": Wandb, "mlflow": Mlflow}
"""The class for each tracker, by the name of its library, which is also that of the extra."""


def load_trackers(output: OutputConfig) -> dict[str, Any]:
    """Return the libraries of the trackers that a run reports to, by name.

    Raises:
        ConfigError: one is not installed, or cannot be imported.
    """
    if output.writes_tensorboard:
        load_tensorboard()
    libraries = {}
    for name in output.report_to:
        if name not in TRACKERS:
            continue
        try:
            libraries[name] = importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"output.report_to needs {name} ({error}): pip install 'megatier[{name}]', or leave it out."
            ) from error
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"output.report_to: {name} is installed, and cannot be imported ({reason_of(error)}). Install it again "
                f"by pip install --force-reinstall 'megatier[{name}]', or leave it out."
            ) from error
    return libraries


class Sender:
    """Sends records to one tracker on its own thread. Use it as a context, from one thread."""

    def __init__(self, name: str, library: Any, run: TrackedRun, say: Callable[[str], None]) -> None:  # noqa: ANN401
        """Begin or resume the run in the tracker, without waiting for it.

        Args:
            name: a name in `TRACKERS`.
            library: its library, from `load_trackers`.
            run: the run.
            say: prints a line for a person. It is called on the thread that calls `write`.
        """
        self._name = name
        self._say = say
        self._outcome = "stopped"
        self._step = 0

        # Unlike that of `Queue`, its `put` never waits, and an interrupt in it does no harm.
        self._records: SimpleQueue[tuple[int, Mapping[str, float]] | None] = SimpleQueue()
        self._ended = _native.Latch()
        self._error: BaseException | None = None
        self._is_given_up = False

        if run.repeated and name in REPEATING:
            say(
                f"{name} does not say which steps it has: steps {run.repeated[0]} to {run.repeated[-1]} come again, "
                "and it may show them twice."
            )

        # A daemon thread does not keep the process alive if the library hangs.
        work = threading.Thread(target=self._send, args=(library, run), name=f"megatier-{name}", daemon=True)
        work.start()

    def write(self, record: Mapping[str, object]) -> None:
        """Send the numbers of a record, unless the tracker has failed."""
        if "run" in record:
            self._outcome = str(record["run"])
            return
        if self._error is not None:
            self._give_up(reason_of(self._error))
        elif self._records.qsize() >= WAITING_MAX:
            self._give_up(f"{WAITING_MAX:,} records wait for it")
        if self._is_given_up:
            return

        # The record of a checkpoint may come after those of later steps, and trackers accept no earlier step.
        step = record["step"]
        assert isinstance(step, int)
        self._step = max(self._step, step)
        self._records.put((self._step, dict(numbers(record))))

    def _give_up(self, why: str) -> None:
        """Print once that nothing more is sent."""
        if not self._is_given_up:
            self._is_given_up = True
            self._say(f"{self._name}: {why}. The run goes on, and {self._name} gets no more of it.")

    def _send(self, library: Any, run: TrackedRun) -> None:  # noqa: ANN401
        """Send records until the end. This is the body of the thread."""
        try:
            tracker = TRACKERS[self._name](library, run)
            while (item := self._records.get()) is not None:
                tracker.log(*item)
            tracker.end(self._outcome)
        # SystemExit would end this thread alone, without a message.
        except BaseException as error:  # noqa: BLE001 - told by the thread that writes; whatever a library raises
            self._error = error
        finally:
            self._ended.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._outcome = "failed"
        self._records.put(None)

        # After an interrupt the process ends at once.
        is_at_once = error is not None and not isinstance(error, Exception)
        if not self._ended.wait(0.0 if is_at_once else CLOSE_S):
            self._give_up(f"it has not taken all figures within {CLOSE_S:.0f} seconds")
        elif self._error is not None:
            self._give_up(reason_of(self._error))
