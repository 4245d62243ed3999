"""Paths: the files and folders that a config names, looked for before anything is loaded that takes seconds.

Runs without torch and transformers. Whoever opens a path later checks it again, since it may be gone by then.
"""

from __future__ import annotations

from megatier.config.schema import RunConfig
from megatier.data.sources import Say, check_sources
from megatier.drives.mounts import budget_bytes
from megatier.models.location import find_local


def check_paths(config: RunConfig, say: Say = lambda _: None, *, reads_text: bool = True) -> None:
    """Refuse a model, texts or mounts that are not there, and texts that are none.

    Args:
        config: the run.
        say: takes a remark about files that are passed over, or read several times.
        reads_text: whether the run reads its text, or has the tokens of it already.

    Raises:
        ConfigError: a local model or a mount is missing or of another kind, or a mount is smaller than its budget.
        DataError: an entry of `data.files` matches nothing, or a file cannot be read as it would be.
    """
    if config.model.path is not None:
        find_local(config.model.path)
    if config.data.dataset is None and reads_text:
        check_sources(config.data, say)
    for mount in config.tiers.mounts:
        budget_bytes(mount)
