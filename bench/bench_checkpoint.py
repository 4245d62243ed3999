"""How fast a checkpoint is written and read back, against what the drive does.

Per home of the state, in alternated rounds: the drive's own rates through the store's files (write, and mixed at 12 in
to 12 out, as a spilled checkpoint moves), then a checkpoint written, then restored. The target is 0.8 of the write rate
where the state lies in RAM, and of the mixed rate where it is spilled; there each byte is read and written once.

python bench/bench_checkpoint.py --directory DIR [--layers 4] [--rounds 3] [--output FILE.json]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peers.shapes import SHAPES, llama_config
from record import facts
from torch import Tensor

from megatier.config import ModelConfig, MountBudget, NumericsConfig, TiersConfig, TrainConfig
from megatier.models.decoder import Unit, build_skeleton
from megatier.train.checkpoint import checkpoint_bytes, restore
from megatier.train.checkpoint_writer import CheckpointWriter
from megatier.train.drive_probe import probe_drive
from megatier.train.session import Session

GIB, PIECE_ELEMENTS = 1 << 30, 4 << 20
PREDICTION = (
    "RAM: the drive's write rate less the time of one thread that fills the buffers (join and copies, about 12 bytes "
    "read and 12 written a parameter at 5 to 10 GB/s) where that is not hidden: 0.85 of it. NVMe: reads wait for the "
    "thread that fills the buffers, and nothing reads ahead: 0.6 of the mixed rate."
)


class RandomWeights:
    """One random piece, again and again."""

    def __init__(self) -> None:
        """Drawn once."""
        self._piece = torch.randn(PIECE_ELEMENTS)

    def read(self, unit: Unit) -> Iterator[tuple[int, Tensor]]:
        """All of a unit."""
        for start in range(0, unit.layout.num_elements, PIECE_ELEMENTS):
            yield start, self._piece[: unit.layout.num_elements - start]


def open_session(options: argparse.Namespace, home: str) -> Session:
    """A model in part of the 3B shape, with all state in one place."""
    config = llama_config(SHAPES["3b"], 1024)
    config.num_hidden_layers, config.vocab_size = options.layers, 32000
    skeleton = build_skeleton(config, "sdpa")
    size = sum(parameter.numel() for parameter in skeleton.parameters())
    tiers = TiersConfig(
        device=options.device,
        state=(home,),
        gpu=6 * GIB,
        ram=14 * size + 2 * GIB if home == "ram" else 4 * size + 2 * GIB,
        nvme=(f"{options.directory}:{12 * size + GIB}",) if home == "nvme" else (),
    )
    model = ModelConfig(config={"model_type": "llama"})
    session = Session(skeleton, model, tiers, TrainConfig(batch=1), NumericsConfig(), 1024)
    session.load(RandomWeights())
    return session


def timed_round(session: Session, folder: Path, home: str, number: int) -> dict[str, float]:
    """Seconds and rates of one checkpoint, beside the drive's own."""
    figures = probe_drive(MountBudget(folder, 2 * GIB), seconds=2)
    began = time.perf_counter()
    path = CheckpointWriter(session, folder / "checkpoints", number, {}).wait()
    saved = time.perf_counter()
    restore(session, path)
    restored = time.perf_counter()
    shutil.rmtree(folder / "checkpoints")
    size = checkpoint_bytes(session.units)
    drive = figures.write.bytes_per_s if home == "ram" else figures.mixed.bytes_per_s
    moved = size if home == "ram" else 2 * size
    return {
        "save_s": saved - began,
        "restore_s": restored - saved,
        "moved_bytes_per_s": moved / (saved - began),
        "drive_bytes_per_s": drive,
        "share": moved / (saved - began) / drive,
        "restore_bytes_per_s": size / (restored - saved),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"prediction": PREDICTION, **facts()}
    for home in ("ram", "nvme"):
        with open_session(options, home) as session:
            rounds = [timed_round(session, options.directory, home, 1 + n) for n in range(options.rounds)]
            results[home] = {"checkpoint_bytes": checkpoint_bytes(session.units), "rounds": rounds} | {
                key: median(each[key] for each in rounds) for key in rounds[0]
            }
        sys.stdout.write(f"{home}: {json.dumps(results[home])}\n")
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
