"""One rank of `megatier`, of which one kills itself while it saves for the second time, unless it was started again.

Usage: killed_rank.py RANK PLACE WORDS, with the environment that torchrun gives. PLACE is, in a savepoint, before its
part is written, before its block files are marked as kept, or when the folder has its name; or in a checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch

from megatier import durable
from megatier.checkpoint import savepoint
from megatier.checkpoint.checkpoint_writer import CheckpointWriter
from megatier.cli import main

PLACES: dict[str, tuple[Any, str]] = {
    "write": (savepoint, "write_blocks"),
    "mark": (savepoint, "_keep_files"),
    "name": (durable, "_take_name"),
    "checkpoint": (CheckpointWriter, "wait"),
}


def inject(place: str) -> None:
    """Have this process die at its second call there."""
    owner, name = PLACES[place]
    real = getattr(owner, name)
    left = 2

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        found = real(*arguments, **options) if place == "name" or left else None
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, name, call)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if os.environ["RANK"] == sys.argv[1] and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        inject(sys.argv[2])
    sys.exit(main(sys.argv[3:]))
