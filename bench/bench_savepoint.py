"""Measures how long a savepoint pauses a run, how long a checkpoint is written, and how long resuming from each takes.

For each home of the state, the rounds write a checkpoint and a savepoint in turns, and read both back. A checkpoint
writes 12 bytes a parameter to the drive, and first reads from it the state that spilled. A savepoint writes the state
that does not lie on NVMe, and the checksums of the rest. The time includes removing the one before. A run trains on
while a checkpoint is written; this benchmark waits for it.

python bench/bench_savepoint.py --directory DIR [--layers 1] [--rounds 5] [--output FILE.json]

Under torchrun the ranks share the state, and write and read it together. A time lasts from when all ranks are ready
until all are done; the first rank prints and writes.

torchrun --standalone --nproc-per-node 2 bench/bench_savepoint.py --directory DIR --layers 8 --rounds 3
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from bench_checkpoint import GIB, RandomWeights
from peers.shapes import SHAPES, model_config
from record import facts

from megatier.checkpoint.checkpoint import checkpoint_bytes
from megatier.checkpoint.checkpoint_writer import CheckpointWriter
from megatier.checkpoint.restore import restore
from megatier.checkpoint.run_directory import CHECKPOINT_FOLDER, SAVEPOINT_FOLDER
from megatier.checkpoint.savepoint import Savepoint, drop_savepoint, save_savepoint
from megatier.config.output_section import OutputConfig
from megatier.config.schema import OF_LOOP, ModelConfig, RunConfig, TiersConfig, TrainConfig
from megatier.models.decoder import build_skeleton
from megatier.ranks.channel import SingleRank
from megatier.ranks.ranks import Ranks
from megatier.ranks.rendezvous import joined
from megatier.session.session import Session
from megatier.setup.machine import choose_device
from megatier.setup.setup import Setup
from megatier.tier import Tier

HOMES = ("nvme", "ram,nvme", "ram")
"""The tiers that hold the state, each in turn."""
RUN: dict[str, Any] = {"step": 1, "config": {}, "environment": {}, "random": {}, "text": {}}
PREDICTION = (
    "nvme: milliseconds, for the checksums and a flush of what the drive still holds; ram,nvme: the part in RAM by the "
    "drive's write rate; ram: as a checkpoint, less the time that joins planes. Going on from a savepoint reads 12 "
    "bytes a parameter; from a checkpoint what spills is written as well."
)


def open_session(options: argparse.Namespace, homes: str, ranks: Ranks | None) -> Session:
    """Open a model with a part of the 3B shape's layers. With two homes the weights lie in RAM."""
    config = model_config(SHAPES["3b"], 1024)
    config.num_hidden_layers = options.layers
    config.vocab_size = 32000
    skeleton = build_skeleton(config, "sdpa")
    size = sum(parameter.numel() for parameter in skeleton.parameters())
    num_ranks = 1 if ranks is None else ranks.size

    # For each parameter: state at home in RAM (0, 2 or 12 bytes), and room for gradients and slots. RAM and NVMe are
    # those of all ranks, whose slots come to more than one rank's.
    bytes_in_ram = {"nvme": 4, "ram,nvme": 6, "ram": 14}[homes]
    slack = num_ranks * GIB
    tiers = TiersConfig(
        device=options.device,
        state=tuple(homes.split(",")),
        gpu=6 * GIB,
        ram=bytes_in_ram * size + slack,
        nvme=(f"{options.directory}:{24 * size + slack}",) if "nvme" in homes else (),
        generations=2 if "nvme" in homes else 1,
    )
    model = ModelConfig(config={"model_type": "llama"})
    train = TrainConfig(batch=num_ranks, groups=num_ranks)
    output = OutputConfig(savepoint_every=1)
    run = RunConfig(model=model, data=OF_LOOP, tiers=tiers, train=train, output=output)
    session = Session(Setup.here(run, skeleton, ranks), ranks=ranks)
    session.load(RandomWeights())
    return session


def seconds_of(all_ranks: Ranks | SingleRank, work: Callable[[], object]) -> float:
    """Return the seconds from when all ranks are ready until the work is done on all of them."""
    all_ranks.all_gather_object(None)
    began = time.perf_counter()
    work()
    all_ranks.all_gather_object(None)
    return time.perf_counter() - began


def timed_round(session: Session, run: Path, step: int) -> dict[str, float]:
    """Seconds of saving and restoring in both ways. Which of them comes first changes from round to round."""
    all_ranks = session.ranks or SingleRank()
    found: dict[str, float] = {}

    def checkpoint() -> None:
        folder = run / "a" / CHECKPOINT_FOLDER
        path = folder / f"step-{step:08d}"
        found["checkpoint_s"] = seconds_of(all_ranks, lambda: CheckpointWriter(session, folder, step, RUN, 1).wait())
        found["restore_checkpoint_s"] = seconds_of(all_ranks, lambda: restore(session, path))

    def savepoint() -> None:
        folder = run / "b" / SAVEPOINT_FOLDER
        found["savepoint_s"] = seconds_of(all_ranks, lambda: save_savepoint(session, folder, step, RUN))
        made = Savepoint.last(folder.parent)
        assert made is not None
        found["restore_savepoint_s"] = seconds_of(all_ranks, lambda: made.restore(session))

    for work in (checkpoint, savepoint) if step % 2 else (savepoint, checkpoint):
        work()
    return found


def measure(options: argparse.Namespace, homes: str, ranks: Ranks | None) -> dict[str, Any]:
    """Return what the rounds of one home took, with their medians; all ranks call it."""
    all_ranks = ranks or SingleRank()
    run = options.directory / "run"
    if all_ranks.rank == 0:
        for name in ("a", "b"):  # a run would have the newer one alone
            (run / name).mkdir(parents=True)

    with open_session(options, homes, ranks) as session:
        rounds = [timed_round(session, run, 1 + number) for number in range(options.rounds)]
        own = {str(tier): size for tier, size in session.placement.state_bytes.items() if tier is not Tier.GPU}
        drop_savepoint(session, run / "b" / SAVEPOINT_FOLDER)
        state = all_ranks.all_gather_object(own)
        size = checkpoint_bytes(session.whole_units)

    all_ranks.broadcast(lambda: shutil.rmtree(run))
    medians = {key: median(each[key] for each in rounds) for key in rounds[0]}
    # One process has no ranks to tell apart.
    return {"state_bytes": own if ranks is None else state, "checkpoint_bytes": size, "rounds": rounds, **medians}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    with joined(choose_device(options.device, "--device").type) as ranks:
        leads = ranks is None or ranks.rank == 0
        results: dict[str, Any] = {"prediction": PREDICTION, **facts(), "ranks": 1 if ranks is None else ranks.size}
        results["layers"] = options.layers
        for homes in HOMES:
            results[homes] = measure(options, homes, ranks)
            if leads:
                sys.stdout.write(f"{homes}: {json.dumps(results[homes])}\n")
                sys.stdout.flush()

    if leads and options.output is not None:
        options.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
