"""A list of jobs for the simulation. `jobs` and `rank_jobs` add to it one by one or as chains of moves. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatier.forecast.simulate import Job
from megatier.schedule.moves import Move

PIECES_MAX = 4
"""The most pieces of one unit in a simulation. Reads, AdamW and writes of different pieces overlap."""


class JobList:
    """The jobs that were added so far. Methods take and return jobs as indices in `jobs`."""

    def __init__(self, chunk_elements: int) -> None:
        """Begin without jobs, for update chunks of so many elements."""
        self.jobs: list[Job] = []
        """All jobs so far."""
        self._chunk_elements = chunk_elements

    def chain(self, moves: Sequence[Move], name: str, *after: int | None, pieces: int = 1) -> int:
        """Add moves, each of which begins after the one before, piece by piece. Return the last job."""
        last = -1
        for _ in range(pieces):
            last = self.add_piece(moves, name, pieces, *after)
        return last

    def add_piece(self, moves: Sequence[Move], name: str, pieces: int, *after: int | None) -> int:
        """Add one of so many pieces of each move, one after the other. Return the last job."""
        last = -1
        for move in moves:
            amount = move.num_bytes / pieces
            last = self.add(move.queue, name, amount, *after)

            # The next move takes the bytes on, so it waits for this one alone.
            after = (last,)
        return last

    def add(self, lane: str, name: str, amount: float, *after: int | None) -> int:
        """Add a job behind all others of its lane. Return its index."""
        # One job may have emptied several slots, so it may come several times.
        waited = {index for index in after if index is not None}
        index = len(self.jobs)
        job = Job(lane=lane, name=name, amount=amount, after=tuple(waited))
        self.jobs.append(job)
        return index

    def num_pieces(self, elements: int) -> int:
        """Return the number of pieces of a unit's state: its chunks, up to PIECES_MAX."""
        num_chunks = -(-elements // self._chunk_elements)
        return max(1, min(PIECES_MAX, num_chunks))


def nth_last(jobs: Sequence[int], number: int) -> int | None:
    """Return the last job but so many, of which the last is 1; None: there were fewer."""
    return jobs[-number] if len(jobs) >= number else None
