"""Seeds of the random numbers that a forward draws, such as those of dropout.

Those of a group depend on the run's seed, the step and the group alone. So they are the same after a stop and a resume,
and no matter which groups were computed before.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def group_seed(seed: int, step: int, group: int) -> int:
    """Return the seed of one group's random numbers, 63 bits.

    Args:
        seed: of the run.
        step: 1, 2, ...
        group: 0, 1, ... of the step.
    """
    digest = hashlib.blake2b(f"{seed}:{step}:{group}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_generators(number: int, device: torch.device) -> None:
    """Seed what a forward may draw from: the generators of torch (CPU and current GPU), Python and numpy."""
    # Not `torch.manual_seed`: it notes the caller's stack at each call as long as no GPU is in use.
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)

    random.seed(number)

    # numpy takes 32 bits.
    np.random.seed(number % (1 << 32))


__all__ = ["group_seed", "seed_generators"]
