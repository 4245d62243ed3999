"""Cuts each unit into the ranks' shards, and puts whole masters together from the shards of all ranks."""

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
    """Whole masters, which the first rank reads from all ranks while the others serve it.

    Every rank makes one. The first rank calls `read` as often as it likes, and `end`; the others call `serve`, which
    returns after that.
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
        """Return elements [start, stop) of a whole unit's masters, flat, on the CPU. The first rank calls it."""
        # The question goes to all ranks, which answer it in `serve`. So all of them are in the same collective.
        return self.share(*self._ranks.broadcast(lambda: (unit.name, start, stop)))

    def share(self, unit: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a unit's masters to every rank. All of them call it alike."""
        whole = torch.empty(stop - start, dtype=torch.float32, device="cpu")
        for first, values in self._pieces(unit, start, stop):
            offset = first - start
            whole[offset : offset + values.numel()] = values
        return whole

    def end(self) -> None:
        """Let the other ranks go on."""
        self._ranks.broadcast(lambda: None)

    def serve(self) -> None:
        """Answer the first rank until it has all that it wants."""
        # Only the first rank makes the question. The function is not called here, and says the type alone.
        while (asked := self._ranks.broadcast(lambda: ("", 0, 0))) is not None:
            # For this rank's part in the collective alone: the first rank puts the pieces together.
            self._pieces(*asked)

    def _pieces(self, unit: str, start: int, stop: int) -> list[Piece]:
        """Return all ranks' runs of the elements asked for, each with its first element in the whole unit."""
        with self._ranks.ending_run_on_error():
            of_ranks = self._ranks.all_gather_object(self._own_pieces(unit, start, stop))
            return list(chain.from_iterable(of_ranks))

    def _own_pieces(self, unit: str, start: int, stop: int) -> list[Piece]:
        """Return this rank's runs of the elements asked for, each with its first element in the whole unit."""
        pieces = []
        layout = self._whole_units[unit].layout
        for first, last, own in layout.shard_runs(self._ranks.rank, self._ranks.size):
            lower = max(first, start)
            upper = min(last, stop)
            if lower < upper:
                # A shard numbers its elements from its own start.
                shift = own - first
                values = self._read(self._shards[unit], lower + shift, upper + shift)
                pieces.append((lower, values))
        return pieces


@contextmanager
def reading_masters(
    ranks: Ranks | None, whole_units: Sequence[Unit], shards: Sequence[Unit], read: Read
) -> Iterator[Read | None]:
    """Give the first rank a function that reads whole masters. Every rank enters it.

    The first rank reads inside. All others are given None, and have served it before they come inside.

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
        # Also if reading has failed: the other ranks serve until they are told.
        masters.end()
