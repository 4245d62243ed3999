"""The run directory: one run at a time, under a lock, with the resolved config beside what the run leaves behind.

A run that was refused before its first step leaves nothing, so that the same command works once its cause is gone.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml

from megatier.config import RunConfig
from megatier.config_file import to_dict
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
        self._is_new = not self.path.exists()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"output.directory: cannot create {self.path.parent}: {error.strerror}.") from error
        self._lock = lock_directory(self.path)
        try:
            self._begin(config)
        except BaseException:
            self._unlock()
            raise

    def _begin(self, config: RunConfig) -> None:
        names = (CONFIG_FILE, METRICS_FILE, MODEL_FOLDER, DATA_FOLDER)
        if taken := [name for name in names if (self.path / name).exists()]:
            raise ConfigError(
                f"{self.path} holds a run already ({taken[0]}). Nothing was changed; name another --output.directory "
                "or move the old run away."
            )
        text = yaml.safe_dump(to_dict(config), sort_keys=False)
        try:
            (self.path / CONFIG_FILE).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"output.directory: cannot write to {self.path}: {error.strerror}.") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A drive that is gone or read-only keeps them, and the lock's file: the error that ended the run tells.
        with contextlib.suppress(OSError):
            if error is not None and not (self.path / METRICS_FILE).exists():
                self._remove_traces()
        self._unlock()

    def _remove_traces(self) -> None:
        """Remove what this run wrote: it refused to begin in a directory that had any of it."""
        for path in (self.path / CONFIG_FILE, *(self.path / DATA_FOLDER).glob("*.tokens")):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # missing, or somebody put a file of theirs inside: it stays
            (self.path / DATA_FOLDER).rmdir()

    def _unlock(self) -> None:
        with contextlib.suppress(OSError):
            (self.path / "lock").unlink(missing_ok=True)
            if self._is_new:
                self.path.rmdir()  # refused where it holds a run
        os.close(self._lock)
