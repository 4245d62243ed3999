"""Stand-ins for wandb, trackio and MLflow at the interface that megatier uses, which keep what they are told."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

NAMES = ("trackio", "wandb", "mlflow")


class StandIn(ModuleType):
    """One of the libraries.

    Attributes:
        runs: all runs by their id or name: their config, what was logged, and how each process ended.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # Others look whether a library is there by its spec, and refuse a module that has none.
        self.__spec__ = ModuleSpec(name, None)
        self.runs: dict[str, dict[str, Any]] = {}
        self.mode = "online"
        self.is_logged_in = True
        if name == "mlflow":
            self.entities = SimpleNamespace(
                Metric=lambda name, value, timestamp, step: (step, name, value), Param=lambda key, value: (key, value)
            )
            self.MlflowClient = lambda: StandInClient(self)
        self.Settings = dict

    def setup(self) -> Any:
        """Wandb's settings."""
        return SimpleNamespace(settings=SimpleNamespace(mode=self.mode))

    def login(self, *, prompt: bool) -> bool:
        """Whether somebody is logged in."""
        assert not prompt
        return self.is_logged_in

    def init(self, *, name: str, config: Mapping[str, Any], resume: str, **more: Any) -> Any:
        """Begin a run, or go on with it: of wandb by its id, of trackio by its name."""
        assert resume == "allow"
        run = self.runs.setdefault(more.get("id", name), {"name": name, "points": [], "ends": [], **more})
        run["config"] = dict(config)

        def log(figures: Mapping[str, float], *, step: int) -> None:
            run["points"] += [(step, name, value) for name, value in figures.items()]

        return SimpleNamespace(log=log, finish=lambda exit_code=0: run["ends"].append(exit_code))


class StandInClient:
    """The client of MLflow."""

    def __init__(self, library: StandIn) -> None:
        self._runs = library.runs

    def get_experiment_by_name(self, name: str) -> Any:
        """There is one once a run is in it."""
        return SimpleNamespace(experiment_id=name) if self._runs else None

    def create_experiment(self, name: str) -> str:
        """Return its id."""
        return name

    def search_runs(self, experiments: list[str], filter_string: str) -> list[Any]:
        """Runs whose tag is the one that is asked for."""
        found = [key for key, run in self._runs.items() if f"'{run['tag']}'" in filter_string]
        return [SimpleNamespace(info=SimpleNamespace(run_id=key)) for key in found]

    def create_run(self, experiment: str, *, run_name: str, tags: Mapping[str, str]) -> Any:
        """Begin a run."""
        key = f"run {len(self._runs)}"
        run = {"name": run_name, "project": experiment, "points": [], "ends": [], "config": {}}
        self._runs[key] = {**run, "tag": tags["megatier.run_id"]}
        return SimpleNamespace(info=SimpleNamespace(run_id=key))

    def get_run(self, run_id: str) -> Any:
        """A run, with the last value of each figure."""
        values = {name: value for _, name, value in self._runs[run_id]["points"]}
        return SimpleNamespace(data=SimpleNamespace(metrics=values))

    def get_metric_history(self, run_id: str, key: str) -> list[Any]:
        """All values of a figure."""
        points = self._runs[run_id]["points"]
        return [SimpleNamespace(step=step, value=value) for step, name, value in points if name == key]

    def update_run(self, run_id: str, *, status: str) -> None:
        """Go on with a run."""
        assert (status, run_id in self._runs) == ("RUNNING", True)

    def log_batch(self, run_id: str, *, metrics: Any = (), params: Any = ()) -> None:
        """Take figures or parameters."""
        assert len(params) <= 100
        self._runs[run_id]["points"] += metrics
        self._runs[run_id]["config"] |= dict(params)

    def set_terminated(self, run_id: str, status: str) -> None:
        """End a run."""
        self._runs[run_id]["ends"].append(status)
