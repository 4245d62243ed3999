"""Measures a loop whose batches all have another length, beside one with rows of a single length.

Each batch has about as many tokens, in rows of one length, without padding. What is compiled for any length serves the
loop, as in `megatier.stream`; with --fixed the code is compiled for one length, as in `megatier train`, and all rows
have 1,024 tokens. Both take `sdpa`, which is what `megatier.stream` takes.

python bench/bench_lengths.py [--row 5] [--lengths 200] [--steps 20]     writes bench/results/<machine>/lengths.json
python bench/bench_lengths.py --lengths 0 --steps 1    a second process: the seconds until the end of its first step

Results: the phases of the start, tokens/s, the slowest step after the tenth over the median, what the host works for a
step, and GPU memory in the course of the loop. `python -m cProfile -s cumulative` before the second command tells more
of each phase, and `python -X importtime` of the imports.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from laid_weights import fill
from peers.shapes import SHAPES, peak_gpu_bytes
from phases import Phases
from record import facts, folder_of
from rows import RATE, ROWS, Run, changed, config_of, skeleton

from megatier.compute.compile_clock import CLOCK
from megatier.hardware import set_cuda_defaults
from megatier.host_wait import HOST_WAIT
from megatier.session.process import make_repeatable, share_interpreter
from megatier.session.session import Session
from megatier.setup.setup import Setup

WARMUP = 10
"""Steps that compile, or learn the order of units."""


def shapes_of(tokens: int, count: int) -> list[tuple[int, int]]:
    """So many different lengths from 128 to 2,048, in an order that a seed decides, each with rows for the tokens."""
    lengths = random.Random(0).sample(range(128, 2049), count)
    return [(tokens // length, length) for length in lengths]


def row_of(options: argparse.Namespace) -> Run:
    """Return the row with the changes that were asked for, and with the attention of a loop."""
    return changed(ROWS[options.row], [*options.set, "model.attention=sdpa"])


def run(session: Session, shapes: list[tuple[int, int]], vocabulary: int) -> Iterator[dict[str, Any]]:
    """Make one step for each shape of a batch, and say what it took."""
    generator = torch.Generator().manual_seed(1)
    for step, (rows, length) in enumerate(shapes, start=1):
        ids = torch.randint(0, vocabulary, (rows, length), generator=generator)
        HOST_WAIT.restart()
        began = time.perf_counter()
        result = session.engine.train_step(step, RATE, [{"input_ids": ids, "labels": ids}])
        seconds = time.perf_counter() - began
        yield {
            "rows": rows,
            "length": length,
            "seconds": seconds,
            "host_busy_seconds": seconds - HOST_WAIT.ns / 1e9,
            "loss": result.loss,
            "norm": result.grad_norm,
            "reserved_bytes": torch.cuda.memory_reserved() if torch.cuda.is_available() else 0,
        }


def summary(steps: list[dict[str, Any]]) -> dict[str, float]:
    """The rate of the steps after the warm-up, and the slowest of them over the median."""
    timed = steps[WARMUP:]
    seconds = [step["seconds"] for step in timed]
    return {
        "tokens_per_s": sum(step["rows"] * step["length"] for step in timed) / sum(seconds),
        "median_seconds": median(seconds),
        "median_host_busy_seconds": median(step["host_busy_seconds"] for step in timed),
        "slowest_over_median": max(seconds) / median(seconds),
        "reserved_bytes_after_warmup": timed[0]["reserved_bytes"],
        "reserved_bytes_at_the_end": timed[-1]["reserved_bytes"],
    }


def measure(
    options: argparse.Namespace, shapes: list[tuple[int, int]], phases: Phases, *, any_shape: bool
) -> dict[str, Any]:
    """Open the row's session and make the steps."""
    row = row_of(options)
    config = config_of(row, True, None)
    make_repeatable(config)
    share_interpreter()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    phases.end("device")

    model = skeleton(row, config.model.attention)
    phases.end("model")
    with Session(Setup.here(config, model), any_shape=any_shape) as session:
        phases.end("session")
        session.seal()
        phases.end("memory of the tiers")
        fill(session)
        phases.end("weights")

        steps: list[dict[str, Any]] = []
        compiled = CLOCK.seconds
        for step in run(session, shapes, SHAPES[row.shape].vocab):
            if not steps:
                phases.end("step 1")
                print(f"{phases}, of which {CLOCK.seconds - compiled:.2f} compile or load compiled code", flush=True)
            steps.append(step)
            print({name: round(value, 3) for name, value in step.items()}, flush=True)
    found = {"any_shape": any_shape, "steps": steps, "compile_seconds": CLOCK.seconds - compiled}
    found |= {"start": phases.seconds, "seconds_until_the_end_of_step_1": phases.total}
    return found | (summary(steps) if len(steps) > WARMUP else {})


def main() -> None:
    """Measure fixed rows both ways, and then the lengths."""
    phases = Phases(of_process=True)
    phases.end("imports")
    parser = argparse.ArgumentParser(description="Batches of any length beside rows of one.")
    parser.add_argument("--row", type=int, default=5, help="a row of the table, whose model and tiers are taken (5)")
    parser.add_argument("--lengths", type=int, default=200, help="different lengths (200)")
    parser.add_argument("--steps", type=int, default=30, help="steps with rows of 1,024 tokens (30)")
    parser.add_argument("--set", action="append", default=[], help="change the row, as in bench_step.py")
    parser.add_argument("--output", type=Path, help="the file of results")
    options = parser.parse_args()
    set_cuda_defaults()

    row = row_of(options)
    fixed = [(row.batch, row.sequence)] * options.steps
    found: dict[str, Any] = {"any_shape_fixed_rows": measure(options, fixed, phases, any_shape=True)}
    if options.lengths:
        lengths = shapes_of(row.batch * row.sequence, options.lengths)
        found["lengths"] = measure(options, lengths, Phases(), any_shape=True)
        found["fixed"] = measure(options, fixed, Phases(), any_shape=False)
        ratio = found["lengths"]["tokens_per_s"] / found["fixed"]["tokens_per_s"]
        found["lengths_over_fixed"] = ratio
    found |= facts() | {"peak_gpu_bytes": peak_gpu_bytes()}
    output = options.output or folder_of(found["machine"]) / "lengths.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found, indent=1), encoding="utf-8")
    for name, part in found.items():
        if isinstance(part, dict):
            print(name, {key: value for key, value in part.items() if key not in ("steps", "machine")})
    print("lengths over fixed:", found.get("lengths_over_fixed"))


if __name__ == "__main__":
    main()
