"""Compares `megatier bench` with fio on one drive: reading, writing, and both mixed 14:12, round after round.

Both use O_DIRECT, requests of 8 MiB, huge pages, and a file of the same size that was filled before. The mixed flow
reads one half of the file and writes the other. megatier queues 16 requests each way on 4 threads (`tiers.io_threads`).
So fio (libaio) runs with 4 and with 16 requests in flight, and the better of the two, by its median, counts. megatier
stores and verifies checksums as well; fio does not. Who begins changes from round to round. Ratios are of measurements
in the same round, since a shared drive changes its rate from minute to minute.

python bench/compare_fio.py --directory DIR [--size 8GiB] [--seconds 3] [--rounds 12] [--threads 4,8] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

from record import facts

from megatier.config.values import parse_bytes
from megatier.drives.blockfile import IoOptions
from megatier.drives.io_engine import REQUEST_BYTES
from megatier.measure.block_device import block_device
from megatier.measure.drive_traffic import BLOCK_BYTES, DEPTH, BlockTraffic

FLOWS = ("read", "write", "mixed")
DEPTHS = (IoOptions().num_threads, DEPTH * BLOCK_BYTES // REQUEST_BYTES)
"""Requests in flight of fio, each way: as many as megatier has threads, and as many as it has begun or queued."""
TARGET = 0.05
"""The share by which megatier may be slower."""
READS = 14
WRITES = 12
"""The mixed flow reads 14 bytes and writes 12 of each parameter, as the update of spilled state does."""
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Buffers in huge pages, as megatier's are, where the kernel's mode is madvise or always (glibc 2.35 or newer)."""

Rounds = list[dict[str, dict[str, float]]]
"""For each round, the rates by flow and system."""


class Fio:
    """Runs fio on a file of its own."""

    def __init__(self, directory: Path, num_bytes: int) -> None:
        """Fill the file."""
        self._path = directory / "fio"
        self._num_bytes = num_bytes
        self._run(max(DEPTHS), ["--name=fill", "--rw=write", f"--size={num_bytes}", "--refill_buffers"])

    def measure(self, flow: str, depth: int, seconds: float) -> float:
        """Measure the bytes per second of a flow, with so many requests in flight each way."""
        return rate_of(self._run(depth, ["--time_based", f"--runtime={round(seconds * 1000)}ms", *self._jobs(flow)]))

    def _jobs(self, flow: str) -> list[str]:
        if flow != "mixed":
            return [f"--name={flow}", f"--rw={flow}", f"--size={self._num_bytes}"]
        # Two jobs, which fio keeps at this ratio of bytes by its `flow` option.
        half = self._num_bytes // 2
        reader = ["--name=reader", "--rw=read", f"--size={half}", "--offset=0", f"--flow={READS}"]
        return [*reader, "--name=writer", "--rw=write", f"--size={half}", f"--offset={half}", f"--flow={WRITES}"]

    def _run(self, depth: int, words: list[str]) -> dict[str, Any]:
        common = [f"--filename={self._path}", "--direct=1", "--ioengine=libaio", f"--bs={REQUEST_BYTES}"]
        command = ["fio", "--output-format=json", *common, f"--iodepth={depth}", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | HUGE_PAGES)
        report: dict[str, Any] = json.loads(done.stdout)
        return report


def rate_of(report: dict[str, Any]) -> float:
    """Return the bytes per second of a report: the bytes of all jobs over the time of the longest."""
    ways = [job[way] for job in report["jobs"] for way in ("read", "write")]
    return float(sum(way["io_bytes"] for way in ways) / (max(way["runtime"] for way in ways) / 1000))


def compare(directory: Path, num_bytes: int, seconds: float, rounds: int, threads: Sequence[int]) -> Rounds:
    """Measure every flow of every system in each round."""
    found: Rounds = []
    with ExitStack() as stack:
        systems: list[tuple[str, Callable[[str], float]]] = []
        for count in threads:
            options = IoOptions(num_threads=count)
            opened = BlockTraffic(directory, num_bytes // BLOCK_BYTES, BLOCK_BYTES, options, pin=False)
            # All files stay open and filled for all rounds, so that no system pays for that within its time.
            traffic = stack.enter_context(opened)
            if not traffic.is_direct:
                raise SystemExit(f"{directory} refuses O_DIRECT: nothing to compare")
            systems.append((f"megatier, {count} threads", partial(measure, traffic, seconds=seconds)))

        scratch = stack.enter_context(TemporaryDirectory(prefix="megatier-fio-", dir=directory))
        fio = Fio(Path(scratch), num_bytes // BLOCK_BYTES * BLOCK_BYTES)
        for depth in DEPTHS:
            systems.append((f"fio, {depth} in flight", partial(fio.measure, depth=depth, seconds=seconds)))
        for number in range(rounds):
            first = number % len(systems)
            order = systems[first:] + systems[:first]
            found.append({flow: {name: work(flow) for name, work in order} for flow in FLOWS})

    return found


def measure(traffic: BlockTraffic, flow: str, *, seconds: float) -> float:
    """Measure the bytes per second of a flow of megatier's."""
    work = {"read": traffic.read, "write": traffic.write, "mixed": traffic.mixed}[flow]
    return work(seconds).bytes_per_s


def summary(rounds: Rounds) -> dict[str, dict[str, Any]]:
    """Return each flow's median rates, the better fio, and the median and quartiles of the rounds' ratios to it."""
    result = {}
    for flow in FLOWS:
        medians = {name: median(found[flow][name] for found in rounds) for name in rounds[0][flow]}
        best = max((name for name in medians if name.startswith("fio")), key=medians.__getitem__)
        ratios = {}

        for name in medians:
            if name.startswith("megatier"):
                each = [found[flow][name] / found[flow][best] for found in rounds]
                low, middle, high = quantiles(each, n=4, method="inclusive") if len(each) > 1 else each * 3
                ratios[name] = {"median": middle, "quartiles": [low, high]}

        result[flow] = {"median_bytes_per_s": medians, "best_fio": best, "ratios": ratios}

    return result


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return the summary as a Markdown table with a row for each flow and number of threads."""
    head = ["", "megatier", "better fio", "ratio (quartiles)", f"at most {TARGET:.0%} slower"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for flow, row in found.items():
        medians = row["median_bytes_per_s"]
        best = f"{medians[row['best_fio']] / 1e9:.2f} GB/s ({row['best_fio'].removeprefix('fio, ')})"
        for name, ratio in row["ratios"].items():
            low, high = ratio["quartiles"]
            rate = f"{medians[name] / 1e9:.2f} GB/s"
            share = f"{ratio['median']:.2f} ({low:.2f} to {high:.2f})"
            is_met = "yes" if ratio["median"] >= 1 - TARGET else "no"
            lines.append(f"| {flow}, {name.removeprefix('megatier, ')} | {rate} | {best} | {share} | {is_met} |")

    return "\n".join(lines)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--size", type=parse_bytes, default="8GiB")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", default=str(IoOptions().num_threads), help="of megatier, each way: one or several")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    fio = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    before = facts()
    device = block_device(options.directory)
    threads = [int(word) for word in options.threads.split(",")]
    rounds = compare(options.directory, options.size, options.seconds, options.rounds, threads)
    found = summary(rounds)
    print(table(found))

    if options.output is not None:
        settings = {"size_bytes": options.size, "seconds": options.seconds, "rounds": options.rounds}
        inside = {"block_bytes": BLOCK_BYTES, "request_bytes": REQUEST_BYTES, "fio_requests_in_flight": DEPTHS}
        report = before | {"fio": fio, "device": device.name, "settings": settings | inside}
        report |= {"summary": found, "bytes_per_s": rounds}
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
