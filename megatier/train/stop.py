"""Stops a run by SIGINT, SIGTERM and SIGHUP: the first lets the step end, the second ends the process at once.

`timeout` and some schedulers send a signal to a process and then to its group. The same signal within a moment counts
once.
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
"""Seconds within which the same signal counts once."""


class StopRequest:
    """Catches signals while it is entered. It does so in the main thread; elsewhere it catches nothing.

    Attributes:
        is_asked: whether a signal came.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """Prepare; signals are caught when it is entered.

        Args:
            say: tells a person what happens now.
        """
        self._say = say
        self.is_asked = False
        self._first = 0, 0.0
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        # Python lets no other thread set handlers.
        if threading.current_thread() is not threading.main_thread():
            return self

        # A process under nohup ignores SIGHUP, because its user wants it to outlive the terminal.
        is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        for number in SIGNALS:
            if not (is_nohup and number is signal.SIGHUP):
                # Python gives None for a handler that was not set from Python, and does not take None back.
                self._before[number] = signal.signal(number, self._ask) or signal.SIG_DFL
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            # If somebody else handles the signal by now, the process is ending, and what comes now is dropped.
            if signal.getsignal(number) == self._ask:
                signal.signal(number, handler)  # type: ignore[arg-type]

    def _ask(self, number: int, frame: FrameType | None) -> None:
        """Note the first signal, and let any other one end the process as it would have without this."""
        now = time.monotonic()
        if not self.is_asked:
            self.is_asked = True
            self._first = (number, now)

            # A handler may print here although another print is under way, because the console has no buffer.
            self._say("stopping after this step, with a checkpoint; once more to stop at once")
        elif number != self._first[0] or now - self._first[1] >= REPEAT_S:
            before = self._before.get(signal.Signals(number))
            (before if callable(before) else signal.default_int_handler)(number, frame)
