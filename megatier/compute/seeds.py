"""Derives seeds of random numbers: of dropout in a forward, of first values, and of rounded moments.

The seeds of a group depend on the run's seed, the step and the group alone, those of an update on the run's seed, the
step and the unit. So they are the same after a stop and a resume, and no matter what was computed before, and where.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch


def group_seed(seed: int, step: int, group: int) -> int:
    """Return the seed of one group's random numbers, 63 bits.

    Args:
        seed: of the run.
        step: 1, 2, ...
        group: 0, 1, ... of the step.
    """
    return _hash(f"{seed}:{step}:{group}") >> 1


def rounding_key(seed: int, step: int, unit: str) -> int:
    """Return the key with which the moments of a unit are rounded, 64 bits.

    Args:
        seed: of the run.
        step: 1, 2, ...
        unit: its name, or whatever tells apart what is updated in one step.
    """
    return _hash(f"moments:{seed}:{step}:{unit}")


def _hash(text: str) -> int:
    """Return 64 bits that depend on every letter of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def seed_generators(number: int, device: torch.device) -> None:
    """Seed what a forward may draw from: the generators of torch (CPU and current GPU), Python and numpy."""
    # Not `torch.manual_seed`: it notes the caller's stack at each call as long as no GPU is in use.
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)

    random.seed(number)

    # numpy takes 32 bits.
    np.random.seed(number % (1 << 32))


@contextlib.contextmanager
def drawing_from(number: int) -> Iterator[None]:
    """Let torch draw on the CPU from a seed for a while. No generator of the caller's is another afterwards."""
    with torch.random.fork_rng(devices=[]):
        # Not `torch.manual_seed`: it also seeds the generators of all GPUs, which nothing gives back here.
        torch.default_generator.manual_seed(number)
        yield


__all__ = ["drawing_from", "group_seed", "rounding_key", "seed_generators"]
