"""A run that `torchrun` starts again after a rank failed."""

from __future__ import annotations

import os
from pathlib import Path

from megatier.checkpoint.run_directory import CONFIG_FILE
from megatier.config.file import from_dict, list_given, load_saved, to_dict
from megatier.config.schema import RunConfig
from megatier.ranks.channel import SingleRank
from megatier.ranks.ranks import Ranks


def find_restarted_run(
    config: RunConfig, given: frozenset[str], ranks: Ranks | None
) -> tuple[RunConfig, frozenset[str]] | None:
    """Return the run that `torchrun` has started again after a rank failed, and the settings that stay as they are.

    It has the settings that it was begun with, with those of its command on top, as `megatier resume` lays them there.
    So the number of ranks may be another one now.

    Args:
        config: the run, as its command has it.
        given: dotted names of the settings that the command gives.
        ranks: the ranks of the run.

    Returns:
        None if nothing was started again, or nothing was begun before.

    Raises:
        ConfigError: the stored config cannot be read.
    """
    all_ranks = ranks or SingleRank()

    # Each host's torchrun counts for itself, and one that came later has seen no failure.
    num_restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not all_ranks.any(num_restarts > 0):
        return None
    path = Path(config.output.directory) / CONFIG_FILE
    stored = all_ranks.broadcast(lambda: to_dict(load_saved(path)) if path.is_file() else None)
    if stored is None:
        return None

    # The directory is taken from the command: it may have been moved since its config was written.
    from_command = to_dict(config)
    for dotted in sorted(given | {"output.directory"}):
        section, _, name = dotted.partition(".")
        stored[section][name] = from_command[section][name]

    # A stored config has every setting, so all of them count as given, and no planner changes them on the way.
    return from_dict(stored), list_given(stored)
