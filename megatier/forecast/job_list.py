"""Job list: jobs in the order of their lanes, as they are added one by one or as chains of moves. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatier.forecast.simulate import Job
from megatier.schedule.moves import Move

PIECES_MAX = 4
"""Pieces in which a spilled unit's state is simulated: reads, AdamW and writes of a unit overlap."""


class JobList:
    """Jobs that were added so far. All references to jobs are their indices in `jobs`."""

    def __init__(self, chunk_elements: int) -> None:
        """Take the elements of an update chunk. No job was added yet."""
        self.jobs: list[Job] = []
        """All jobs so far."""
        self._chunk_elements = chunk_elements

    def _chain(self, moves: Sequence[Move], name: str, *after: int | None, pieces: int = 1) -> int:
        """Add moves of which each begins when the one before is over, piece by piece; returns the last job."""
        last = -1
        for _ in range(pieces):
            last = self._add_piece(moves, name, pieces, *after)
        return last

    def _add_piece(self, moves: Sequence[Move], name: str, pieces: int, *after: int | None) -> int:
        """Add one of so many pieces of each move, one after the other; returns the last job."""
        last = -1
        for move in moves:
            amount = move.num_bytes / pieces
            last = self._add(move.queue, name, amount, *after)
            after = (last,)
        return last

    def _add(self, lane: str, name: str, amount: float, *after: int | None) -> int:
        """Add one job, behind all others of its lane; returns its index."""
        # Each once, since several slots may have been emptied by one job.
        waited = {index for index in after if index is not None}
        index = len(self.jobs)
        job = Job(lane=lane, name=name, amount=amount, after=tuple(waited))
        self.jobs.append(job)
        return index

    def _num_pieces(self, elements: int) -> int:
        """Return the pieces of a unit's state: its chunks, but no more than are worth simulating."""
        num_chunks = -(-elements // self._chunk_elements)
        return max(1, min(PIECES_MAX, num_chunks))
