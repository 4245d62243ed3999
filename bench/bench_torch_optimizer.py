"""Compares TieredAdamW with torch.optim.AdamW(fused=True): seconds a step, and memory on top of the parameters.

For each dtype the systems take turns, each in a process of its own: torch's, then ours with all state in RAM, with half
of it there, and with no more RAM than slots of 64 MiB. Before each round the drive's own rate is measured, with as many
bytes read as written. For bf16 parameters torch keeps no fp32 master, and moments in bf16; ours has both in fp32.

python bench/bench_torch_optimizer.py --nvme DIR [--device cuda] [--millions 100] [--rounds 3] [--output FILE.json]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from record import facts
from torch import nn

from megatier import TieredAdamW
from megatier.config.values import MountBudget
from megatier.measure.drive_probe import probe_drive

GIB = 1 << 30
MIB = 1 << 20
SIDE = 2048
"""Each parameter is a square matrix with so many rows."""
STEPS = 6
"""Steps of a measurement. The first allocates, so its time is given apart."""
SYSTEMS = ("torch_fused", "ram", "half", "nvme")
PREDICTION = (
    "In RAM: the time of torch's fused AdamW, or up to half more: the C kernel reads and writes the same bytes, and "
    "gradients are looked at first. On NVMe: 16 bytes a parameter in fp32, 20 in bf16, at the drive's mixed rate, with "
    "AdamW hidden under it; with half in RAM half of that. Memory: the RAM budget and 100 MiB at most."
)


def open_optimizer(system: str, parameters: Sequence[nn.Parameter], nvme: Path) -> torch.optim.Optimizer:
    """Make the AdamW of a system."""
    if system == "torch_fused":
        return torch.optim.AdamW(parameters, fused=True)
    # Bytes of state for each parameter: fp32 moments, and in bf16 the remainder of the master as well.
    width = 10 if parameters[0].dtype is torch.bfloat16 else 8
    state = sum(parameter.numel() for parameter in parameters) * width
    ram = {"ram": state + MIB, "half": state // 2, "nvme": 64 * MIB}[system]
    return TieredAdamW(parameters, ram=ram, nvme=() if system == "ram" else [f"{nvme}:{state + GIB}"])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one system: seconds of each step, and the peaks of memory above parameters and gradients."""
    dtype = getattr(torch, options.dtype)
    on_gpu = options.device == "cuda"
    parameters = []

    for _ in range(options.millions * 1_000_000 // SIDE**2):
        parameters.append(nn.Parameter(torch.randn(SIDE, SIDE, device=options.device, dtype=dtype)))
        parameters[-1].grad = torch.randn_like(parameters[-1])

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    gpu_before = torch.cuda.memory_allocated() if on_gpu else 0
    optimizer = open_optimizer(options.system, parameters, options.nvme)
    seconds = []

    for _ in range(STEPS):
        start = time.perf_counter()
        optimizer.step()
        # A step only enqueues its kernels.
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)

    if isinstance(optimizer, TieredAdamW):
        optimizer.close()

    return {
        "num_parameters": sum(parameter.numel() for parameter in parameters),
        "first_step_seconds": seconds[0],
        "seconds": seconds[1:],
        "ram_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before,
        "gpu_bytes": torch.cuda.max_memory_allocated() - gpu_before if on_gpu else None,
    }


def child(options: argparse.Namespace, system: str, dtype: str) -> dict[str, Any]:
    """Measure a system in a process of its own."""
    # Peaks of memory are those of a process, so each system needs one that nothing else has used.
    words = ["--nvme", options.nvme, "--device", options.device, "--millions", options.millions]
    command = [sys.executable, __file__, *map(str, words), "--system", system, "--dtype", dtype]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def compare(options: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """Run the rounds of all systems, and take the medians of their steps."""
    rounds: dict[str, list[dict[str, Any]]] = {system: [] for system in SYSTEMS}
    drive = []
    for _ in range(options.rounds):
        # A shared drive changes its rate from minute to minute, so it is measured in each round.
        drive.append(probe_drive(MountBudget(options.nvme, 2 * GIB), seconds=2).mixed.bytes_per_s)
        for system in SYSTEMS:
            rounds[system].append(child(options, system, dtype))

    found: dict[str, Any] = {"drive_mixed_bytes_per_s": drive}
    for system, each in rounds.items():
        middle = median(second for one in each for second in one["seconds"])
        found[system] = {
            "median_seconds": middle,
            "parameters_per_s": each[0]["num_parameters"] / middle,
            "ram_bytes": median(one["ram_bytes"] for one in each),
            "gpu_bytes": each[0]["gpu_bytes"],
            "rounds": each,
        }

    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--millions", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--system", choices=SYSTEMS, help="measure this one alone, here")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    if options.system is not None:
        sys.stdout.write(json.dumps(measure(options)))
        return
    results = {"prediction": PREDICTION, **facts()}

    for dtype in ("float32", "bfloat16"):
        results[dtype] = compare(options, dtype)
        for system in SYSTEMS:
            figures = {name: value for name, value in results[dtype][system].items() if name != "rounds"}
            sys.stdout.write(f"{dtype} {system}: {json.dumps(figures)}\n")

    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
