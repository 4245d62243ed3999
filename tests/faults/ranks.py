"""One rank of a run in which rank 1 fails.

Usage: ranks.py FOLDER KIND PLACE [WAY], with the environment that torchrun gives. WAY is that of bytes between GPUs.
FOLDER/fault is made when it fails. Writes JSON: the error with which this rank ends, how long it took from there, and
what is left on its drive.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.extend(str(room) for room in Path(__file__).parents[1].iterdir() if room.is_dir())
from rank_runs import RankRun, train_on_ranks
from test_ranks_checkpoints import train_beside
from tiny_runs import Place

from megatier.checkpoint.plane_writer import PlaneWriter
from megatier.play.unit_weights import UnitWeights
from megatier.ranks import peer_monitor
from megatier.ranks.ranks import Ranks
from megatier.tier import Phase, Transport

PLACES: dict[str, tuple[Any, str, Phase | None]] = {
    "forward": (UnitWeights, "enter", Phase.FORWARD),
    "backward": (UnitWeights, "enter", Phase.BACKWARD),
    "gather": (Ranks, "all_gather", None),
    "scatter": (Ranks, "all_to_all", None),
    "checkpoint": (PlaneWriter, "write", None),
    "exchange": (PlaneWriter, "exchange", None),
}
"""What a rank calls there, and with which phase if it matters."""
CODES = {"EIO": errno.EIO, "full": errno.ENOSPC}


def fail(folder: Path, kind: str, place: str) -> None:
    """Fail, as the kind says."""
    (folder / "fault").touch()
    if kind in CODES:
        op = "read" if kind == "EIO" else "write"
        os.environ.update(FAULT_PATH="/blocks", FAULT_OP=op, FAULT_KIND=str(CODES[kind]))
    elif kind == "error":
        raise ValueError(f"odd in {place}")
    elif kind == "exit":
        os._exit(0)
    else:
        os.kill(os.getpid(), signal.Signals[kind])


def inject(folder: Path, kind: str, place: str) -> None:
    """Have this rank fail when it comes to a place for the twelfth time."""
    owner, name, phase = PLACES[place]
    real: Callable[..., Any] = getattr(owner, name)
    left = 12

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= phase is None or phase in arguments
        if left == 0:
            fail(folder, kind, place)
        return real(*arguments, **options)

    setattr(owner, name, call)


def main(folder: Path, kind: str, place: str, way: str = "") -> None:
    rank = int(os.environ["RANK"])
    peer_monitor.SILENT_LOOKS = 4
    if rank == 1:
        inject(folder, kind, place)

    mount = folder / f"drive{rank}"
    mount.mkdir()
    error: BaseException | None = None
    try:
        if place in ("checkpoint", "exchange"):
            train_beside(RankRun(model="plain", steps=4), Place(tiers=("nvme",)), mount, folder / "checkpoints")
        else:
            run = RankRun(model="plain", steps=6)
            if way:
                run = replace(run, model="flash", device="cuda", way=Transport(way))
            train_on_ranks(run, Place(tiers=("nvme",)), mount)
    except Exception as found:
        error = found
    if error is not None and not (folder / "fault").exists():
        raise error

    # The first rank removes what was written of a checkpoint.
    written = [mount, folder / "checkpoints"] if rank == 0 else [mount]
    ended = {
        "error": type(error).__name__,
        "text": str(error),
        "rank": getattr(error, "rank", None),
        "left": sorted(path.name for where in written for path in where.rglob("*")),
    }
    sys.stdout.write(json.dumps(ended))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
