"""Long runs of a tiny model, and what each holds on to meanwhile. A process of its own, not a test.

    python soaked_runs.py FOLDER STEPS EVERY PLACE...

Each place, of PLACES, gets a run in a fork of its own, with an evaluation and a checkpoint every EVERY steps. Prints
one JSON object.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from from_outside import open_files, threads
from killed_runs import forked
from small_commands import command, metrics

from megatier.cli import main
from megatier.report.report import Progress
from megatier.tier import Tier
from megatier.train.loop import Loop

SETTINGS: dict[str, Any] = {
    "model.config.attention_dropout": 0.1,
    "model.config.num_hidden_layers": 6,
    "train.clip": 1.65,  # some steps clip, most do not
    "train.learning_rate": 1e-3,
    "output.export_dtype": "fp32",
    "output.keep_checkpoints": 1,
}
# Budgets of which every tier takes some of the state.
SPREAD: dict[str, Any] = {"tiers.state": "gpu,ram,nvme", "tiers.gpu": "360KiB", "tiers.ram": "800KiB"}
PLACES: dict[str, dict[str, Any]] = {
    "ram": {"tiers.state": "ram"},
    "spread": SPREAD,
    "spread_twice": {**SPREAD, "tiers.ram": "1040KiB", "tiers.generations": 2},
}

ZARRS = ("zarr", "asyncio")
"""Names of zarr's threads: a pool that it starts at the first checkpoint and fills up to its limit as it goes."""


def soak(folder: Path, place: str, num_steps: int, every: int) -> dict[str, Any]:
    """One run: its losses, norms, export, and samples of what it held."""
    drive = folder / "drive"
    drive.mkdir(parents=True)
    times = {"train.steps": num_steps, "train.evaluate_every": every, "output.checkpoint_every": every}
    words = command(folder, {**SETTINGS, **times, **PLACES[place], "tiers.nvme": f"{drive}:64MiB"})
    samples = folder / "samples.jsonl"
    began = time.perf_counter()
    assert forked(lambda: _sampled(words, folder, samples, every)) == 0
    steps = [record for record in metrics(folder) if "loss" in record]
    return {
        "losses": [record["loss"] for record in steps],
        "norms": [record["grad_norm"] for record in steps],
        "speculation": [record["speculation"] for record in steps],
        "export": hashlib.sha256((folder / "run" / "model" / "model.safetensors").read_bytes()).hexdigest(),
        "samples": [json.loads(line) for line in samples.read_text().splitlines()],
        "seconds": time.perf_counter() - began,
    }


def _sampled(words: list[str], folder: Path, samples: Path, every: int) -> int:
    """Train; look at the process after every so many steps, before their checkpoint is written."""
    real = Loop._step

    def looked_at(self: Loop, step: int, progress: Progress) -> None:
        real(self, step, progress)
        if step % every == 0:
            with samples.open("a") as file:
                file.write(json.dumps({"step": step, **held(self, folder)}) + "\n")

    Loop._step = looked_at  # type: ignore[method-assign]
    return main(words)


def held(run: Loop, folder: Path) -> dict[str, Any]:
    """What must stay the same after step and step, and the resident bytes."""
    if (writer := run._saves.writer) is not None:  # it makes and removes files meanwhile
        writer.wait()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed bytes are the allocator's, not ours
    store = run._session.store
    on_disk = [path for path in folder.rglob("*") if path.is_file()]
    return {
        "files": len(open_files()),
        "threads": len(threads()) - sum(thread.name.startswith(ZARRS) for thread in threading.enumerate()),
        "tensors": sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects()),
        "arenas": {str(tier): store.usage(tier) for tier in Tier},
        "files_on_disk": len(on_disk),
        "blocks_on_disk": sum(path.stat().st_blocks for path in on_disk if not path.suffix.startswith(".json")),
        "state": {str(tier): size for tier, size in run._session.placement.state_bytes.items()},
        "rss": psutil.Process().memory_info().rss,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    root, num_steps, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    sys.stdout.write(json.dumps({place: soak(root / place, place, num_steps, every) for place in sys.argv[4:]}))
