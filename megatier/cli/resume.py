"""`megatier resume`: a run goes on where its last checkpoint or savepoint left it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatier.checkpoint.run_directory import CONFIG_FILE
from megatier.config import file as config_file
from megatier.errors import ConfigError
from megatier.train.outlet import run_console


def run(argv: Sequence[str]) -> int:
    """Go on; 0 when the run is whole, or was told to stop."""
    parser = argparse.ArgumentParser(
        prog="megatier resume",
        usage="%(prog)s [options] RUN [--section.key VALUE ...]",
        description="Go on with a run from its last checkpoint or savepoint, bit by bit as if it had never stopped; "
        "from its start if it has none yet. Budgets and mounts may be others than before, but not with a savepoint.",
        epilog="example: megatier resume runs/megatier --tiers.ram 64GiB",
    )
    parser.add_argument("directory", type=Path, metavar="RUN", help="the run's output.directory")
    parser.add_argument(
        "--accept-changes",
        action="store_true",
        help="go on although a numeric choice, the text, a library or the device is not as before; numbers change",
    )
    options, overrides = parser.parse_known_args(argv)
    path = options.directory / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"{options.directory} holds no run to go on with: {CONFIG_FILE} is missing.")
    words = [*overrides, f"--output.directory={options.directory}"]
    loaded = config_file.load(path, words)
    from megatier.train.trainer import train  # loads torch: only once the config is known to be right

    train(
        loaded,
        run_console(),
        config_file.given(path, words),
        resumes=True,
        accepts_changes=options.accept_changes,
    )
    return 0
