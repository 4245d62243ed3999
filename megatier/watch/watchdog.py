"""Watches a run: one in which nothing moves on says why, and stops with an error instead of hanging.

The watchdog looks, from a thread of its own, at what every queue and the gate are at while a pass is on, or while
training waits for a checkpoint. While new files are filled, weights come, or a model is exported, it also looks at how
many pieces are done. When all of that was the same for too long, it writes the state of every queue and thread to
stderr and to a file, and raises StallError in the training thread. A thread that hangs inside the kernel or CUDA cannot
be woken, and keeps the run from closing. The process ends without it then.

It acts late rather than wrongly. Everything else between passes may take as long as it likes, and so may a process that
was stopped. It cannot see a thread that never lets go of the interpreter.
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
"""Seconds between two looks, at most."""
LOOKS_MIN = 20
"""Looks before the shortest stall, because threads that share few cores take turns meanwhile."""
GRACE_S = 60.0
"""Seconds for writing the report, and for closing the run after it."""
SIGNAL = signal.SIGURG
"""Wakes the training thread if it waits in Python or for a native batch. It is ignored if nobody handles it."""
EXIT_ERROR = 2
"""The exit status of the command for every error of ours."""


def _count_nothing() -> int:
    """Return 0: queues count all work."""
    return 0


class Watchdog:
    """Watches passes, and what moves bytes before and after them.

    Use it as a context around all that has to close after a stall, in the thread that trains.
    """

    def __init__(self, path: Path, least_s: float, expected_s: float) -> None:
        """Prepare; nothing is watched before it is entered.

        Args:
            path: the file that the report goes to.
            least_s: seconds without progress before which it does not act; 0: it never does.
            expected_s: seconds of a step as predicted; 0: not known.
        """
        self._path = path
        self._stall_timer = StallTimer(least_s, expected_s)

        # The time between looks is 0 if the watchdog never acts. Then no thread is started and no signal is caught.
        self._look_s = min(LOOK_S_MAX, least_s / LOOKS_MIN)
        self._player: Player | None = None
        self._done: Callable[[], int | None] = _count_nothing
        self._error: StallError | None = None
        self._lock = threading.Lock()
        """Held while a pass begins or ends, and from the decision that one hangs until its thread was told."""
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
            self._thread.join()
            if self._trainer is not None:
                signal.signal(SIGNAL, self._handler)

    @contextmanager
    def watch(self, player: Player, done: Callable[[], int | None] = _count_nothing) -> Iterator[None]:
        """Watch a pass, or other work, in which something has to move on until this ends.

        Args:
            player: the run's player.
            done: tells how many pieces of work are done that no queue counts; None: nothing has to move on yet.

        Raises:
            StallError: nothing did.
        """
        with self._lock:
            self._player = player
            self._done = done
        try:
            yield
        finally:
            with self._lock:
                self._player = None

    def expect(self, seconds: float) -> None:
        """Take note that a step is now predicted to take so long."""
        with self._lock:
            self._stall_timer.expected_s = seconds

    # ------------------------------------------------------------------ its thread

    def _run(self) -> None:
        """Look until the watchdog is closed or a pass hangs."""
        # Counted in looks, not by a clock: a process that was stopped had no chance to move on.
        while not self._closed.wait(self._look_s):
            with self._lock:
                player = self._player
                seen = None if player is None else self._look(player)
                if not self._stall_timer.observe(seen, self._look_s) or player is None:
                    continue
                self._stop(player)

            # The run closes now if its threads can end. If it has not closed in time, one of them hangs for good.
            if not self._closed.wait(GRACE_S):
                self._exit()
            return

    def _look(self, player: Player) -> object:
        """Return a value that differs from the one before as soon as something has moved on; None: nothing has to."""
        done = call_safely(self._done)
        return None if done is None else (done, call_safely(partial(read_progress, player)))

    def _stop(self, player: Player) -> None:
        """Write the report, and raise the error in the training thread if that can be reached."""
        # The error is set before the signal is sent, because the handler raises it.
        self._error = StallError(self._stall_timer.quiet_s, str(self._path))
        # Neither the terminal nor the drive can be relied on now, so each is written to on a thread of its own.
        text = self._report(player)
        write_or_give_up(lambda: sys.stderr.write(text))
        write_or_give_up(lambda: self._path.write_text(text, encoding="utf-8"))
        if self._trainer is not None:
            signal.pthread_kill(self._trainer, SIGNAL)

    def _report(self, player: Player) -> str:
        """Return the report, or why there is none."""
        try:
            return describe_stall(player, self._stall_timer.quiet_s)
        except Exception:  # noqa: BLE001 - whatever is wrong with the report, the run has to end
            return f"megatier: {self._error} Its report could not be made:\n{traceback.format_exc()}"

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Raise the error; Python calls this in the main thread, which trains."""
        # The signal may be somebody else's.
        if self._error is not None:
            raise self._error

    def _exit(self) -> None:
        """End the process without closing the run."""
        words = (
            f"megatier: error: {self._error} What hangs did not let the run close within {GRACE_S:.0f} s, so the "
            "process ends. Its block files (megatier-<run id> on each mount of tiers.nvme) stay until `megatier "
            "resume` takes them over or `megatier clean` removes them.\n"
        )
        # A process without a terminal may have None for either.
        write_or_give_up(lambda: sys.stdout.flush())
        write_or_give_up(lambda: sys.stderr.write(words))
        # Not `sys.exit`, which would wait for the threads that hang.
        os._exit(EXIT_ERROR)


def write_or_give_up(write: Callable[[], object]) -> None:
    """Write on a thread of its own, which is given up if the drive, or the reader of the pipe, hangs.

    No error comes of it: the run has to end, even if there is no stream, no memory and no thread to write with.
    """

    def run() -> None:
        with suppress(Exception):
            write()

    thread = threading.Thread(target=run, daemon=True)
    with suppress(Exception):
        thread.start()
        thread.join(GRACE_S)


def call_safely(look: Callable[[], object]) -> object:
    """Return what a look gives, or the name of its error: the watchdog goes on, and sees nothing move there."""
    try:
        return look()
    except Exception as error:  # noqa: BLE001 - without the watchdog a run that hangs would hang for ever
        return type(error).__name__


def read_progress(player: Player) -> object:
    """Return a value that differs from the one before as soon as a queue, an update or compute has moved on."""
    counts = []
    for queue in player.queues:
        state = queue.state()
        # Both counts matter: a queue may begin nothing for long while its copies end one after the other.
        counts.append((state.num_begun, len(state.in_flight)))
    return len(player.accesses), player.gate.count, counts
