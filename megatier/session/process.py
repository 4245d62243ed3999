"""A run's process: its random numbers, repeatable operations, how threads share the interpreter, and its memory."""

from __future__ import annotations

import os
import random
import sys

import numpy as np
import psutil
import torch

from megatier.config.schema import RunConfig
from megatier.numerics.vector_math import warm

SWITCH_SECONDS = 0.0005
"""Of the interpreter; Python's own 5 ms are longer than a piece of state takes to copy."""


def seed(number: int) -> None:
    """Start every source of random numbers."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % (1 << 32))


def share_interpreter() -> None:
    """Let threads that wait for the interpreter have it soon: lanes and compute hand over thousands of times a step."""
    sys.setswitchinterval(SWITCH_SECONDS)


def make_repeatable(config: RunConfig) -> None:
    """Choose only operations whose result repeats bit by bit in a fresh process, where the config asks for it."""
    warm()
    if not config.numerics.deterministic:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it starts
    torch.use_deterministic_algorithms(True)
    # A debugging aid that costs a pass over memory; torch sets it through a module's class, which mypy cannot see.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def memory_bytes(device: torch.device) -> dict[str, int]:
    """What the process holds now: resident in RAM, and of the GPU what torch has reserved (libraries' own aside)."""
    gpu_bytes = {"gpu_bytes": torch.cuda.memory_reserved(device)} if device.type == "cuda" else {}
    return {"resident_bytes": psutil.Process().memory_info().rss, **gpu_bytes}
