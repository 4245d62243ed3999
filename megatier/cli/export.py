"""`megatier export`: writes the model of a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megatier.checkpoint.run_directory import find_adapter, find_checkpoint
from megatier.config.output_section import REPOSITORY
from megatier.config.values import parse_bytes, require
from megatier.models.location import naming_option


def run(argv: Sequence[str]) -> int:
    """Write the folder; returns 0 when it is complete."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.public and options.push_to_hub is None:
        parser.error("--public: leave it out without --push-to-hub")

    # The least that can be wrong is looked at first, and takes no time.
    shard_bytes = parse_bytes(options.shard_size)
    if not (options.merge and find_adapter(options.checkpoint)):
        find_checkpoint(options.checkpoint)
    # Imported here because it loads torch: wrong arguments are refused without waiting for that.
    from megatier.saving.checkpoint_export import export_checkpoint
    from megatier.saving.upload import check_login, upload

    console = Console()
    repository = options.push_to_hub
    if repository is not None:
        require(re.fullmatch(REPOSITORY, repository) is not None, "--push-to-hub", repository, "OWNER/NAME")
        check_login(console, "--push-to-hub")
    with naming_option("--base"):
        export_checkpoint(
            console,
            options.checkpoint,
            options.folder,
            options.dtype,
            shard_bytes,
            merges=options.merge,
            base=options.base,
            accepts_changes=options.accept_changes,
        )
    if repository is not None:
        upload(console, options.folder, repository, private=not options.public)
    return 0


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="megatier export",
        description="Write the model of a checkpoint as a folder that from_pretrained loads. This needs no GPU, and "
        "trains nothing.",
        epilog="example: megatier export runs/megatier models/mine --dtype fp32",
    )
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="RUN_OR_CHECKPOINT",
        help="output.directory of a run, whose last checkpoint is used, or one of its checkpoints/step-...; with "
        "--merge also the folder of an adapter",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="new or empty folder to write to")
    parser.add_argument(
        "--dtype", choices=("bf16", "fp32"), help="type of the weights (default: the run's output.export_dtype)"
    )
    parser.add_argument(
        "--shard-size", default="4GiB", metavar="SIZE", help="largest size of a file of weights (default: %(default)s)"
    )
    parser.add_argument(
        "--accept-changes",
        action="store_true",
        help="export even if config.json, a buffer or the tokenizer differs from that of the run (the new ones are "
        "written), or if moments of the checkpoint were exchanged",
    )
    parser.add_argument(
        "--merge", action="store_true", help="merge the adapters into their base, and write a model that needs no PEFT"
    )
    parser.add_argument(
        "--base",
        metavar="FOLDER_OR_ID",
        help="where the base of the adapters, or the model that the run began with, is now (default: where it was)",
    )
    parser.add_argument(
        "--push-to-hub",
        metavar="OWNER/NAME",
        help="upload the folder to this repository of the Hugging Face hub",
    )
    parser.add_argument("--public", action="store_true", help="make that repository public if it is new")
    return parser
