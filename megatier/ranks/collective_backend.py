"""The protocol of our own collectives between the ranks of a host, and a trial of a backend.

`peer_copies` and `shared_ram` implement it. `Ranks` tries them when it opens, and falls back to torch's collectives.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch

TRIAL_BYTES = 4096
TRIAL_S = 10.0
"""The limit of a trial, which usually takes less than a millisecond."""


class CollectiveBackend(Protocol):
    """An all-gather and an all-to-all of bytes, in place of those of `torch.distributed`."""

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """Gather the shards of all ranks, in the order of the ranks.

        Args:
            whole: uint8 [size * n], overwritten.
            shard: uint8 [n], this rank's shard.
        """

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Send piece r to rank r, and receive a piece from every rank.

        Args:
            received: uint8 [size * n], overwritten: piece r comes from rank r.
            sent: uint8 [size * n]: piece r goes to rank r.
        """

    def abort(self) -> None:
        """End every wait of this rank for another one; see `Signals`. The bytes of such a collective are invalid."""

    def close(self) -> None:
        """Free memory and locks. No collective may be under way."""


def brings_right_bytes(backend: CollectiveBackend, own_shard: torch.Tensor, rank: int, size: int) -> bool:
    """All-gather a few bytes on GPUs, and return whether the right ones arrive in time.

    On some hosts a GPU can read the memory of another one, but gets wrong bytes.

    Args:
        backend: the backend to try.
        own_shard: uint8 [TRIAL_BYTES] that other ranks can read, overwritten.
        rank: this rank.
        size: the number of ranks.
    """
    # Not zeros, with which the result is filled.
    own_shard.fill_(rank + 1)
    whole = torch.zeros(size * TRIAL_BYTES, dtype=torch.uint8, device=own_shard.device)
    torch.cuda.synchronize()

    backend.all_gather(whole, own_shard)

    # `synchronize` would never return if a stream waits for a signal that never comes.
    deadline = time.monotonic() + TRIAL_S
    stream = torch.cuda.current_stream()
    while not stream.query():
        if time.monotonic() > deadline:
            return False

    shards = whole.view(size, -1).tolist()
    return all(set(shard) == {number + 1} for number, shard in enumerate(shards))
