"""One run of `megatier train` in which something hangs after the second step, or before or after all of them.

Usage: stall.py SCENARIO DIRECTORY STALL_TIMEOUT. A drive hangs by the shim, which has to be preloaded.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import pytest
from late_reads import slow_reads
from small_commands import command
from torch import Tensor

from megatier.checkpoint.chunkfile import ChunkFiles
from megatier.cli import main
from megatier.layout import Layout
from megatier.models.decoder import Unit
from megatier.models.initialiser import Initialiser
from megatier.models.weights import ReadPart
from megatier.optim.gradient_sums import GradientSums
from megatier.play.player import Player
from megatier.report.metrics import MetricsLog
from megatier.session.filling import Filling
from megatier.session.pieces import Piece
from megatier.store.arena import SlotPool
from megatier.store.tier_queues import TierQueues
from megatier.store.transfer import Completion, Transfer
from megatier.watch import watchdog

never = threading.Event()
STEPS = 6


def drive(player: Player) -> None:
    """Reads of block files do not end."""
    os.environ.update(FAULT_OP="read", FAULT_KIND="hang", FAULT_PATH="/blocks")


def queue(player: Player) -> None:
    """Copies of weights to the GPU do not end."""
    real = TierQueues.copy

    def copy(
        self: TierQueues, queue: str, target: Tensor, source: Tensor, users: Sequence[Transfer] = ()
    ) -> Completion | None:
        if queue == "ram_to_gpu":
            never.wait()
        return real(self, queue, target, source, users)

    TierQueues.copy = copy  # type: ignore[method-assign]


def slot(player: Player) -> None:
    """Whoever has a slot keeps it."""
    SlotPool.give = lambda *words: None  # type: ignore[method-assign]


def compute(player: Player) -> None:
    """The training thread waits for what does not come, and no queue does."""
    GradientSums.norm = lambda sums: never.wait()  # type: ignore[assignment, method-assign]


def checkpoint(player: Player) -> None:
    """No chunk of a checkpoint is written."""
    ChunkFiles.stage = lambda files: never.wait()  # type: ignore[assignment, method-assign, return-value]


def slow(player: Player) -> None:
    """Nothing hangs; for four steps, longer than the timeout, every read takes a second."""
    patch = pytest.MonkeyPatch()
    slow_reads(patch, 1.0)
    threading.Timer(14.0, patch.undo).start()  # what comes after the steps would read for a minute


def written(player: Player) -> None:
    """Writes of block files do not end."""
    os.environ.update(FAULT_OP="write", FAULT_KIND="hang", FAULT_PATH="/blocks")


def weights(player: Player) -> None:
    """First weights are not read to their end."""
    real = Initialiser.part_reader

    def part_reader(self: Initialiser, unit: Unit) -> ReadPart:
        read = real(self, unit)

        def hang(run: Layout) -> Iterator[Piece]:
            if unit.name == "lm_head":
                never.wait()
            return read(run)

        return hang

    Initialiser.part_reader = part_reader  # type: ignore[method-assign]


def slow_weights(player: Player) -> None:
    """Nothing hangs; first weights take longer than the timeout, each run of them a second and more."""
    real, one = Filling._write, threading.Lock()

    def write(self: Filling, *words: Any) -> None:
        with one:
            never.wait(2.0)
        real(self, *words)

    Filling._write = write  # type: ignore[assignment, method-assign]


SCENARIOS: dict[str, Callable[[Player], None]] = {
    fault.__name__: fault for fault in (drive, queue, slot, compute, checkpoint, slow)
}
BEFORE: dict[str, Callable[[Player], None]] = {"fill": written, "load": weights, "slow_load": slow_weights}
"""Scenarios that begin when the player is there, before its files are filled."""
AFTER = {"export": drive}
"""Scenarios that begin after the last step."""


def run(name: str, folder: Path, timeout: str) -> int:
    players: list[Player] = []
    opened, written = Player.__init__, MetricsLog.write

    def init(self: Player, *words: object) -> None:
        opened(self, *words)  # type: ignore[arg-type]
        players.append(self)
        if name in BEFORE:
            BEFORE[name](self)

    def write(self: MetricsLog, record: Mapping[str, object]) -> None:
        written(self, record)
        if record["step"] == 2 and name in SCENARIOS:
            SCENARIOS[name](players[0])
        if record["step"] == STEPS and name in AFTER:
            AFTER[name](players[0])

    Player.__init__, MetricsLog.write = init, write  # type: ignore[assignment, method-assign]
    watchdog.GRACE_S = 10.0
    # In RAM no queue moves while weights come: their own count has to say that they do.
    settings = {
        "tiers.state": "ram" if name == "slow_load" else "nvme",
        "tiers.nvme": f"{folder}:32MiB",
        "tiers.gpu": "512KiB",
        "train.steps": STEPS,
    }
    every = 2 if name == "checkpoint" else 0
    return main(command(folder, {**settings, "train.stall_timeout": timeout, "output.checkpoint_every": every}))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
