"""Stops a run that makes no progress with an error that says why, so that it does not hang for ever.

The watchdog has a thread of its own. During a pass, or while training waits for a checkpoint, it looks at the state of
every queue and of the gate. While new files are filled, weights are loaded or a model is exported, it also looks at how
many pieces are done. If nothing has changed for too long, it writes the state of all queues and threads to stderr and
to a file, and raises StallError in the training thread. A thread that hangs inside the kernel or CUDA cannot be woken,
and would keep the run from closing, so then the process exits without it.

The watchdog would rather act late than wrongly. Other work between passes may take any time, and so may a process that
was stopped by a signal. A thread that never releases the GIL goes unseen.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Self

from megatier import _native
from megatier.errors import StallError
from megatier.play.player import Player
from megatier.watch.stall_report import describe_stall
from megatier.watch.stall_timer import StallTimer

LOOK_S_MAX = 1.0
"""Most seconds between two looks."""
LOOKS_MIN = 20
"""Fewest looks before anything counts as a stall, because threads that share few cores have to take turns."""
GRACE_S = 60.0
"""Seconds that the run has to write the report, and once more to close."""
SIGNAL = signal.SIGURG
"""Wakes the training thread if it waits in Python or for a native batch. By default the system ignores it."""
EXIT_ERROR = 2
"""Exit status of the command for every error of megatier."""


def _count_nothing() -> int:
    """Return 0, for work that the queues count."""
    return 0


class Watchdog:
    """Watches passes, and the work that moves bytes before and after them.

    Enter it in the training thread, around everything that has to close after a stall.
    """

    def __init__(self, path: Path, least_s: float, expected_s: float) -> None:
        """Prepare. Nothing is watched before this is entered.

        Args:
            path: the file for the report.
            least_s: seconds that a stall lasts at least; 0: the watchdog is off.
            expected_s: predicted seconds of a step; 0: not known.
        """
        self._path = path
        self._stall_timer = StallTimer(least_s, expected_s)

        # This is 0 if the watchdog is off. Then no thread is started and no signal is caught.
        self._look_s = min(LOOK_S_MAX, least_s / LOOKS_MIN)
        self._player: Player | None = None
        self._done: Callable[[], int | None] = _count_nothing
        self._error: StallError | None = None
        self._lock = threading.Lock()
        """Held while a pass begins or ends, and from the decision that one hangs until the training thread was told."""
        self._closed = _native.Latch()
        self._thread = threading.Thread(target=self._run, name="megatier-watchdog", daemon=True)
        is_main = threading.current_thread() is threading.main_thread()
        self._trainer = threading.get_ident() if is_main else None
        """The training thread, if Python lets signals reach it."""

    def __enter__(self) -> Self:
        if self._look_s:
            if self._trainer is not None:
                # Python gives None for a handler that was not set from Python, and does not take None back.
                self._handler = signal.signal(SIGNAL, self._interrupt) or signal.SIG_DFL
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        if self._look_s:
            # The thread may still send the signal, so the handler stays until the thread has ended.
            self._thread.join()
            if self._trainer is not None:
                signal.signal(SIGNAL, self._handler)

    @contextmanager
    def watch(self, player: Player, done: Callable[[], int | None] = _count_nothing) -> Iterator[None]:
        """Watch a pass, or other work, until this context ends.

        Args:
            player: the run's player.
            done: returns how many pieces of work that no queue counts are done; None: no progress is due yet.

        Raises:
            StallError: there was no progress for too long.
        """
        # The watchdog's thread reads both, so they change together.
        with self._lock:
            self._player = player
            self._done = done
        try:
            yield
        finally:
            with self._lock:
                self._player = None

    def expect(self, seconds: float) -> None:
        """Set the predicted seconds of a step."""
        with self._lock:
            self._stall_timer.expected_s = seconds

    # ------------------------------------------------------------------ on the watchdog's thread

    def _run(self) -> None:
        """Look until the watchdog is closed or a pass hangs."""
        # Time is counted in looks and not by a clock, because a process that is stopped makes no progress.
        while not self._closed.wait(self._look_s):
            with self._lock:
                player = self._player
                seen = None if player is None else self._look(player)
                if not self._stall_timer.observe(seen, self._look_s) or player is None:
                    continue
                self._stop(player)

            # The run closes now. If it has not closed in time, one of its threads hangs for good.
            if not self._closed.wait(GRACE_S):
                self._exit()
            return

    def _look(self, player: Player) -> object:
        """Return a value that changes as soon as there is progress; None: no progress is due."""
        done = call_safely(self._done)
        return None if done is None else (done, call_safely(partial(read_progress, player)))

    def _stop(self, player: Player) -> None:
        """Write the report, and raise the error in the training thread if signals reach it."""
        # The error is set before the signal is sent, because the handler raises it.
        self._error = StallError(self._stall_timer.quiet_s, str(self._path))
        # Neither the terminal nor the drive can be relied on now, so each is written to on a thread of its own.
        text = self._report(player)
        write_or_give_up(lambda: sys.stderr.write(text))
        write_or_give_up(lambda: self._path.write_text(text, encoding="utf-8"))
        if self._trainer is not None:
            signal.pthread_kill(self._trainer, SIGNAL)

    def _report(self, player: Player) -> str:
        """Return the report, or the traceback if it cannot be made."""
        try:
            return describe_stall(player, self._stall_timer.quiet_s)
        except Exception:  # noqa: BLE001 - whatever is wrong with the report, the run has to end
            return f"megatier: {self._error} Its report could not be made:\n{traceback.format_exc()}"

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Raise the error. Python calls this in the main thread, which is the training thread."""
        # Somebody else may have sent this signal.
        if self._error is not None:
            raise self._error

    def _exit(self) -> None:
        """Exit the process without closing the run."""
        message = (
            f"megatier: error: {self._error} What hangs did not let the run close within {GRACE_S:.0f} s, so the "
            "process ends. Its block files (megatier-<run id> on each mount of tiers.nvme) stay until `megatier "
            "resume` takes them over or `megatier clean` removes them.\n"
        )
        # Either stream may be None in a process without a terminal.
        write_or_give_up(lambda: sys.stdout.flush())
        write_or_give_up(lambda: sys.stderr.write(message))
        # Not `sys.exit`, which would wait for the threads that hang.
        os._exit(EXIT_ERROR)


def write_or_give_up(write: Callable[[], object]) -> None:
    """Write on a new thread, and give that thread up if the drive or the reader of a pipe hangs.

    Errors are ignored, because the run has to end even if nothing can be written.
    """

    def run() -> None:
        with suppress(Exception):
            write()

    thread = threading.Thread(target=run, daemon=True)
    with suppress(Exception):
        thread.start()
        thread.join(GRACE_S)


def call_safely(look: Callable[[], object]) -> object:
    """Return the result of a function, or the name of its error, so that the watchdog keeps looking."""
    try:
        return look()
    except Exception as error:  # noqa: BLE001 - without the watchdog a run that hangs would hang for ever
        return type(error).__name__


def read_progress(player: Player) -> object:
    """Return a value that changes as soon as a queue, an update or compute makes progress."""
    counts = []
    for queue in player.queues:
        state = queue.state()
        # A queue may begin nothing for a long time while its copies end one after the other, so both counts matter.
        counts.append((state.num_begun, len(state.in_flight)))
    return len(player.accesses), player.gate.count, counts
