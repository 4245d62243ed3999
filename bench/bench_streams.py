"""How kernels and copies of several CUDA streams hold each other up: when does compute start that needs one copy?

Sixteen blocks go up on one stream. A second stream runs a kernel on each block as it comes. Compute, on a third, needs
the first block alone; a few bytes go up on it too. Measured: ms from the start until compute's kernel and its small
copy are over, where all copies are enqueued at once or one at a time, and where the second stream's kernels wait for
their copies on the stream or are enqueued when the host has seen the copy end.

python bench/bench_streams.py [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import threading
from pathlib import Path
from statistics import median

import torch
from record import RESULTS, facts

BLOCK_BYTES = 400 << 20
NUM_BLOCKS = 16
ROUNDS = 5


class Blocks:
    """Memory and streams."""

    def __init__(self) -> None:
        """Everything is allocated and touched once."""
        self.source = torch.zeros(NUM_BLOCKS, BLOCK_BYTES, dtype=torch.uint8).pin_memory()
        self.target = torch.zeros(NUM_BLOCKS, BLOCK_BYTES, dtype=torch.uint8, device="cuda")
        self.few = torch.zeros(1024, dtype=torch.uint8).pin_memory()
        self.few_there = torch.zeros(1024, dtype=torch.uint8, device="cuda")
        self.number = torch.zeros(1, device="cuda") + 1
        self.copies, self.updates = torch.cuda.Stream(), torch.cuda.Stream()


class Round:
    """One measurement."""

    def __init__(self, blocks: Blocks, *, one_at_a_time: bool, host_waits: bool) -> None:
        """Runs when `run` is called."""
        self._blocks, self._one_at_a_time, self._host_waits = blocks, one_at_a_time, host_waits
        self._ended = [_event() for _ in range(NUM_BLOCKS)]
        self._issued = [threading.Event() for _ in range(NUM_BLOCKS)]

    def run(self) -> tuple[float, float, float]:
        """Ms until compute's kernel, its small copy, and the last block's copy are over."""
        begun, kernel, small = _event(), _event(), _event()
        torch.cuda.synchronize()
        begun.record()
        lanes = [threading.Thread(target=self._copy), threading.Thread(target=self._update)]
        for lane in lanes:
            lane.start()
        if not self._one_at_a_time and not self._host_waits:  # let both lanes enqueue what they have
            for lane in lanes:
                lane.join()
        self._issued[0].wait()
        torch.cuda.current_stream().wait_event(self._ended[0])
        self._blocks.number.add_(1)
        kernel.record()
        self._blocks.few_there.copy_(self._blocks.few, non_blocking=True)
        small.record()
        for lane in lanes:
            lane.join()
        torch.cuda.synchronize()
        return begun.elapsed_time(kernel), begun.elapsed_time(small), begun.elapsed_time(self._ended[-1])

    def _copy(self) -> None:
        with torch.cuda.stream(self._blocks.copies):
            for index in range(NUM_BLOCKS):
                if self._one_at_a_time and index:
                    self._ended[index - 1].synchronize()
                self._blocks.target[index].copy_(self._blocks.source[index], non_blocking=True)
                self._ended[index].record()
                self._issued[index].set()

    def _update(self) -> None:
        with torch.cuda.stream(self._blocks.updates):
            for index in range(NUM_BLOCKS):
                self._issued[index].wait()
                if self._host_waits:
                    self._ended[index].synchronize()
                else:
                    self._blocks.updates.wait_event(self._ended[index])
                self._blocks.target[index].add_(1)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file (default: bench/results/streams_<date>.json)")
    options = parser.parse_args()
    known, blocks, results = facts(), Blocks(), []
    for one_at_a_time in (False, True):
        for host_waits in (False, True):
            made = [Round(blocks, one_at_a_time=one_at_a_time, host_waits=host_waits) for _ in range(ROUNDS + 1)]
            rounds = [each.run() for each in made][1:]
            kernel, small, last = (median(column) for column in zip(*rounds, strict=True))
            results.append(
                {
                    "one_copy_enqueued": one_at_a_time,
                    "host_waits": host_waits,
                    "kernel_ms": kernel,
                    "small_copy_ms": small,
                    "last_copy_ms": last,
                }
            )
            print(results[-1], flush=True)
    path = options.output or RESULTS / f"streams_{known['date'][:10]}.json"
    path.write_text(json.dumps(known | {"block_bytes": BLOCK_BYTES, "cases": results}, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
