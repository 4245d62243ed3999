"""Measures how long torch's compiler has worked in this process, and lets players count the wait.

The compiler's own callbacks tell when it begins and ends. They also cover a backward, which is compiled when autograd
first runs it, and code that is loaded from the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

Wait = Callable[[], AbstractContextManager[object]]
"""Returns a context in which compute counts as waiting."""


class CompileClock:
    """Counts the seconds in which the compiler works.

    Threads: the computing thread compiles, or autograd's thread with CUDA.
    """

    def __init__(self) -> None:
        """Begin at zero."""
        self.seconds = 0.0
        """Seconds so far."""
        self._waits: list[Wait] = []
        self._open = ExitStack()

    def watch(self) -> None:
        """Register with the compiler. A reset of the compiler drops all callbacks, so call this before each use."""
        # Imported here, since it takes seconds, and only code that compiles needs it.
        from torch._dynamo.callback import callback_handler

        # Registered once, or seconds would count twice.
        if self._begin not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._begin)
            callback_handler.register_end_callback(self._end)

    @contextmanager
    def pausing(self, wait: Wait) -> Iterator[None]:
        """Enter a wait's context whenever the compiler works inside."""
        self._waits.append(wait)
        try:
            yield
        finally:
            self._waits.remove(wait)

    def _begin(self, _: object) -> None:
        """Note that the compiler begins. Nested compilations are a part of it and are not reported."""
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
