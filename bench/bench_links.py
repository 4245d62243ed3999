"""What the host's memory carries: AdamW on the CPU, copies to the GPU and copies from it, alone and all at once.

A step's update is bound by this: the CPU moves 28 bytes a parameter through memory, an update that streams state
through the GPU 26. Needs a GPU.

python bench/bench_links.py [--threads 16,14,12,8] [--output FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatier import _native
from megatier.hardware import cores_usable
from megatier.store.arena import Arena

SCALARS = (0.9, 0.1, 0.999, 0.001, 1e-8, 1e-4, 1.0, 1.0)
PIECE_BYTES = 64 << 20
COPY_BYTES = 4 << 30
BYTES_PER_ELEMENT = 14
"""Of one AdamW update on the CPU: 12 of state and 2 of gradient, most of them read and written."""


class Update:
    """AdamW over and over on a state in pinned RAM."""

    def __init__(self, num_elements: int, chunk_elements: int) -> None:
        """Allocate it."""
        self._count, self._chunk = num_elements, chunk_elements
        self._arena = Arena(num_elements * BYTES_PER_ELEMENT, torch.device("cpu"), pin=True)

    def run(self, threads: int, until: Callable[[], bool]) -> tuple[float, float]:
        """Parameters updated and seconds."""
        pool = _native.ThreadPool(threads, 4096)
        offsets = [0, *itertools.accumulate(self._count * width for width in (2, 2, 4, 4))]
        done, began = 0, time.perf_counter()
        while not until():
            for start in range(0, self._count, self._chunk):
                size = min(self._chunk, self._count - start)
                widths = (2, 2, 4, 4, 2)
                weight, remainder, exp_avg, exp_avg_sq, grad = (
                    self._arena.address + offset + start * width for offset, width in zip(offsets, widths, strict=True)
                )
                planes = (weight, remainder, exp_avg, exp_avg_sq, grad)
                pool.submit_adamw(planes, True, [(0, size, 1.0)], SCALARS).wait()
                done += size
        seconds = time.perf_counter() - began
        pool.close()
        return done, seconds


class Copies:
    """Copies over and over in one direction, on a stream of their own."""

    def __init__(self, *, to_gpu: bool) -> None:
        """Allocate both ends."""
        self._host = Arena(COPY_BYTES, torch.device("cpu"), pin=True)
        self._device = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
        self._to_gpu, self._stream = to_gpu, torch.cuda.Stream()

    def run(self, until: Callable[[], bool]) -> tuple[float, float]:
        """Bytes copied and seconds."""
        done, began = 0, time.perf_counter()
        with torch.cuda.stream(self._stream):
            while not until():
                for start in range(0, COPY_BYTES, PIECE_BYTES):
                    host, device = (x[start : start + PIECE_BYTES] for x in (self._host.bytes, self._device))
                    (device if self._to_gpu else host).copy_(host if self._to_gpu else device, non_blocking=True)
                done += COPY_BYTES
                self._stream.synchronize()
        return done, time.perf_counter() - began


Work = Callable[[Callable[[], bool]], tuple[float, float]]
"""Runs until told to stop; returns an amount and seconds."""


def at_once(works: dict[str, Work], seconds: float) -> dict[str, float]:
    """Run all for a while; rate of each per second, in units of 1e9."""
    end, rates = time.perf_counter() + seconds, {}

    def work(name: str) -> None:
        amount, spent = works[name](lambda: time.perf_counter() > end)
        rates[name] = round(amount / spent / 1e9, 2)

    threads = [threading.Thread(target=work, args=(name,)) for name in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rates


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default=str(cores_usable()), help="thread counts of AdamW, comma-separated")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each measurement")
    parser.add_argument("--elements", type=int, default=1 << 30, help="parameters of the state")
    parser.add_argument("--chunk", default="33554432", help="elements of one submission, comma-separated")
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args()
    to_gpu, to_ram = Copies(to_gpu=True), Copies(to_gpu=False)
    results: list[dict[str, Any]] = []

    def note(**row: Any) -> None:  # noqa: ANN401
        results.append(row)
        print(json.dumps(row), flush=True)

    copies: dict[str, Work] = {"h2d_gbytes_per_s": to_gpu.run, "d2h_gbytes_per_s": to_ram.run}
    for name, copy in copies.items():
        note(**at_once({name: copy}, options.seconds))
    note(**at_once(copies, options.seconds))
    for chunk in map(int, options.chunk.split(",")):
        update = Update(options.elements, chunk)
        for threads in map(int, options.threads.split(",")):
            works: dict[str, Work] = {"adamw_gparameters_per_s": partial(update.run, threads)}
            note(threads=threads, chunk=chunk, **at_once(works, options.seconds))
            note(threads=threads, chunk=chunk, **at_once(works | copies, options.seconds))
    if options.output:
        options.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
