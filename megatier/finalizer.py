"""The finalizer of objects with threads, memory and files: it closes them when their last reference is dropped."""

from __future__ import annotations

import _thread
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable

from megatier import _native

WAIT_S = 10.0
"""Seconds that the thread that drops the last reference waits for the end of closing."""
POLL_S = 0.001
"""Seconds between two looks whether closing has ended."""
OURS = "megatier"
"""The beginning of the names of all threads of such objects."""


class ClosedWhenDropped:
    """The base of objects that are closed, with a warning, if they are dropped without `close`."""

    _closing_process: int | None = None
    """The process that has to close the object, and not a forked child of it; None: closed, or closed by its `with`."""

    def _own(self) -> None:
        """Note that this process has to close the object."""
        self._closing_process = os.getpid()

    def _disown(self) -> None:
        """Note that the object is closed, or that its `with` block will close it."""
        self._closing_process = None

    def close(self) -> None:
        """End the threads, free the memory and remove the files."""
        raise NotImplementedError

    def _close_dropped(self) -> None:
        """Close the dropped object. This runs in a thread of its own."""
        self.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # A process that ends frees memory and threads anyway, and the next run removes its block files. This is asked
        # first, and by a default argument, because names of this module may be None by then.
        if is_finalizing() or self._closing_process != os.getpid():
            return
        self._closing_process = None

        # The garbage collector may run anywhere: in a thread that closing joins, or while this thread holds a lock that
        # others need to end. So another thread closes, started without locks of the standard library, and the wait for
        # it has a limit.
        ended = _native.Latch()
        _thread.start_new_thread(_close, (self._close_dropped, ended))
        if not threading.current_thread().name.startswith(OURS):
            ended.wait(WAIT_S)
        warnings.warn(
            f"A {type(self).__name__} was dropped without close(), so it has kept its threads, memory and files until "
            "now. Use it in a `with` block, or call close().",
            ResourceWarning,
            stacklevel=2,
        )


def _close(close: Callable[[], object], ended: _native.Latch) -> None:
    """Close an object in a thread of the standard library, which cannot be joined here, and note when that is gone."""
    thread = threading.Thread(target=close, name=f"{OURS}-close", daemon=True)
    thread.start()
    while thread.is_alive():
        time.sleep(POLL_S)
    ended.set()
