"""A run told to stop: SIGINT and SIGTERM let the step end; a second one ends the process at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Catches the first signal for as long as it is entered, in the main thread; elsewhere it catches nothing.

    Attributes:
        is_asked: a signal came.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """`say` tells the user what happens now."""
        self._say, self.is_asked = say, False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:  # came while the first was being handled
            signal.default_int_handler(number, frame)
        self.is_asked = True
        self._restore()
        self._say("stopping after this step, with a checkpoint; once more to stop at once")

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}
