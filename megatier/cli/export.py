"""`megatier export`: the model of a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megatier.config.values import parse_bytes


def run(argv: Sequence[str]) -> int:
    """Write the folder; 0 when it is whole."""
    parser = argparse.ArgumentParser(
        prog="megatier export",
        description="Write the model of a checkpoint as a folder that from_pretrained loads, without training and "
        "without a GPU.",
        epilog="example: megatier export runs/megatier models/mine --dtype fp32",
    )
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="RUN_OR_CHECKPOINT",
        help="a run's output.directory (its last checkpoint is taken), or one of its checkpoints/step-...",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where to write: a new or empty folder")
    parser.add_argument(
        "--dtype", choices=("bf16", "fp32"), help="type of the weights (default: the run's output.export_dtype)"
    )
    parser.add_argument(
        "--shard-size", default="4GiB", metavar="SIZE", help="of each file of weights, at most (default: %(default)s)"
    )
    parser.add_argument(
        "--accept-changes",
        action="store_true",
        help="export although config.json, a buffer or the tokenizer is not as in the run; the new ones are written",
    )
    options = parser.parse_args(argv)
    shard_bytes = parse_bytes(options.shard_size)
    from megatier.train.export import export_checkpoint  # loads torch: only once the arguments are known to be right

    export_checkpoint(
        Console(),
        options.checkpoint,
        options.folder,
        options.dtype,
        shard_bytes,
        accepts_changes=options.accept_changes,
    )
    return 0
