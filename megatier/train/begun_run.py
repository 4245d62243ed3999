"""A run that has begun: what all of its parts are opened with."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rich.console import Console

from megatier.checkpoint.run_directory import STALL_FILE
from megatier.config.schema import RunConfig
from megatier.planner.prediction import Prediction
from megatier.ranks.channel import SingleRank
from megatier.ranks.ranks import Ranks
from megatier.report.console import console_of
from megatier.setup.setup import Setup
from megatier.train.shared_directory import SharedDirectory
from megatier.train.start import Start
from megatier.watch.watchdog import Watchdog


@dataclass(frozen=True, kw_only=True, slots=True)
class BegunRun:
    """A run with its directory locked and its watchdog awake."""

    stack: ExitStack
    """Closes the parts."""
    setup: Setup
    expected: Prediction | None
    """The planned step; None if the machine was not measured."""
    ranks: Ranks | None
    console: Console
    """Silent on all ranks but the first."""
    watchdog: Watchdog
    directory: SharedDirectory
    start: Start
    resumes: bool

    @property
    def writes(self) -> bool:
        """Whether this is the first rank, which alone writes into the directory."""
        return self.directory.own is not None

    @classmethod
    def begin(
        cls,
        stack: ExitStack,
        setup: Setup,
        expected: Prediction | None,
        ranks: Ranks | None,
        console: Console,
        *,
        resumes: bool,
        accepts_changes: bool,
    ) -> Self:
        """Start the watchdog, lock the directory, and find the step to go on from; see `train`."""
        # The other ranks had nothing to say until here but what stops them.
        console = console_of(ranks, console)
        watchdog = stack.enter_context(_make_watchdog(setup.config, expected, ranks))

        # Locked before `Start` looks for saved steps there, which another run could write or remove.
        directory = SharedDirectory(stack, setup.config, ranks, resumes=resumes)
        all_ranks = ranks or SingleRank()
        start = all_ranks.broadcast(lambda: Start.of(directory.path, accepts_changes=accepts_changes))
        return cls(
            stack=stack,
            setup=setup,
            expected=expected,
            ranks=ranks,
            console=console,
            watchdog=watchdog,
            directory=directory,
            start=start,
            resumes=resumes,
        )


def _make_watchdog(config: RunConfig, expected: Prediction | None, ranks: Ranks | None) -> Watchdog:
    """Return the watchdog. It is entered before all that may hang while it closes, so that it still watches then."""
    expected_s = 0.0 if expected is None else expected.forecast.seconds

    # Each rank says what it was at, since the one that stalls may wait for another.
    name = STALL_FILE
    if ranks is not None:
        name = STALL_FILE.replace(".", f"-{ranks.rank}.")
    path = Path(config.output.directory) / name
    return Watchdog(path, config.train.stall_timeout, expected_s)
