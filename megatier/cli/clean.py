"""`megatier clean`: lists or removes the block files that killed runs left on mounts."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megatier.byte_counts import format_bytes
from megatier.checkpoint.run_directory import find_killed_runs
from megatier.drives.leftovers import Leftover, find_leftovers
from megatier.foreign import printable
from megatier.report.console import say
from megatier.report.metrics import format_seconds


def run(argv: Sequence[str]) -> int:
    """List what is left over, or remove it; returns 0 when that is done."""
    parser = argparse.ArgumentParser(
        prog="megatier clean",
        description="List the block files that killed runs left on mounts or kept for a savepoint. With --yes, remove "
        "them. A directory stays if a run uses it, if it belongs to another user, or if it holds anything else. Run "
        "directories are only listed.",
        epilog="example: megatier clean /mnt/a /mnt/b --yes",
    )
    parser.add_argument(
        "directory", type=Path, nargs="+", metavar="DIR", help="directory of a mount in tiers.nvme, without its size"
    )
    parser.add_argument("--yes", action="store_true", help="remove them (default: list them only)")
    options = parser.parse_args(argv)
    console = Console()
    leftovers = []

    for directory in options.directory:
        # Said line by line, since removing large files takes time.
        for leftover in find_leftovers(directory, remove=options.yes):
            leftovers.append(leftover)
            say(console, _line(leftover, removed=options.yes))
        # A run directory holds the only copy of what was trained, so this command never removes one.
        for path in find_killed_runs(directory):
            say(console, f"{path}: a killed run; `megatier resume` goes on with it")

    say(console, _summary(options.directory, [each for each in leftovers if not each.stays], removed=options.yes))
    return 0


def _line(leftover: Leftover, *, removed: bool) -> str:
    if leftover.stays:
        return f"{leftover.path}: stays, {leftover.stays}"

    age = format_seconds(leftover.age_s)
    size = format_bytes(leftover.num_bytes)

    # The note is a file, in which anything may stand.
    note = leftover.note
    owner = f", of {printable(note.owner)}, begun {printable(note.began)}" if note is not None else ""
    savepoint = ", with a run's savepoint" if leftover.has_savepoint else ""
    end = ", removed" if removed else ""
    return f"{leftover.path}: {size}, last written {age} ago{owner}{savepoint}{end}"


def _summary(directories: Sequence[Path], leftovers: Sequence[Leftover], *, removed: bool) -> str:
    if not leftovers:
        return "No killed run left block files here."

    size = format_bytes(sum(leftover.num_bytes for leftover in leftovers))
    if removed:
        return f"{size} removed."
    # Quoted as a shell takes it, so that the line can be copied.
    return f"{size} in all. To remove: megatier clean {shlex.join(map(str, directories))} --yes"
