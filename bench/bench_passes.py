"""Measures passes over memory: AdamW in place and into another generation, and the sum of a gradient's slices.

AdamW runs on a chunk with split masters, on the CPU, in four ways: in place; copied to the other generation and updated
there; read from one generation and written to the other; and in place while whole units are updated, of which many or
few requests wait for the threads. Gradients of a layer of 8B shape, in bf16, are added up on the GPU if there is one:
in two slices, in eight, and in four groups of one slice. The ways take turns, and medians count.

python bench/bench_passes.py [--elements 8388608] [--rounds 40] [--output FILE.json]
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from record import facts

from megatier import _native
from megatier.engine.gradient import Gradients
from megatier.hardware import cores_usable
from megatier.layout import Layout
from megatier.optim.adamw import Scalars, adamw_threads, begin_adamw, step_scalars
from megatier.tier import Kind

LAYER = Layout.of(
    [
        *(("q", (4096, 4096)), ("k", (1024, 4096)), ("v", (1024, 4096)), ("o", (4096, 4096))),
        *(("gate", (14336, 4096)), ("up", (14336, 4096)), ("down", (4096, 14336))),
        *(("norm", (4096,)), ("other", (4096,))),
    ]
)
SCALARS = Scalars(1.0, 1, 1e-3, 0.0, (*step_scalars(1, 1e-3, (0.9, 0.999), 1e-8), 1.0))
"""The scalars of AdamW's kernels at the first step, without clipping."""
SLICES = {"two slices": (1, 2), "eight slices": (1, 8), "four groups of one": (4, 1)}
"""The numbers of groups and of slices, by name."""


class Buffer:
    """A sink that takes gradients and does nothing with them."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Allocate one buffer for all units."""
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def acquire_grad_buffer(self, unit: str, *, fits: bool = False) -> torch.Tensor:
        """Give the buffer."""
        return self._bytes

    def submit_grad(self, unit: str, *, group: int) -> None:
        """Ship nothing."""

    def sums_in_buffer(self, unit: str) -> bool:
        """Answer as for a unit at home on the GPU, whose groups are added up in this buffer."""
        return True

    def measure(self, unit: str, grad: torch.Tensor) -> None:
        """Measure nothing."""


def by_turns(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each way. The first turn of each is not counted."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            found[name].append((time.perf_counter() - began) * 1e3)

    return {name: median(times[1:]) for name, times in found.items()}


class Run:
    """Two generations of elements with split masters, and their gradient."""

    def __init__(self, elements: int) -> None:
        """Allocate both generations and draw the weights."""
        self._elements = elements
        self._grad = torch.randn(elements).bfloat16()
        self.old, self.new = (
            {
                Kind.WEIGHT: torch.randn(elements).bfloat16(),
                Kind.REMAINDER: torch.zeros(elements, dtype=torch.int16),
                Kind.EXP_AVG: torch.zeros(elements),
                Kind.EXP_AVG_SQ: torch.zeros(elements),
            }
            for _ in range(2)
        )

    def begin(self, pool: _native.ThreadPool, before: dict[Kind, torch.Tensor]) -> _native.Batch:
        """Begin AdamW on the newer generation, in place unless planes of another are to be read."""
        work = begin_adamw(pool, self.new, self._grad, [(0, self._elements, 1.0)], SCALARS, before)
        assert work is not None
        return work


def updates(elements: int, rounds: int) -> dict[str, float]:
    """Measure AdamW on the CPU in three ways."""
    pool = adamw_threads(cores_usable())
    chunk = Run(elements)

    def update(before: dict[Kind, torch.Tensor]) -> None:
        chunk.begin(pool, before).wait()

    def copied() -> None:
        for kind, plane in chunk.old.items():
            chunk.new[kind].copy_(plane)
        update({})

    return by_turns(
        {
            "in place": lambda: update({}),
            "copied, then in place": copied,
            "from one into the other": lambda: update(chunk.old),
        },
        rounds,
    )


def behind_units(elements: int, rounds: int) -> dict[str, float]:
    """Measure a chunk's AdamW in place, while another thread has units updated, one after the other."""
    chunk = Run(elements)
    unit = Run(8 * elements)
    pools = {
        "4,096 requests wait": _native.ThreadPool(cores_usable(), 4096),
        "16 a thread wait": adamw_threads(cores_usable()),
    }
    found = {}

    for name, pool in pools.items():
        is_over = threading.Event()
        waits = list[float]()

        # Defaults bind the loop's values now. `begin` blocks while enough requests wait, so nothing runs ahead.
        def submit(pool: _native.ThreadPool = pool, is_over: threading.Event = is_over) -> None:
            while not is_over.is_set():
                unit.begin(pool, {})

        feeder = threading.Thread(target=submit)
        feeder.start()

        for _ in range(rounds):
            time.sleep(0.05)
            began = time.perf_counter()
            chunk.begin(pool, {}).wait()
            waits.append((time.perf_counter() - began) * 1e3)

        is_over.set()
        feeder.join()
        pool.close()
        found[name] = median(waits)

    return found


def sums(device: torch.device, rounds: int) -> dict[str, float]:
    """Measure the sums of a layer's gradients."""
    grads = [(tensor.name, torch.randn(tensor.shape, device=device).bfloat16()) for tensor in LAYER.tensors]

    def way(groups: int, slices: int) -> Callable[[], None]:
        buffer = Buffer(LAYER.num_elements * (4 if groups > 1 else 2), device)
        gradients = Gradients({"layer": LAYER}, buffer, buffer, groups=groups)

        def run() -> None:
            for group in range(groups):
                gradients.begin_group(group)
                gradients.expect_use("layer", slices)
                for _ in range(slices):
                    gradients.add("layer", grads)
                gradients.end_use("layer")

            if device.type == "cuda":
                torch.cuda.synchronize()

        return run

    return by_turns({name: way(*counts) for name, counts in SLICES.items()}, rounds)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=8 << 20)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results: dict[str, Any] = {
        **facts(),
        "elements": options.elements,
        "layer_elements": LAYER.num_elements,
        "device": device.type,
        "adamw_ms": updates(options.elements, options.rounds),
        "adamw_behind_units_ms": behind_units(options.elements, max(5, options.rounds // 4)),
        "sums_ms": sums(device, max(3, options.rounds // 8)),
    }
    sys.stdout.write(f"{results['adamw_ms']}\n{results['adamw_behind_units_ms']}\n{results['sums_ms']}\n")
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
