"""Measures how fast a checkpoint is written and read back, against what the drive does, and what training loses by it.

Each round of each home of the state has three parts. The first measures the drive's own rates: through the store's
files (written, and mixed with as many bytes read as written), and through new files of a checkpoint's size. The second
writes a checkpoint and restores it. The third writes one while steps are trained, which are compared with as many steps
without one. The target for state in RAM is 0.8 of the rate of new files. For state that spilled it is 0.8 of the mixed
rate, since each byte is read and written.

python bench/bench_checkpoint.py --directory DIR [--layers 4] [--rounds 3] [--tokens 256] [--output FILE.json]
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
from peers.shapes import SHAPES, model_config
from record import facts
from torch import Tensor

from megatier.checkpoint.checkpoint import checkpoint_bytes
from megatier.checkpoint.checkpoint_writer import CheckpointWriter
from megatier.checkpoint.chunkfile import ChunkFiles
from megatier.checkpoint.grid import CHUNK_ELEMENTS
from megatier.checkpoint.restore import restore
from megatier.config.schema import OF_LOOP, ModelConfig, RunConfig, TiersConfig, TrainConfig
from megatier.config.values import MountBudget
from megatier.durable import sync_tree
from megatier.layout import Layout
from megatier.measure.drive_probe import probe_drive
from megatier.models.decoder import Unit, build_skeleton
from megatier.session.session import Session
from megatier.setup.setup import Setup

GIB = 1 << 30
PIECE_ELEMENTS = 4 << 20
"""Elements of the random piece."""
STEPS = 4
"""Steps of a measurement, with a checkpoint under way and without one."""
PREDICTION = (
    "RAM: three threads fill buffers (about 2.7 ns a parameter of one core), so the drive's rate of new files is the "
    "limit: 0.9 of it. NVMe: reads run one ahead of filling: 0.8 of the mixed rate. Beside training: nothing where a "
    "step takes longer than the writing and a core is idle; on two cores the threads' time, a third of the writing."
)


class RandomWeights:
    """A source of weights that repeats one random piece."""

    def __init__(self) -> None:
        """Draw the piece."""
        self._piece = torch.randn(PIECE_ELEMENTS)

    def read(self, unit: Unit, shard: Layout | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield all weights of a unit or of a shard of it, each piece with the element at which it begins."""
        num_elements = (shard or unit.layout).num_elements
        for start in range(0, num_elements, PIECE_ELEMENTS):
            yield start, self._piece[: num_elements - start]


def open_session(options: argparse.Namespace, home: str) -> Session:
    """Open a model with a part of the 3B shape's layers, and with all state in one place."""
    config = model_config(SHAPES["3b"], 1024)
    config.num_hidden_layers = options.layers
    config.vocab_size = 32000
    skeleton = build_skeleton(config, "sdpa")
    size = sum(parameter.numel() for parameter in skeleton.parameters())
    tiers = TiersConfig(
        device=options.device,
        state=(home,),
        gpu=6 * GIB,
        # In RAM each parameter has 12 bytes of state and a gradient in bf16. On NVMe RAM has gradients and slots alone.
        ram=14 * size + 2 * GIB if home == "ram" else 4 * size + 2 * GIB,
        nvme=(f"{options.directory}:{12 * size + GIB}",) if home == "nvme" else (),
    )
    model = ModelConfig(config={"model_type": "llama"})
    run = RunConfig(model=model, data=OF_LOOP, tiers=tiers, train=TrainConfig(batch=1))
    session = Session(Setup.here(run, skeleton))
    session.load(RandomWeights())
    return session


def new_files_rate(folder: Path, num_bytes: int) -> float:
    """Bytes a second at which as many new files as a checkpoint has are written, several at once, and synchronised."""
    folder.mkdir()
    began = time.perf_counter()
    with ChunkFiles(CHUNK_ELEMENTS, 6) as files:
        for number in range(num_bytes // (4 * CHUNK_ELEMENTS)):
            files.write(files.stage(), folder / str(number), CHUNK_ELEMENTS, CHUNK_ELEMENTS)
        files.flush()

    sync_tree(folder)
    seconds = time.perf_counter() - began
    shutil.rmtree(folder)
    return num_bytes // (4 * CHUNK_ELEMENTS) * 4 * CHUNK_ELEMENTS / seconds


def steps_seconds(session: Session, first: int, tokens: int, writer: CheckpointWriter | None = None) -> float:
    """Seconds of STEPS training steps with their updates, and of what is left then of a checkpoint under way."""
    ids = torch.arange(tokens).remainder(32000).unsqueeze(0)
    began = time.perf_counter()
    for number in range(first, first + STEPS):
        session.engine.train_step(number, 1e-4, [{"input_ids": ids, "labels": ids}])
    session.player.drain()
    if writer is not None:
        writer.wait()
    return time.perf_counter() - began


def timed_round(session: Session, folder: Path, home: str, number: int, tokens: int) -> dict[str, float]:
    """Return the seconds and rates of one checkpoint, and the drive's own rates at the same time."""
    checkpoints = folder / "checkpoints"
    size = checkpoint_bytes(session.own_units)
    figures = probe_drive(MountBudget(folder, 2 * GIB), seconds=2)
    new_files = new_files_rate(folder / "files", size)
    began = time.perf_counter()
    path = CheckpointWriter(session, checkpoints, 1, {}).wait()
    saved = time.perf_counter()
    restore(session, path)
    restored = time.perf_counter()
    shutil.rmtree(checkpoints)
    # Steps of all rounds are numbered on. The first ones, before the rounds, recorded the order of units.
    first = 1 + 2 * STEPS * number
    alone = steps_seconds(session, first, tokens)
    beside = steps_seconds(session, first + STEPS, tokens, CheckpointWriter(session, checkpoints, 1, {}))
    shutil.rmtree(checkpoints)
    # From RAM each byte is written once; spilled state is read from the same drive as well.
    drive = new_files if home == "ram" else figures.mixed.bytes_per_s
    moved = size if home == "ram" else 2 * size
    found = {
        "save_s": saved - began,
        "restore_s": restored - saved,
        "moved_bytes_per_s": moved / (saved - began),
        "drive_write_bytes_per_s": figures.write.bytes_per_s,
        "drive_mixed_bytes_per_s": figures.mixed.bytes_per_s,
        "new_files_bytes_per_s": new_files,
        "share": moved / (saved - began) / drive,
        "restore_bytes_per_s": size / (restored - saved),
        "step_s": alone / STEPS,
        "lost_s": beside - alone,
    }
    if figures.first_write_bytes_per_s is not None:
        found["drive_first_write_bytes_per_s"] = figures.first_write_bytes_per_s
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"prediction": PREDICTION, **facts()}

    for home in ("ram", "nvme"):
        with open_session(options, home) as session:
            steps_seconds(session, 1, options.tokens)  # learns the order of units
            rounds = [
                timed_round(session, options.directory, home, 1 + n, options.tokens) for n in range(options.rounds)
            ]
            results[home] = {"checkpoint_bytes": checkpoint_bytes(session.own_units), "rounds": rounds} | {
                key: median(each[key] for each in rounds) for key in rounds[0]
            }

        sys.stdout.write(f"{home}: {json.dumps(results[home])}\n")

    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
