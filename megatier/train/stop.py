"""Stops a run on SIGINT, SIGTERM or SIGHUP. After the first signal the step ends; a second one ends the process.

`timeout` and some schedulers send a signal to a process and once more to its group, so two equal signals within a
moment count as one.
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
"""Equal signals within this time count as one."""


class StopRequest:
    """Catches signals while it is entered in the main thread. In any other thread it catches nothing.

    Attributes:
        is_asked: whether a signal came.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """Prepare. Signals are caught once this is entered.

        Args:
            say: prints a line for a person.
        """
        self._say = say
        self.is_asked = False
        self._first = 0, 0.0
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        # Python lets the main thread alone set handlers.
        if threading.current_thread() is not threading.main_thread():
            return self

        # Under nohup a process ignores SIGHUP, because its user wants it to outlive the terminal.
        is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        for number in SIGNALS:
            if not (is_nohup and number is signal.SIGHUP):
                # Python gives None for a handler that was not set from Python, and does not take None back.
                self._before[number] = signal.signal(number, self._ask) or signal.SIG_DFL
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            # Another handler by now means that the process is ending. That handler stays.
            if signal.getsignal(number) == self._ask:
                signal.signal(number, handler)  # type: ignore[arg-type]

    def _ask(self, number: int, frame: FrameType | None) -> None:
        """Take note of the first signal, and pass a second one on to the handler that was there before."""
        now = time.monotonic()
        if not self.is_asked:
            self.is_asked = True
            self._first = (number, now)

            # A handler may print here although another print is under way, because the console has no buffer.
            self._say("stopping after this step, with a checkpoint; once more to stop at once")
        elif number != self._first[0] or now - self._first[1] >= REPEAT_S:
            before = self._before.get(signal.Signals(number))
            (before if callable(before) else signal.default_int_handler)(number, frame)
