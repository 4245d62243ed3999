"""Writes the figures of a run for TensorBoard: each number of `metrics.jsonl` as a scalar of the same name."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

from megatier.errors import ConfigError
from megatier.report.metrics import refusing

FLUSH_SECONDS = 10
"""Seconds after which events are on file; a killed run loses younger ones."""


OF_EVALUATIONS = ("heldout_loss", "best_step", "best_heldout_loss", "num_worse")
"""The figures that evaluations alone have."""


def load_tensorboard() -> Any:  # noqa: ANN401  torch's module, typed or not as tensorboard is there or not
    """Return the module torch.utils.tensorboard.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise ConfigError(
            f"output.tensorboard, or output.report_to, needs tensorboard ({error}): pip install "
            "'megatier[tensorboard]', or leave it out."
        ) from error


class ScalarEvents:
    """Writes records as events. Use it as a context."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """Open a file of events in a folder.

        Args:
            folder: may hold events of the run's earlier processes, of which those of `first_step` and later are hidden.
            first_step: the first step of this process.

        Raises:
            ConfigError: TensorBoard is not installed, or the folder cannot be written to.
        """
        self._refusing = partial(refusing, f"write to {folder}")
        library = load_tensorboard()
        with self._refusing():
            # Steps after the last one that was saved come again, and a curve must not have them twice.
            self._writer = library.SummaryWriter(str(folder), purge_step=first_step, flush_secs=FLUSH_SECONDS)

    def write(self, record: Mapping[str, object]) -> None:
        """Add the numbers of the record of a step, an evaluation or a save; how a process began is left out.

        Raises:
            ConfigError: the drive is full or gone.
        """
        if "run" in record:
            return
        with self._refusing():
            for name, number in numbers(record):
                self._writer.add_scalar(name, number, record["step"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            # The error that ends the run says enough.
            with contextlib.suppress(OSError):
                self._writer.close()
            return
        with self._refusing():
            self._writer.close()


def numbers(record: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """Yield names and numbers of a record, those of inner mappings as "stall_seconds/ram_to_gpu".

    An evaluation has some of a step's names, which get "evaluation/" before them.
    """
    training = record
    if "heldout_loss" in record:
        training = {name: record[name] for name in OF_EVALUATIONS if name in record}
        yield from _numbers({name: value for name, value in record.items() if name not in training}, "evaluation/")
    yield from _numbers(training)


def _numbers(record: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        # The step is the place of every point, and no curve of its own.
        if name == "step":
            continue
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield prefix + name, value
