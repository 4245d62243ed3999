"""The probe of pinned RAM: it tries how much the CUDA driver pins, because no figure of the system says so."""

from __future__ import annotations

import torch

from megatier.hardware import ram_available_bytes
from megatier.store.arena import Arena

LOCK_TRIAL_BYTES = 16 << 30
"""The most RAM that is tried."""
TRIAL_PARTS = 4
"""A trial takes at most this fraction of the available RAM: one part in so many."""


def locked_limit() -> int | None:
    """Return the bytes of RAM that can be pinned, without a few that torch needs; None: no limit was met.

    Raises:
        CapacityError: the system refused the memory for the trial.
    """
    arena = Arena(min(LOCK_TRIAL_BYTES, ram_available_bytes() // TRIAL_PARTS), torch.device("cpu"))
    try:
        first = arena.lock_end(0)
        return arena.num_bytes - first if first else None
    finally:
        arena.close()
