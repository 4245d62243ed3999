"""Closes objects with threads, memory and files when the last reference to one goes."""

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
"""How long the last reference's thread waits until all is closed."""
POLL_S = 0.001
"""How often it is looked whether all is closed."""
OURS = "megatier"
"""The beginning of the names of all threads of such objects."""


class ClosedWhenDropped:
    """An object that is closed, with a warning, if its last reference goes and nobody has closed it."""

    _closing_process: int | None = None
    """The process that has to close it, not a forked child; None: nobody has to, or somebody does."""

    def _own(self) -> None:
        """Note that this process has something to close from now on."""
        self._closing_process = os.getpid()

    def _disown(self) -> None:
        """Note that the object is closed, or that its `with` block will close it."""
        self._closing_process = None

    def close(self) -> None:
        """End the threads, free the memory and remove the files."""
        raise NotImplementedError

    def _close_dropped(self) -> None:
        """Close what nobody can use any more. This runs in a thread of its own."""
        self.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At its end a process gives memory and threads back, and the next one removes its block files. It is asked for
        # first, and by no name of this module, all of which may be None by then.
        if is_finalizing() or self._closing_process != os.getpid():
            return
        self._closing_process = None

        # A collection of cycles may come anywhere: in a thread that closing joins, or where this one holds a lock that
        # others need to end. So a thread of its own closes, started past the standard library's locks, and is waited
        # for within bounds.
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
