"""How far moves have come: the reports of a started move and of a queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from megatier.store.transfer import Transfer


class Completion(Protocol):
    """The end of a started move, as the one who moves reports it."""

    def wait(self) -> None:
        """Block until the bytes are there; raise the typed error when they are not, every time."""

    def done(self) -> bool:
        """True if wait() would not block."""

    def span_ns(self) -> tuple[int, int]:
        """Start and end, in time.perf_counter_ns."""


@dataclass(frozen=True, slots=True)
class QueueState:
    """The work that a queue is at, seen from another thread.

    Attributes:
        name: name of the queue.
        num_begun: how many items the worker has begun so far.
        current: the item that the worker is at, and since when, in time.perf_counter_ns.
        in_flight: moves that were started and have not ended, oldest first; on a stream, as far as the worker has
            looked.
        num_waiting: how many items wait for the worker.
    """

    name: str
    num_begun: int
    current: tuple[Transfer, int] | None
    in_flight: tuple[Transfer, ...]
    num_waiting: int
