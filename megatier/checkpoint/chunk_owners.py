"""Tells which rank writes each array chunk of a checkpoint. Pure arithmetic.

Where several ranks share the state, a shard begins and ends anywhere in an array, so a chunk may have elements of
several ranks. The rank that has the first of them owns the chunk, and the others send it theirs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from megatier.checkpoint.checkpoint import list_tensors
from megatier.checkpoint.grid import Grid
from megatier.models.decoder import Unit


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of a parameter that one rank has, in a chunk that another rank writes."""

    name: str
    """The parameter."""
    start: int
    """First element in the parameter."""
    stop: int
    """One past the last element."""
    owner: int
    """The rank that writes them."""

    @property
    def num_elements(self) -> int:
        """The number of its elements."""
        return self.stop - self.start


class ChunkOwners:
    """The ranks that write the chunks of every array, as one of the ranks sees them."""

    def __init__(self, whole_units: Sequence[Unit], rank: int, size: int) -> None:
        """Look at what every rank has of every parameter.

        Args:
            whole_units: the whole units.
            rank: this rank.
            size: the number of ranks.
        """
        self._layouts = {unit.name: unit.layout for unit in whole_units}
        self._rank = rank
        self._size = size
        self._runs: dict[str, list[tuple[int, int]]] = {}
        """The runs of each parameter that one rank has, in order: the first element of the run, and the rank."""

        # Shards are cut by whole units, so a parameter whose units are several, or whose unit is cut, has several runs.
        for unit in whole_units:
            for other in range(size):
                for tensor in unit.layout.shard(other, size).tensors:
                    self._runs.setdefault(tensor.name, []).append((tensor.offset, other))
        for runs in self._runs.values():
            # For the bisection in `_rank_of`.
            runs.sort()

    def sent(self, unit: str, array: str) -> list[list[Piece]]:
        """Return the pieces of its shard of a unit that this rank sends to each rank.

        Args:
            unit: name of the unit.
            array: the group of arrays, such as `params`.
        """
        # A list for each rank, and most are empty: that is how a collective takes them.
        pieces = self._pieces(unit, array, self._rank)
        return [[piece for piece in pieces if piece.owner == rank] for rank in range(self._size)]

    def received(self, unit: str, array: str) -> list[list[Piece]]:
        """Return the pieces that come from each rank, of its shard of a unit; see `sent`."""
        received = []
        for rank in range(self._size):
            pieces = self._pieces(unit, array, rank)
            received.append([piece for piece in pieces if piece.owner == self._rank])
        return received

    def _pieces(self, unit: str, array: str, rank: int) -> list[Piece]:
        """Return all that a rank sends of its shard of a unit.

        Of each parameter these are its first elements, if they lie in a chunk that begins before them, on another rank.
        """
        pieces = []
        for tensor in list_tensors(self._layouts[unit].shard(rank, self._size), array):
            # Only the first chunk of a run can begin on another rank: every later one begins inside of the run. So a
            # rank sends at most one piece of each parameter.
            start, stop = tensor.elements
            first, last = Grid.of(tensor.parameter_shape).bounds(start)
            owner = self._rank_of(tensor.name, first)
            if owner != rank:
                pieces.append(Piece(tensor.name, start, min(stop, last), owner))
        return pieces

    def _rank_of(self, name: str, element: int) -> int:
        """Return the rank that has an element of a parameter."""
        runs = self._runs[name]
        later = bisect_right(runs, element, key=lambda run: run[0])
        _, rank = runs[later - 1]
        return rank


def sizes_of(pieces: Sequence[Sequence[Piece]]) -> list[int]:
    """Return the number of elements that go to, or come from, each rank."""
    return [sum(piece.num_elements for piece in of_rank) for of_rank in pieces]
