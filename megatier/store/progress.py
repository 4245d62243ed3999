"""How far moves have come: what a started one reports, and what a queue is at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from megatier.store.transfer import Transfer


class Completion(Protocol):
    """What a started move reports on."""

    def wait(self) -> None:
        """Block until the bytes are there; raise the typed error when they are not, every time."""

    def done(self) -> bool:
        """True when wait() would not block."""

    def span_ns(self) -> tuple[int, int]:
        """Start and end, in time.perf_counter_ns."""


@dataclass(frozen=True, slots=True)
class QueueState:
    """What a queue is at, seen from another thread, after `num_begun` items."""

    name: str
    num_begun: int
    current: tuple[Transfer, int] | None
    """The item that the worker is at, and since when, in time.perf_counter_ns."""
    in_flight: tuple[Transfer, ...]
    """Moves that were started and have not ended, oldest first; on a stream, as far as the worker has looked."""
    num_waiting: int
    """Items that wait for the worker."""
