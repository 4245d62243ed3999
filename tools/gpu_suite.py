"""Runs the tests marked `gpu` side by side on all GPUs of this host, and those of ranks on all of them at once.

python tools/gpu_suite.py [FILES] [--shard 2/3] [--beside 8] [--log FOLDER]

A few tests of a file make one process, which sees one GPU. So the suite takes as long as its slowest tests, not as long
as its largest files. Exits with 1 if a test failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue

import torch

ROOT = Path(__file__).parents[1]
PYTEST = (sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--no-header", "-p", "no:cacheprovider", "-n", "0")
FEW = 12
"""Files with no more tests have long ones, which compile layers or make many steps. Two of them are one process."""
TOGETHER = 24
"""Tests of other files that are one process, which takes about ten seconds to start."""
COMPILERS = "TORCHINDUCTOR_COMPILE_THREADS"
"""Says how many processes of the compiler each process of tests may have. By default they are as many as cores."""


def collected(files: list[str]) -> list[str]:
    """The ids of the tests of these files that are marked `gpu`, file by file; none given: of all files."""
    found = subprocess.run([*PYTEST, "--collect-only", *files], cwd=ROOT, capture_output=True, text=True, check=True)
    return [line for line in found.stdout.splitlines() if "::" in line]


def file_of(test: str) -> str:
    """The file in which a test stands."""
    return test.partition("::")[0]


def processes(tests: list[str]) -> Iterator[tuple[str, ...]]:
    """Cut the tests into those of one process, so that no process has tests of two files."""
    # Files with few tests have the long ones, which had better not begin last.
    for of_file in sorted((tuple(group) for _, group in groupby(tests, file_of)), key=len):
        size = 2 if len(of_file) <= FEW else TOGETHER
        for first in range(0, len(of_file), size):
            yield of_file[first : first + size]


def run(number: int, tests: tuple[str, ...], gpus: list[str], log: Path) -> tuple[int, float, str]:
    """Run some tests, which see these GPUs. Return pytest's exit status, the seconds, and the last line of output."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus), COMPILERS: "2"}
    began = time.monotonic()
    output = log / f"{number:03}.txt"
    with output.open("w", encoding="utf-8") as file:
        command = [*PYTEST, "--durations=3", *tests]
        status = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=file, check=False).returncode
    lines = output.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line), "")
    return status, time.monotonic() - began, last


def report(number: int, tests: tuple[str, ...], gpus: list[str], log: Path) -> bool:
    """Run some tests, and print how they ended. Return whether one failed."""
    status, seconds, last = run(number, tests, gpus, log)
    mark = f"FAILED ({status}, {log / f'{number:03}.txt'}) " if status else ""
    print(f"{mark}{file_of(tests[0])} on {','.join(gpus)}: {seconds:.0f} s, {last}", flush=True)
    return status != 0


def run_all(chunks: list[tuple[str, ...]], gpus: list[str], beside: int, log: Path) -> int:
    """Run all processes, so many at once on each GPU, and last those that need several. Return how many failed."""
    numbered = list(enumerate(chunks))
    of_ranks = [entry for entry in numbered if file_of(entry[1][0]).startswith("tests/ranks/")]
    others = [entry for entry in numbered if entry not in of_ranks]

    free: SimpleQueue[str] = SimpleQueue()
    for gpu in gpus * beside:
        free.put(gpu)

    def on_a_free_gpu(entry: tuple[int, tuple[str, ...]]) -> bool:
        gpu = free.get()
        try:
            return report(*entry, [gpu], log)
        finally:
            free.put(gpu)

    def on_all_gpus(entry: tuple[int, tuple[str, ...]]) -> bool:
        return report(*entry, gpus, log)

    with ThreadPoolExecutor(beside * len(gpus)) as pool:
        failed = sum(pool.map(on_a_free_gpu, others))
    # Ranks wait for each other for a limited time, so few of their tests run at once.
    with ThreadPoolExecutor(2) as pool:
        return failed + sum(pool.map(on_all_gpus, of_ranks))


def part_of(text: str) -> tuple[int, int]:
    """Return which part of how many this is, such as 2/3."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part of a whole; give one such as 2/3")
    return int(number), int(count)


def main() -> None:
    """Collect, run, and say what failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="files of tests (all)")
    parser.add_argument("--shard", type=part_of, default="1/1", help="which part of how many (1/1)")
    parser.add_argument("--beside", type=int, default=8, help="processes at once on a GPU (8)")
    parser.add_argument("--log", type=Path, help="a folder for the output of each process")
    options = parser.parse_args()

    shard, shards = options.shard
    gpus = [str(number) for number in range(torch.cuda.device_count())]
    if not gpus:
        sys.exit("torch finds no GPU here.")
    log = options.log or Path(tempfile.mkdtemp(prefix="gpu-suite-"))
    log.mkdir(parents=True, exist_ok=True)

    chunks = list(processes(collected(options.files)))[shard - 1 :: shards]
    began = time.monotonic()
    failed = run_all(chunks, gpus, options.beside, log)
    seconds = time.monotonic() - began
    print(f"{failed} of {len(chunks)} processes failed; {seconds:.0f} s on {len(gpus)} GPUs; output in {log}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
