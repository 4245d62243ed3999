"""Measures how long torch's compiler has worked in this process, and who waits for it meanwhile.

The compiler says itself when it begins and ends. That holds for a backward too, which it compiles when autograd first
runs it. Code that it finds stored is loaded in the same way, and counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

Wait = Callable[[], AbstractContextManager[object]]
"""Gives a context in which somebody's compute waits."""


class CompileClock:
    """Counts the seconds in which the compiler works.

    Threads: the one that computes compiles, and with CUDA autograd's, in its place.
    """

    def __init__(self) -> None:
        """Begin before anything was compiled."""
        self.seconds = 0.0
        """Seconds so far."""
        self._waits: list[Wait] = []
        self._open = ExitStack()

    def watch(self) -> None:
        """Hear of the compiler from now on, until it is reset, which drops all listeners. Call it before each use."""
        # Imported here, since it takes seconds, and only what compiles has done so.
        from torch._dynamo.callback import callback_handler

        # Heard of twice, the same seconds would count twice.
        if self._begin not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._begin)
            callback_handler.register_end_callback(self._end)

    @contextmanager
    def pausing(self, wait: Wait) -> Iterator[None]:
        """Tell whatever waits of the compiler's work, for a while."""
        self._waits.append(wait)
        try:
            yield
        finally:
            self._waits.remove(wait)

    def _begin(self, _: object) -> None:
        """Note that the compiler begins. What it compiles meanwhile for that is a part of it, and not told."""
        began = time.perf_counter()

        def count() -> None:
            self.seconds += time.perf_counter() - began

        self._open.callback(count)
        for wait in self._waits:
            self._open.enter_context(wait())

    def _end(self, _: object) -> None:
        """Note that the compiler has ended."""
        self._open.close()


CLOCK = CompileClock()
"""The clock of this process, which has one compiler."""
