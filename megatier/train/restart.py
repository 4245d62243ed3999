"""Finds the run that `torchrun` starts again after a rank failed (`--max-restarts`)."""

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
    """Return the config of a run that `torchrun` has started again, and the names of its given settings.

    The config is the stored one with the settings of the command on top, as in `megatier resume`. So the number of
    ranks may have changed.

    Args:
        config: the config that the command gives.
        given: dotted names of the settings that the command gives.
        ranks: the ranks of the run.

    Returns:
        None if this is no restart, or if the first start wrote no config.

    Raises:
        ConfigError: the stored config cannot be read.
    """
    all_ranks = ranks or SingleRank()

    # Every host counts its own restarts, so a host that has joined later has seen none.
    num_restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not all_ranks.any(num_restarts > 0):
        return None
    path = Path(config.output.directory) / CONFIG_FILE
    stored = all_ranks.broadcast(lambda: to_dict(load_saved(path)) if path.is_file() else None)
    if stored is None:
        return None

    # The directory comes from the command, because it may have been moved since its config was written.
    from_command = to_dict(config)
    for dotted in sorted(given | {"output.directory"}):
        section, _, name = dotted.partition(".")
        stored[section][name] = from_command[section][name]

    # A stored config has every setting, so all of them count as given, and the planner changes none.
    return from_dict(stored), list_given(stored)
