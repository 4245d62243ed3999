"""A run that has begun: its setup, its locked directory, its watchdog, and the point that it starts from.

`trainer` makes one, and opens everything else with it.
"""

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
    """A run whose directory is locked and whose watchdog runs."""

    stack: ExitStack
    """Closes all parts of the run."""
    setup: Setup
    expected: Prediction | None
    """The planned step; None if the machine was not measured."""
    ranks: Ranks | None
    console: Console
    """What a person sees. It prints on the first rank alone."""
    watchdog: Watchdog
    directory: SharedDirectory
    start: Start
    resumes: bool

    @property
    def writes(self) -> bool:
        """Whether this is the first rank. No other rank writes into the directory."""
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
        # Up to here the other ranks print errors alone.
        console = console_of(ranks, console)
        watchdog = stack.enter_context(_make_watchdog(setup.config, expected, ranks))

        # Locked before `Start` looks for saved steps, which another run could otherwise write or remove meanwhile.
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
    """Return the watchdog. It is entered first and closed last, so that it also watches while the run closes."""
    expected_s = 0.0 if expected is None else expected.forecast.seconds

    # Each rank writes a report of its own, since a rank that stalls may be waiting for another one.
    name = STALL_FILE
    if ranks is not None:
        name = STALL_FILE.replace(".", f"-{ranks.rank}.")
    path = Path(config.output.directory) / name
    return Watchdog(path, config.train.stall_timeout, expected_s)
