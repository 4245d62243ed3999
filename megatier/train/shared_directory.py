"""The run directory, seen from all ranks. The first rank locks it and writes there; the others only read."""

from __future__ import annotations

import contextlib
from contextlib import ExitStack
from pathlib import Path

from megatier.checkpoint.run_directory import RUN_ID_FILE, RunDirectory
from megatier.config.schema import RunConfig
from megatier.errors import ConfigError
from megatier.ranks.channel import SingleRank
from megatier.ranks.ranks import Ranks


class SharedDirectory:
    """The run directory of several ranks, or of one process.

    Attributes:
        path: the directory.
        own: the open directory, on the first rank; None on the others.
        run_id: the name of the run's block files.
    """

    def __init__(self, opened: ExitStack, config: RunConfig, ranks: Ranks | None, *, resumes: bool) -> None:
        """Lock the directory on the first rank until the stack closes; see `RunDirectory`."""
        all_ranks = ranks or SingleRank()
        self.path = Path(config.output.directory)

        # One rank takes the lock, which would refuse all others.
        directory = opened.enter_context(RunDirectory(config, resumes=resumes)) if all_ranks.rank == 0 else None
        self.own = directory

        # The others read the directory only once it is locked.
        self.run_id = all_ranks.broadcast(lambda: "" if directory is None else directory.run_id)
        with all_ranks.failing_together():
            self._check_is_shared(all_ranks.rank)

    def _check_is_shared(self, rank: int) -> None:
        """Refuse a rank that sees another directory, since all of them write checkpoints there.

        Raises:
            ConfigError: names the rank.
        """
        noted = ""
        with contextlib.suppress(OSError):
            noted = (self.path / RUN_ID_FILE).read_text()
        # After the id the file has the inode of the directory, which tells it from a copy.
        if noted.split(" ")[0] != self.run_id:
            raise ConfigError(
                f"rank {rank} does not see the run that the first rank has in {self.path}. Name an output.directory on "
                "a file system that all hosts share, and start all ranks in one directory."
            )
