"""A run told to stop: SIGINT, SIGTERM and SIGHUP let the step end; a second one ends the process at once.

`timeout` and some schedulers send a signal to a process and then to its group: what comes so soon is the same one.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPEAT_S = 0.2
"""The same signal is no second one if it follows sooner."""


class StopRequest:
    """Catches signals for as long as it is entered, in the main thread; elsewhere it catches nothing.

    Attributes:
        is_asked: a signal came.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """`say` tells the user what happens now."""
        self._say = say
        self.is_asked = False
        self._first = 0, 0.0
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # whoever says so wants the run to go on
            caught = [number for number in SIGNALS if not (is_nohup and number is signal.SIGHUP)]
            self._before = {number: signal.signal(number, self._ask) for number in caught}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._ask:  # else the process ends, and what comes now is dropped
                signal.signal(number, handler)  # type: ignore[arg-type]

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.is_asked:
            self.is_asked = True
            self._first = (number, now)
            self._say("stopping after this step, with a checkpoint; once more to stop at once")
        elif number != self._first[0] or now - self._first[1] >= REPEAT_S:
            before = self._before.get(signal.Signals(number))
            (before if callable(before) else signal.default_int_handler)(number, frame)
