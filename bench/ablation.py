"""Measures what each lever is worth: rows of bench_step.py with one setting changed, and what was expected of each.

python bench/ablation.py [NAME ...]        writes bench/results/<machine>/ablation.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from record import facts, folder_of, write_row

GIB = 1 << 30
SCRIPT = Path(__file__).parent / "bench_step.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A row with settings changed."""

    what: str
    """The change in words."""
    predicted_s: float
    """Seconds a step, written down before they were measured."""
    row: int
    """A row of bench_step.py."""
    settings: tuple[str, ...] = ()
    """Settings for its option --set."""
    words: tuple[str, ...] = ()
    """Further options of it."""


CHANGES = {
    "base": Change(what="row 1 as it is", predicted_s=1.30, row=1),
    "nondeterministic": Change(
        what="kernels free to be non-deterministic", predicted_s=1.27, row=1, words=("--no-deterministic",)
    ),
    "saved_share_1": Change(
        what="all activations saved, less state on the GPU",
        predicted_s=1.55,
        row=1,
        settings=("model.saved_share=1.0", f"tiers.gpu={60 * GIB}"),
    ),
    "saved_share_0": Change(
        what="inputs alone saved, all state on the GPU",
        predicted_s=1.58,
        row=1,
        settings=("model.saved_share=0.0", f"tiers.gpu={106 * GIB}"),
    ),
    "eager": Change(
        what="no compilation, recompute",
        predicted_s=2.10,
        row=1,
        settings=("model.compile=false", "train.activations=recompute", f"tiers.gpu={100 * GIB}"),
    ),
    "loss_chunk_1024": Change(
        what="loss in chunks of 1,024 tokens", predicted_s=1.315, row=1, settings=("model.loss_chunk=1024",)
    ),
    "threads_8": Change(
        what="8 threads for the CPU's AdamW", predicted_s=1.36, row=1, settings=("tiers.update_threads=8",)
    ),
    "no_gpu_state": Change(
        what="row 2 with all updates on the CPU", predicted_s=2.35, row=2, settings=("tiers.streamed_share=0.0",)
    ),
    "streamed": Change(what="row 2 as it is: half of the state streamed", predicted_s=1.85, row=2),
}


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"changes to measure, of {', '.join(CHANGES)} (default: all)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each (default 4)")
    parser.add_argument("--output", type=Path, help="JSON file (default: bench/results/<machine>/ablation.json)")
    options = parser.parse_args()
    if unknown := set(options.names) - set(CHANGES):
        parser.error(f"no such change: {', '.join(sorted(unknown))}")
    known = facts()
    results = {}

    for name in options.names or CHANGES:
        change = CHANGES[name]
        # Each in a process of its own: compilation, arenas and peaks of memory of one would reach into the next.
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "row.json"
            words = ["--row", str(change.row), "--steps", str(options.steps), "--no-bound", *change.words]
            settings = ["--set", *change.settings] if change.settings else []
            command = [sys.executable, str(SCRIPT), *words, *settings, "--output", str(output)]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            measured = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}

        keys = ("median_seconds", "seconds", "tokens_per_s", "peak_gpu_bytes", "peak_ram_bytes", "stall_seconds")
        results[name] = {"what": change.what, "row": change.row, "predicted_seconds": change.predicted_s}
        results[name] |= {key: measured[key] for key in keys if key in measured}
        if run.returncode:
            results[name]["error"] = run.stderr.strip().splitlines()[-1:]
        found = measured.get("median_seconds", float("nan"))
        print(f"{name:18} predicted {change.predicted_s:.2f} s, measured {found:.3f} s", flush=True)

        # Written after each change, so that a run that is stopped loses nothing.
        path = options.output or folder_of(known["machine"]) / "ablation.json"
        write_row(known | {"changes": results}, path)


if __name__ == "__main__":
    main()
