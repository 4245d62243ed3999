"""Gives whole rounds to ranks, and whole steps to a streamed model, as samplers of a Trainer's loader."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import cycle, islice
from typing import Any


class WholeRounds:
    """The batches of a sampler, and then some of them again, so that each rank has as many as any other.

    All ranks evaluate in rounds of a batch each. The results of the batches that come again follow those of the last
    row, where the Trainer cuts them off.
    """

    def __init__(self, sampler: Collection[list[int]], num_ranks: int) -> None:
        """Take a sampler of batches, and the number of ranks."""
        self._sampler = sampler
        self._ranks = num_ranks

    def __len__(self) -> int:
        # Rounded up: a last round that is not whole takes its missing batches from the beginning.
        return -(-len(self._sampler) // self._ranks) * self._ranks

    def __iter__(self) -> Iterator[list[int]]:
        return islice(cycle(self._sampler), len(self))


class WholeSteps:
    """The first rows of each epoch of a sampler, as many as whole steps take."""

    def __init__(self, sampler: Any, rows: int) -> None:  # noqa: ANN401 - torch's, or accelerate's
        """Take a sampler, and the number of rows."""
        self._sampler = sampler
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> Iterator[int]:
        return islice(self._sampler, self._rows)

    def set_epoch(self, epoch: int) -> None:
        """Let the sampler choose another order, as accelerate asks for."""
        # torch's own samplers draw another order in each epoch by themselves.
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
