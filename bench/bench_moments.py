"""Compares what the quick start's model learns with moments in fp32, in bf16 by chance or to nearest, and in fp8.

Each run is `megatier train examples/quickstart.yaml` with all state on the device, in a process of its own, and with
its seed in common with the runs of the other variants. Several runs go on at once, since a model so small leaves a
device idle for most of a step. Rounding to nearest is here alone: after each update fp32 moments are rounded to bf16.

python bench/bench_moments.py [--steps 2000] [--seeds 0 1 2] [--beta2 0.999] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from record import facts, folder_of, write_row
from torch import Tensor

from megatier import _native
from megatier.cli import main as megatier
from megatier.hardware import cores_usable
from megatier.optim.optimizer import RunOptimizer
from megatier.tier import Kind

VARIANTS = {"fp32": "fp32", "bf16": "bf16", "bf16 to nearest": "fp32", "fp8": "fp8"}
"""The moments of each variant, as `train.moments` names them."""
CONFIG = Path(__file__).parent.parent / "examples" / "quickstart.yaml"
WARMUP_SHARE = 7
"""The quick start warms up for one step in so many."""


def settings_of(variant: str, seed: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of a run that differ from those of the quick start."""
    return {
        "tiers.state": "gpu",
        "tiers.gpu": "256MiB",
        "tiers.ram": "256MiB",
        "tiers.nvme": "",
        "tiers.update_threads": 2,
        "model.compile": False,
        "train.steps": options.steps,
        "train.warmup_steps": options.steps // WARMUP_SHARE,
        "train.beta2": options.beta2,
        "train.seed": seed,
        "train.moments": VARIANTS[variant],
        "train.evaluate_batches": 64,
        "output.directory": folder,
        "output.export": False,
        "output.checkpoint_every": 0,
    }


def run_here(variant: str, settings: Mapping[str, Any]) -> int:
    """Run one of them in this process."""
    if variant == "bf16 to nearest":
        round_to_nearest()
    return megatier(["train", str(CONFIG), *(f"--{name}={value}" for name, value in settings.items())])


def round_to_nearest() -> None:
    """Let every update of this process round moments to the nearest number of bf16, which fp32 planes hold."""
    update = RunOptimizer._apply

    def rounded(self: RunOptimizer, *arguments: Any) -> _native.Batch | None:  # noqa: ANN401
        work = update(self, *arguments)
        if work is not None:
            work.wait()
        planes: Mapping[Kind, Tensor] = arguments[3]
        for kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ):
            moments = planes[kind].view(torch.float32)
            moments.copy_(moments.bfloat16())
        return work

    RunOptimizer._apply = rounded  # type: ignore[method-assign, assignment]


def run_apart(variant: str, seed: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run one of them in a process of its own, and return what came of it."""
    began = time.perf_counter()
    settings = {name: str(value) for name, value in settings_of(variant, seed, folder, options).items()}
    done = subprocess.run(
        [sys.executable, __file__, "--run", json.dumps([variant, settings])],
        capture_output=True,
        text=True,
        check=False,
        # As many threads as there are cores, in each of so many processes, would be in each other's way.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise SystemExit(f"{variant}, seed {seed} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    records = list(_records(folder / "metrics.jsonl"))
    losses = [record["loss"] for record in records if "loss" in record]
    return {
        "variant": variant,
        "seed": seed,
        "heldout_loss": next(record["heldout_loss"] for record in reversed(records) if "heldout_loss" in record),
        "train_loss": fmean(losses[-max(1, len(losses) // 20) :]),
        "seconds": time.perf_counter() - began,
    }


def _records(path: Path) -> Iterator[dict[str, Any]]:
    yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def summary_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return each variant's mean held-out loss, and how far its runs are from those with fp32, seed by seed."""
    losses = {(run["variant"], run["seed"]): run["heldout_loss"] for run in runs}
    summary: dict[str, Any] = {}
    for variant in VARIANTS:
        seeds = [seed for of, seed in losses if of == variant and ("fp32", seed) in losses]
        if seeds:
            changes = [losses[variant, seed] / losses["fp32", seed] - 1 for seed in seeds]
            mean = fmean(losses[variant, seed] for seed in seeds)
            summary[variant] = {"heldout_loss": mean, "changes": changes, "change": fmean(changes)}
    return summary


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="steps of each run (default 2000)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default 0 1 2")
    parser.add_argument(
        "--beta2", type=float, default=0.999, help="default 0.999, that of megatier; the quick start has 0.95"
    )
    parser.add_argument("--workers", type=int, help="runs at once (default: all if each has a core)")
    parser.add_argument("--output", type=Path, help="JSON file (default: bench/results/<machine>/moments.json)")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run all, print each as it ends, and write what there is so far."""
    options = parse_arguments()
    if options.run is not None:
        sys.exit(run_here(*json.loads(options.run)))

    result: dict[str, Any] = {**facts(), "steps": options.steps, "beta2": options.beta2, "runs": []}
    path = options.output or folder_of(result["machine"]) / "moments.json"
    # Seed by seed, so that runs to compare end together.
    cases = [(variant, seed) for seed, variant in product(options.seeds, VARIANTS)]
    cores = cores_usable()
    workers = options.workers or (len(cases) if cores >= len(cases) else max(1, cores // 2))
    with tempfile.TemporaryDirectory(prefix="moments-") as folder, ThreadPoolExecutor(workers) as pool:
        began = time.perf_counter()
        ways = [Path(folder) / str(number) for number in range(len(cases))]
        running = [pool.submit(run_apart, *case, way, options) for case, way in zip(cases, ways, strict=True)]
        for done in as_completed(running):
            result["runs"].append(found := done.result())
            result["summary"] = summary_of(result["runs"])
            print(found, flush=True)
            write_row({**result, "seconds": time.perf_counter() - began}, path)

    for variant, found in result["summary"].items():
        print(f"{variant}: held-out loss {found['heldout_loss']:.4f}, {100 * found['change']:+.3f} % of fp32's")


if __name__ == "__main__":
    main()
