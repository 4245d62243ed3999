"""Process: repeatable operations, how threads share the interpreter, and its memory."""

from __future__ import annotations

import os
import sys

import psutil
import torch

from megatier.compute.vector_math import warm_up
from megatier.config.schema import RunConfig
from megatier.ranks.ranks import Ranks

SWITCH_SECONDS = 0.0005
"""Seconds after which the interpreter lets another thread run. Python's own 5 ms are longer than a piece of state takes
to copy."""


def share_interpreter() -> None:
    """Let threads that wait for the interpreter get it soon: queues and compute take turns thousands of times."""
    sys.setswitchinterval(SWITCH_SECONDS)


def make_repeatable(config: RunConfig) -> None:
    """Choose only operations whose result repeats bit by bit in a fresh process, if the config asks for it."""
    warm_up()
    if not config.numerics.deterministic:
        return

    # cuBLAS reads this when it starts, so nothing may have multiplied on the GPU before.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling memory is a debugging aid that costs a pass over it. torch sets this through a module's class, which mypy
    # cannot see.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def memory_bytes(device: torch.device, ranks: Ranks | None) -> dict[str, int]:
    """Return the bytes that the process holds now in RAM, and those that torch has taken on the GPU.

    The GPU memory that libraries take themselves is not among them.
    """
    resident_bytes = psutil.Process().memory_info().rss
    if device.type != "cuda":
        return {"resident_bytes": resident_bytes}

    # A gpu tier that other ranks read does not come from torch's allocator (`Ranks.allocate_gpu_tier`), which does not
    # count it then.
    shared_bytes = 0 if ranks is None else ranks.shared_bytes
    return {"resident_bytes": resident_bytes, "gpu_bytes": torch.cuda.memory_reserved(device) + shared_bytes}
