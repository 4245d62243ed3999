"""Keeps what torch has compiled, so that the next process need not compile it again."""

from __future__ import annotations

import os

from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from megatier.caller import warn
from megatier.errors import ConfigError
from megatier.hardware import cache_directory
from megatier.private import make_private

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""torch's own setting. torch sets it too, to its default, as soon as its compiler is imported."""
CODE_FOLDER = "compiled"
"""The folder among this user's caches. torch's default lies in `/tmp`, which many machines empty when they start."""


def keep_code() -> None:
    """Let torch keep compiled code among this user's caches, unless it was told a place.

    What lies there is run, so nobody else may write there. Where that does not hold, torch's default stays, and a
    warning says so. Which code is found there changes no bit: it is found by all that it was made of.
    """
    # torch sets the variable to its default by itself, so that value says nothing of what a user wants.
    if os.environ.get(VARIABLE) not in (None, default_cache_dir()):
        return
    try:
        directory = cache_directory().absolute() / CODE_FOLDER
        make_private(directory)
    except (ConfigError, RuntimeError) as error:
        warn(f"compiled code may have to be compiled again in each process: {error} Or set {VARIABLE}.")
        return
    os.environ[VARIABLE] = str(directory)
