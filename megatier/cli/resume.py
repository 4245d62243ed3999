"""`megatier resume`: continues a run from its last checkpoint or savepoint."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from megatier.checkpoint.run_directory import CONFIG_FILE, DATA_FOLDER, check_can_resume, check_is_run
from megatier.config import file as config_file
from megatier.data.token_note import TOKENS_NOTE_FILE
from megatier.errors import ConfigError
from megatier.models.location import naming_option
from megatier.report.console import announce, run_console
from megatier.session.paths import check_paths


def run(argv: Sequence[str]) -> int:
    """Continue the run; returns 0 when it is complete, or was told to stop."""
    parser = argparse.ArgumentParser(
        prog="megatier resume",
        usage="%(prog)s [options] RUN [--section.key VALUE ...]",
        description="Continue a run from its last checkpoint or savepoint, bit for bit as if it had never stopped. If "
        "it has none yet, it starts again from step 1. From a checkpoint, budgets and mounts may differ from before; "
        "from a savepoint they may not.",
        epilog="example: megatier resume runs/megatier --tiers.ram 64GiB",
    )
    parser.add_argument("directory", type=Path, metavar="RUN", help="output.directory of the run")
    parser.add_argument(
        "--accept-changes",
        action="store_true",
        help="continue even if a numeric choice, the text, a library or the device differs from before; this changes "
        "numbers",
    )
    options, overrides = parser.parse_known_args(argv)
    check_is_run(options.directory)
    path = options.directory / CONFIG_FILE

    if any(word.partition("=")[0] == "--output.directory" for word in overrides):
        raise ConfigError(
            f"--output.directory: a run goes on in its own directory, {options.directory}. Leave it out, or move or "
            "copy that directory first and resume it there."
        )

    # The directory may have been moved since the config was written into it.
    arguments = [*overrides, f"--output.directory={options.directory}"]
    loaded, given = config_file.load_given(path, arguments, is_saved=True)
    # Several ranks find that out together, since each of them may see another directory.
    if "RANK" not in os.environ:
        check_can_resume(options.directory, loaded)

    console = run_console()
    announce(console, f"{loaded.output.directory}: loading PyTorch and transformers")
    with naming_option("--model.path"):
        # A text whose tokens are there is not read again, unless they are damaged.
        check_paths(loaded, reads_text=not (options.directory / DATA_FOLDER / TOKENS_NOTE_FILE).is_file())

        # Imported here because it loads torch: what is wrong so far is refused without waiting for that.
        from megatier.train.trainer import train

        train(
            loaded,
            console,
            given,
            resumes=True,
            accepts_changes=options.accept_changes,
        )
    return 0
