"""`megatier report`: writes one HTML page that shows what a run did."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatier.cli.output import write_text
from megatier.report.report_page import build


def run(argv: Sequence[str]) -> int:
    """Write the page; returns 0 when the file is written."""
    parser = argparse.ArgumentParser(
        prog="megatier report",
        description="Write one HTML page that shows what a run did, or has done so far: loss, throughput, memory, "
        "bytes moved, what compute waited for, the timeline of a step, where the state lies, and the plan. The page "
        "needs no network.",
        epilog="example: megatier report runs/megatier --output mine.html",
    )
    parser.add_argument(
        "directory", type=Path, metavar="RUN", help="output.directory of a run, which may still be going on"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE.html",
        help="file to write (default: report.html in the run's directory)",
    )
    options = parser.parse_args(argv)

    # The page is made whole before the file is opened, so an error leaves a page from before as it is.
    text = build(options.directory)
    output: Path = options.output or options.directory / "report.html"
    write_text(output, text, "--output FILE.html")
    print(f"report written to {output}")
    return 0
