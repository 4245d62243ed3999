"""What the ranks of a run share: its choices, its directory, its text. The first rank has them, and tells the others.

One process alone goes the same way, and has nobody to tell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from rich.console import Console

from megatier.checkpoint.run_directory import RUN_ID_FILE, RunDirectory
from megatier.config.schema import RunConfig
from megatier.data.packing import PackedText
from megatier.data.stream import TextStream
from megatier.errors import ConfigError
from megatier.planner.prediction import Prediction
from megatier.ranks import Alone, Ranks
from megatier.train.choices import fix_choices, plan_choices


def choices_of(
    config: RunConfig, given: frozenset[str], ranks: Ranks | None, console: Console
) -> tuple[RunConfig, Prediction | None]:
    """Return the config with the choices that it leaves open, and the step that is expected if a plan made them.

    Ranks compute a group each unless the config says otherwise.

    Args:
        config: the run.
        given: dotted names of the settings that stay as they are.
        ranks: the ranks of the run.
        console: what a person sees.

    Raises:
        ConfigError: a setting is not for several ranks.
    """
    if ranks is None:
        return plan_choices(fix_choices(config), given, console)

    if config.output.savepoint_every:
        raise ConfigError(
            "output.savepoint_every: several ranks make no savepoints yet. Set it to 0, and output.checkpoint_every to "
            "save the run, or train without torchrun."
        )
    if "train.groups" not in given:
        config = replace(config, train=replace(config.train, groups=ranks.size))
    return ranks.first(lambda: fix_choices(config)), None


def console_of(ranks: Ranks | None, console: Console) -> Console:
    """Return the console of a run, which is silent on all ranks but the first."""
    return console if ranks is None or ranks.rank == 0 else Console(quiet=True)


class SharedDirectory:
    """The run directory, which the first rank locks and writes. Use it as a context.

    Attributes:
        path: the directory.
        leads: whether this process writes there.
    """

    def __init__(self, config: RunConfig, ranks: Ranks | None, *, resumes: bool) -> None:
        """Open it on the first rank; see `RunDirectory`."""
        self._crew = ranks or Alone()
        self.path = Path(config.output.directory)
        self.leads = self._crew.rank == 0
        self._directory: RunDirectory | None = None
        with ExitStack() as opened:
            if self.leads:
                self._directory = opened.enter_context(RunDirectory(config, resumes=resumes))

            # The others read there only once it is locked.
            self.run_id = self._crew.first(self._find_id)
            """The name of the run's block files."""
            with self._crew.together():
                self._check_is_shared()
            self._opened = opened.pop_all()

    def _find_id(self) -> str:
        assert self._directory is not None
        return self._directory.run_id

    def _check_is_shared(self) -> None:
        """Refuse a rank that sees another directory, since all of them write checkpoints there.

        Raises:
            ConfigError: names the rank.
        """
        noted = ""
        with contextlib.suppress(OSError):
            noted = (self.path / RUN_ID_FILE).read_text()
        if noted.split(" ")[0] != self.run_id:
            raise ConfigError(
                f"rank {self._crew.rank} does not see the run that the first rank has in {self.path}. Name an "
                "output.directory on a file system that all hosts share, and start all ranks in one directory."
            )

    def write_config(self, config: RunConfig) -> None:
        """Write the resolved config, on the first rank."""
        assert self._directory is not None
        self._directory.write_config(config)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, trace)


class SharedText:
    """The text of a run, which the first rank reads and sends. All ranks have to ask for the same."""

    def __init__(self, ranks: Ranks | None, text: PackedText | TextStream | None) -> None:
        """Take the text, on the first rank."""
        self._crew = ranks or Alone()
        self._text = text

    def batch(self, step: int, batch: int) -> dict[str, torch.Tensor]:
        """Return the training batch of a step, counted from 0."""
        return self._crew.first(lambda: self.own.batch(step, batch))

    def holdout(self, batch: int) -> Iterator[dict[str, torch.Tensor]]:
        """Yield held-out batches in order."""
        batches = iter(()) if self._text is None else self._text.holdout(batch)
        while (found := self._crew.first(lambda: next(batches, None))) is not None:
            yield found

    @property
    def state(self) -> dict[str, Any]:
        """The note of a checkpoint that tells this text, and the position in it, from others."""
        return self._crew.first(lambda: self.own.state)

    @property
    def own(self) -> PackedText | TextStream:
        """The text itself. The first rank asks for it."""
        assert self._text is not None
        return self._text
