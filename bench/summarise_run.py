"""Turns a run's metrics.jsonl into one result file: medians over the steady steps, with commit, machine and command.

python bench/summarise_run.py METRICS.jsonl OUTPUT.json --commit HASH --machine TEXT --command TEXT
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

LEARNING_STEPS = 1
"""The first step records the order of units and loads on demand; it has no update ahead of it either."""


def summarise(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Take medians and totals of a run's records."""
    steps = [record for record in records if "loss" in record]
    steady = steps[LEARNING_STEPS:]
    causes = sorted({cause for step in steady for cause in step["stall_seconds"]})
    # Counters of bytes grow over the run, so a step's own bytes are the difference of two records.
    moved = [
        {
            queue: after["moved_bytes"].get(queue, 0) - before["moved_bytes"].get(queue, 0)
            for queue in after["moved_bytes"]
        }
        for before, after in zip(steps, steady, strict=False)
    ]

    return {
        "losses": [step["loss"] for step in steps],
        "grad_norms": [step["grad_norm"] for step in steps],
        "heldout_loss": next((record["heldout_loss"] for record in records if "heldout_loss" in record), None),
        "seconds": [round(step["seconds"], 3) for step in steps],
        "median_seconds_per_step": round(median(step["seconds"] for step in steady), 3),
        "median_tokens_per_s": round(median(step["tokens_per_s"] for step in steady)),
        "median_stall_seconds": {
            cause: round(median(step["stall_seconds"].get(cause, 0.0) for step in steady), 3) for cause in causes
        },
        "moved_bytes_per_steady_step": moved[-1] if moved else {},
    }


def main() -> None:
    """Read, summarise, write, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("metrics", type=Path)
    parser.add_argument("output", type=Path)
    for name in ("commit", "machine", "command"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    records = [json.loads(line) for line in options.metrics.read_text(encoding="utf-8").splitlines()]
    facts = {"commit": options.commit, "machine": options.machine, "command": options.command}
    result = facts | summarise(records)
    options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
