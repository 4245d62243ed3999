"""Cuts units into the shards of ranks, and reads whole masters from the shards of all ranks.

Exports and checkpoints use it, on the training thread of every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from megatier.models.decoder import Unit
from megatier.ranks.ranks import Ranks
from megatier.session.pieces import Piece

Read = Callable[[Unit, int, int], Tensor]
"""Reads elements [start, stop) of a unit's masters, as flat fp32 on the CPU."""


def cut_shards(units: Sequence[Unit], ranks: Ranks) -> tuple[Unit, ...]:
    """Return the units with the layout of this rank's shards."""
    return tuple(replace(unit, layout=unit.layout.shard(ranks.rank, ranks.size)) for unit in units)


class WholeMasters:
    """The whole masters of all ranks. The first rank reads them while the others serve it.

    Every rank makes one. The first rank calls `read` any number of times, and then `end`. The others call `serve`,
    which returns after that.
    """

    def __init__(self, ranks: Ranks, whole_units: Sequence[Unit], shards: Sequence[Unit], read: Read) -> None:
        """Take the units.

        Args:
            ranks: the ranks of the run.
            whole_units: the whole units.
            shards: this rank's shards of them, in the same order.
            read: reads elements of a shard.
        """
        self._ranks = ranks
        self._whole_units = {unit.name: unit for unit in whole_units}
        self._shards = {unit.name: unit for unit in shards}
        self._read = read

    def read(self, unit: Unit, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a whole unit's masters, flat, on the CPU. Only the first rank calls it."""
        # The request is broadcast to all ranks, which answer it in `serve`.
        return self.share(*self._ranks.broadcast(lambda: (unit.name, start, stop)))

    def share(self, unit: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a unit's masters on every rank. All ranks make the same call."""
        whole = torch.empty(stop - start, dtype=torch.float32, device="cpu")
        for first, values in self._pieces(unit, start, stop):
            offset = first - start
            whole[offset : offset + values.numel()] = values
        return whole

    def end(self) -> None:
        """Let `serve` return on the other ranks."""
        self._ranks.broadcast(lambda: None)

    def serve(self) -> None:
        """Answer the requests of the first rank until it calls `end`."""
        # The first rank's request arrives here. The function is not called on this rank, and only gives the type.
        while (asked := self._ranks.broadcast(lambda: ("", 0, 0))) is not None:
            # The result is not used, but this rank has to take part in the all-gather.
            self._pieces(*asked)

    def _pieces(self, unit: str, start: int, stop: int) -> list[Piece]:
        """Return the requested elements from all ranks, as pieces with their first elements in the whole unit."""
        with self._ranks.ending_run_on_error():
            of_ranks = self._ranks.all_gather_object(self._own_pieces(unit, start, stop))
            return list(chain.from_iterable(of_ranks))

    def _own_pieces(self, unit: str, start: int, stop: int) -> list[Piece]:
        """Return the requested elements that lie in this rank's shard, as pieces of the whole unit."""
        pieces = []
        layout = self._whole_units[unit].layout
        for first, last, shard_start in layout.shard_runs(self._ranks.rank, self._ranks.size):
            lower = max(first, start)
            upper = min(last, stop)
            if lower < upper:
                # A shard numbers its elements from its own start.
                shift = shard_start - first
                values = self._read(self._shards[unit], lower + shift, upper + shift)
                pieces.append((lower, values))
        return pieces


@contextmanager
def reading_masters(
    ranks: Ranks | None, whole_units: Sequence[Unit], shards: Sequence[Unit], read: Read
) -> Iterator[Read | None]:
    """Yield a function that reads whole masters on the first rank, and None on all others. Every rank enters it.

    The other ranks serve the first one until it has left, and only then enter.

    Args:
        ranks: the ranks of the run; None: this process has all masters itself.
        whole_units: the whole units.
        shards: this rank's shards of them.
        read: reads elements of a shard.
    """
    if ranks is None:
        yield read
        return

    masters = WholeMasters(ranks, whole_units, shards, read)
    if ranks.rank:
        masters.serve()
        yield None
        return

    try:
        yield masters.read
    finally:
        # The other ranks serve until they are told, even if reading has failed.
        masters.end()
