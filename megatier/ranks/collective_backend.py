"""What moves bytes between ranks in place of torch's collectives, and a trial of it."""

from __future__ import annotations

import time
from typing import Protocol

import torch

TRIAL_BYTES = 4096
TRIAL_S = 10.0
"""How long a trial may take. It takes less than a millisecond."""


class CollectiveBackend(Protocol):
    """The protocol of whatever moves weights and gradients between ranks in place of torch's collectives."""

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """Bring the shards of all ranks together, in the order of the ranks.

        Args:
            whole: uint8 [size * n], overwritten.
            own: uint8 [n], this rank's shard.
        """

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Give every rank its shard of this rank's bytes, and take this rank's shard of the bytes of all.

        Args:
            received: uint8 [size * n], overwritten: piece r is what rank r sent.
            sent: uint8 [size * n]: piece r goes to rank r.
        """

    def release(self) -> None:
        """Let everybody go on who waits for another rank; see `Signals`. What they read is worth nothing then."""

    def close(self) -> None:
        """Give back what it holds. Nothing moves any more."""


def brings_right_bytes(backend: CollectiveBackend, own: torch.Tensor, rank: int, size: int) -> bool:
    """Gather a few bytes on GPUs, and return whether they are right, and come in time.

    Some hosts let a GPU read another one's memory, and give it other bytes.

    Args:
        backend: what gathers.
        own: uint8 [TRIAL_BYTES] that others can read, overwritten.
        rank: this rank.
        size: the number of ranks.
    """
    # Of zeros nobody could tell whether they came.
    own.fill_(rank + 1)
    whole = torch.zeros(size * TRIAL_BYTES, dtype=torch.uint8, device=own.device)
    torch.cuda.synchronize()

    backend.all_gather(whole, own)

    # A stream that waits for a number which never comes would hold up `synchronize` for ever.
    deadline = time.monotonic() + TRIAL_S
    stream = torch.cuda.current_stream()
    while not stream.query():
        if time.monotonic() > deadline:
            return False

    shards = whole.view(size, -1).tolist()
    return all(set(shard) == {number + 1} for number, shard in enumerate(shards))
