"""The run directory: one run at a time, under a lock, with the resolved config beside what the run leaves behind."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml

from megatier.config import RunConfig, to_dict
from megatier.errors import ConfigError
from megatier.store.blockfile import lock_directory

CONFIG_FILE, METRICS_FILE, TRACE_FILE = "config.yaml", "metrics.jsonl", "trace.json"
MODEL_FOLDER, DATA_FOLDER = "model", "data"


class RunDirectory:
    """A directory that holds one run. Use as a context; the lock goes at exit, the files stay."""

    def __init__(self, config: RunConfig) -> None:
        """Create and lock it, and write the resolved config.

        Raises:
            ConfigError: it cannot be written, or holds a run already.
            RunLockedError: a run is going on in it.
        """
        self.path = Path(config.output.directory)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"output.directory: cannot create {self.path.parent}: {error.strerror}.") from error
        self._lock = lock_directory(self.path)
        try:
            taken = [name for name in (CONFIG_FILE, METRICS_FILE, MODEL_FOLDER) if (self.path / name).exists()]
            if taken:
                raise ConfigError(
                    f"{self.path} holds a run already ({taken[0]}). Nothing was changed; name another --output.directory, "
                    "or move the old run away."
                )
            text = yaml.safe_dump(to_dict(config), sort_keys=False)
            (self.path / CONFIG_FILE).write_text(text, encoding="utf-8")
        except OSError as error:
            self._unlock()
            raise ConfigError(f"output.directory: cannot write to {self.path}: {error.strerror}.") from error
        except ConfigError:
            self._unlock()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unlock()

    def _unlock(self) -> None:
        (self.path / "lock").unlink(missing_ok=True)
        os.close(self._lock)
