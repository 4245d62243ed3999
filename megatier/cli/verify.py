"""`megatier verify`: shows on this machine that training is exact."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from megatier.drives.mounts import check_directory
from megatier.hardware import scratch_directory
from megatier.optimizers import OPTIMIZER_NAMES
from megatier.report.console import announce


def run(argv: Sequence[str]) -> int:
    """Train a tiny model under several placements and compare every bit; returns 0 if all agree, else 1."""
    options = _parser().parse_args(argv)
    if options.directory is not None:
        check_directory(options.directory, "--directory")
    announce(Console(), "loading PyTorch and transformers")
    # Imported here because it loads torch: wrong arguments are refused without waiting for that.
    from megatier.train.verify import verify

    # Past /tmp, which is RAM on many systems: the drive is a part of what is tried.
    choices = {"is_quick": options.quick, "optimizer": options.optimizer, "products": options.products}
    if options.directory is not None:
        return 0 if verify(options.device, options.directory, Console(), **choices) else 1
    with TemporaryDirectory(prefix="megatier-verify-", dir=scratch_directory()) as directory:
        return 0 if verify(options.device, Path(directory), Console(), **choices) else 1


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="megatier verify",
        description="Train a tiny model with its state on the GPU, in RAM and on NVMe, and compare every bit of the "
        "results.",
        epilog="example: megatier verify --directory /mnt/a",
    )
    parser.add_argument(
        "--device",
        choices=["auto", "cuda", "cpu"],
        default="auto",
        help="device that computes (default: a GPU if there is one)",
    )
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="directory on the drive to try (default: a temporary one)"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="make 6 runs instead of 48: every placement, but one activation policy, with clipping and fp32 moments",
    )
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZER_NAMES,
        default="adamw",
        help="what trains the model (default: adamw)",
    )
    parser.add_argument(
        "--products",
        choices=["bf16", "fp8"],
        default="bf16",
        help="type of the numbers that linear layers multiply (default: bf16)",
    )
    return parser
