"""`megatier export`: the model of a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megatier.config_values import parse_bytes


def run(argv: Sequence[str]) -> int:
    """Write the folder; 0 when it is whole."""
    parser = argparse.ArgumentParser(
        prog="megatier export",
        description="Write the model of a checkpoint as a folder that from_pretrained loads, without training and "
        "without a GPU.",
        epilog="example: megatier export runs/megatier models/mine --dtype fp32",
    )
    parser.add_argument("checkpoint", type=Path, metavar="RUN_OR_CHECKPOINT", help="a run directory, or its step-...")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="new or empty")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="default: the run's output.export_dtype")
    parser.add_argument("--shard-size", default="4GiB", metavar="SIZE", help="of one file at most (default: 4GiB)")
    options = parser.parse_args(argv)
    shard_bytes = parse_bytes(options.shard_size)
    from megatier.train.export import export_checkpoint  # loads torch: only once the arguments are known to be right

    export_checkpoint(Console(), options.checkpoint, options.folder, options.dtype, shard_bytes)
    return 0
