"""Derives the seeds of random numbers: for dropout in a forward, first weights, and the rounding of moments.

A group's seed depends only on the run's seed, the step and the group, and an update's only on the run's seed, the step
and the unit. So they are the same after a resume, whatever was computed before and wherever.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch


def group_seed(seed: int, step: int, group: int) -> int:
    """Return the 63-bit seed of one group's random numbers.

    Args:
        seed: of the run.
        step: 1, 2, ...
        group: 0, 1, ... of the step.
    """
    return _hash(f"{seed}:{step}:{group}") >> 1


def rounding_key(seed: int, step: int, unit: str) -> int:
    """Return the 64-bit key with which a unit's moments are rounded.

    Args:
        seed: of the run.
        step: 1, 2, ...
        unit: its name, or whatever tells apart what is updated in one step.
    """
    return _hash(f"moments:{seed}:{step}:{unit}")


def _hash(text: str) -> int:
    """Return a 64-bit hash of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def seed_generators(number: int, device: torch.device) -> None:
    """Seed the generators that a forward may use: torch's (CPU and current GPU), Python's and numpy's."""
    # Not `torch.manual_seed`, which records the caller's stack in each call while no GPU is in use.
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)

    random.seed(number)

    # numpy takes 32 bits.
    np.random.seed(number % (1 << 32))


@contextlib.contextmanager
def drawing_from(number: int) -> Iterator[None]:
    """Let torch draw on the CPU from a seed inside. The caller's generators do not change."""
    with torch.random.fork_rng(devices=[]):
        # Not `torch.manual_seed`, which also seeds the generators of all GPUs, and nothing here restores those.
        torch.default_generator.manual_seed(number)
        yield


__all__ = ["drawing_from", "group_seed", "rounding_key", "seed_generators"]
