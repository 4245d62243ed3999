"""`megatier report`: what a run did, as one HTML page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatier.cli.output import write_text


def run(argv: Sequence[str]) -> int:
    """Write the page; 0 when the file is there."""
    parser = argparse.ArgumentParser(
        prog="megatier report",
        description="Write what a run did, or has done so far, as one HTML page that needs no network: loss, "
        "throughput, memory, what moved, what compute waited for, a step's timeline, what lies where, the plan.",
        epilog="example: megatier report runs/megatier --output mine.html",
    )
    parser.add_argument("directory", type=Path, metavar="RUN", help="a run's output.directory; the run may be going on")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE.html",
        help="where to write it (default: report.html in the run's directory)",
    )
    options = parser.parse_args(argv)
    from megatier.report.report_page import build  # loads torch: only once the arguments are known to be right

    text = build(options.directory)
    output: Path = options.output or options.directory / "report.html"
    write_text(output, text, "--output FILE.html")
    print(f"report written to {output}")
    return 0
