"""A player in which nothing moves on, and the means to end that."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from megatier.play.gate import Gate
from megatier.schedule.timeline import Access
from megatier.store.queue import Queue
from megatier.tier import Phase


class Never:
    """A move that does not end before it is told."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def wait(self) -> None:
        self.ended.wait()

    def done(self) -> bool:
        return self.ended.is_set()

    def span_ns(self) -> tuple[int, int]:
        return 1, 2


@dataclass
class Scene:
    """A player with two queues, the second of which waits for the first; and the means to end that."""

    player: Any
    move: Never

    @property
    def queues(self) -> tuple[Queue, ...]:
        queues: tuple[Queue, ...] = self.player.queues
        return queues


@contextmanager
def stalled_scene() -> Iterator[Scene]:
    queues, move = (Queue("source"), Queue("target")), Never()
    accesses = [Access(f"unit{number}", Phase.FORWARD, 0) for number in range(3)]
    player = SimpleNamespace(
        queues=queues,
        gate=Gate(),
        busy={"target": "slot"},
        accesses=accesses[:1],
        timeline=SimpleNamespace(accesses=tuple(accesses)),
    )
    try:
        yield Scene(player, move)
    finally:
        move.ended.set()
        for queue in queues:
            queue.close()
