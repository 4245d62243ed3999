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
import time
import traceback
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import ParamSpec, Self, TypeVar

from megatier import _native
from megatier.errors import StallError
from megatier.play.player import Player
from megatier.store.queue import QueueState
from megatier.store.transfer import Transfer

MULTIPLE = 4
"""Nothing may move on for so many times the longest that it took so far, or the predicted step."""
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
SHOWN_MAX = 8
"""Moves in flight, or waited for, that a line of the report names."""
QUEUES_TITLE = "queues (a copy on a CUDA stream counts as in flight until its queue looks again):"


P = ParamSpec("P")
R = TypeVar("R")


def _nothing() -> int:
    """Return the pieces of work that no queue counts, where there are none."""
    return 0


class Patience:
    """The patience of a watchdog: a least time, and a multiple of the longest that it took before.

    Attributes:
        expected_s: seconds that it may take in any case; 0: not known.
        quiet_s: seconds since something moved on.
    """

    def __init__(self, least_s: float, expected_s: float) -> None:
        """Begin to look.

        Args:
            least_s: the least time.
            expected_s: seconds that it may take in any case; 0: not known.
        """
        self._least_s = least_s
        self._longest_s = 0.0
        self.expected_s = expected_s
        self._seen: object = None
        self.quiet_s = 0.0

    def ends(self, seen: object, seconds: float) -> bool:
        """Take the next look, and return whether everything was the same for too long.

        Args:
            seen: what is seen; None: nothing has to move on now.
            seconds: time since the last look.
        """
        if seen is None or seen != self._seen:
            # The run has moved on, so this much quiet was no stall, and that much again is none either.
            self._longest_s = max(self._longest_s, self.quiet_s)
            self._seen = seen
            self.quiet_s = 0.0
            return False
        self.quiet_s += seconds
        usual_s = max(self._longest_s, self.expected_s)
        return self.quiet_s >= max(self._least_s, MULTIPLE * usual_s)


class Tally:
    """Counts the pieces of some work in any thread. One count that is lost among many does no harm."""

    def __init__(self) -> None:
        """Begin with none."""
        self.count = 0

    def counting(self, work: Callable[P, R]) -> Callable[P, R]:
        """Return work of which each call counts when it is over."""

        def counted(*args: P.args, **kwargs: P.kwargs) -> R:
            result = work(*args, **kwargs)
            self.count += 1
            return result

        return counted

    @property
    def begun(self) -> int | None:
        """The count; None before the first piece."""
        return self.count or None


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
        self._patience = Patience(least_s, expected_s)

        # The time between looks is 0 if the watchdog never acts. Then no thread is started and no signal is caught.
        self._look_s = min(LOOK_S_MAX, least_s / LOOKS_MIN)
        self._player: Player | None = None
        self._done: Callable[[], int | None] = _nothing
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
    def watch(self, player: Player, done: Callable[[], int | None] = _nothing) -> Iterator[None]:
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
            self._patience.expected_s = seconds

    # ------------------------------------------------------------------ its thread

    def _run(self) -> None:
        """Look until the watchdog is closed or a pass hangs."""
        # Counted in looks, not by a clock: a process that was stopped had no chance to move on.
        while not self._closed.wait(self._look_s):
            with self._lock:
                player = self._player
                done = None if player is None else self._done()
                seen = None if player is None or done is None else (done, progress(player))
                if not self._patience.ends(seen, self._look_s) or player is None:
                    continue
                self._stop(player)

            # The run closes now if its threads can end. If it has not closed in time, one of them hangs for good.
            if not self._closed.wait(GRACE_S):
                self._exit()
            return

    def _stop(self, player: Player) -> None:
        """Write the report, and raise the error in the training thread if that can be reached."""
        # The error is set before the signal is sent, because the handler raises it.
        self._error = StallError(self._patience.quiet_s, str(self._path))
        # Neither the terminal nor the drive can be relied on now, so each is written to on a thread of its own.
        text = report(player, self._patience.quiet_s)
        to_terminal = partial(sys.stderr.write, text)
        to_file = partial(self._path.write_text, text, encoding="utf-8")
        attempt(to_terminal)
        attempt(to_file)
        if self._trainer is not None:
            signal.pthread_kill(self._trainer, SIGNAL)

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
        attempt(sys.stdout.flush)
        attempt(partial(sys.stderr.write, words))
        # Not `sys.exit`, which would wait for the threads that hang.
        os._exit(EXIT_ERROR)


def attempt(write: Callable[[], object]) -> None:
    """Write on a thread of its own, which is given up if the drive, or the reader of the pipe, hangs."""

    def run() -> None:
        with suppress(OSError):
            write()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(GRACE_S)


def progress(player: Player) -> object:
    """Return a value that differs from the one before as soon as a queue, an update or compute has moved on."""
    counts = []
    for queue in player.queues:
        state = queue.state()
        # Both counts matter: a queue may begin nothing for long while its copies end one after the other.
        counts.append((state.num_begun, len(state.in_flight)))
    return len(player.accesses), player.gate.count, counts


# ---------------------------------------------------------------------- the report; it must not wait for anything


def report(player: Player, quiet_s: float) -> str:
    """Describe the work of every queue, of the gate, and of every Python thread but those of idle queues."""
    states = [queue.state() for queue in player.queues]
    lines = [f"megatier: nothing has moved on for {quiet_s:.0f} s", "", QUEUES_TITLE]
    for state in states:
        lines += describe_queue(state, player.busy.get(state.name))

    # The stack of an idle queue's thread says that it waits for work, as its line above does.
    idle = {f"megatier-{state.name}" for state in states if state.current is None}
    lines += ["", *describe_compute(player)]
    lines += ["", *describe_threads(idle), ""]
    return "\n".join(lines)


def describe_queue(state: QueueState, cause: str | None) -> Iterator[str]:
    """Yield lines about one queue.

    Args:
        state: what it is at.
        cause: what a queue of the player is busy with, while it has an item.
    """
    if state.current is None:
        yield f"  {state.name}: idle, after {state.num_begun} items"
    else:
        transfer, since_ns = state.current
        at = f" ({cause})" if cause is not None else ""
        yield f"  {state.name}: at {transfer.key}{at} for {seconds_since(since_ns)}; {state.num_waiting} wait behind it"
        for word, others in (("after", transfer.requires), ("behind", transfer.follows)):
            # What is done is no reason to wait. `seen_done` asks no device, since even that might hang now.
            pending = [other for other in others if not other.seen_done()]
            for line in shortened(pending):
                yield f"    {word} {line}"

    for line in shortened(state.in_flight):
        yield f"    in flight: {line}"


def shortened(transfers: Sequence[Transfer]) -> Iterator[str]:
    """Yield the first transfers, by queue, key and age, and how many more there are."""
    for transfer in transfers[:SHOWN_MAX]:
        since_ns, _ = transfer.span_ns()
        age = f"for {seconds_since(since_ns)}" if since_ns else "not started"
        yield f"{transfer.queue} {transfer.key}, {age}"
    if len(transfers) > SHOWN_MAX:
        yield f"{len(transfers) - SHOWN_MAX} more"


def describe_compute(player: Player) -> Iterator[str]:
    """Yield lines about the pass, and about who waits for compute."""
    # A copy: the training thread goes on, and would add to what is read here.
    entered = tuple(player.accesses)
    num_entered = len(entered)
    planned = player.timeline.accesses if player.timeline is not None else ()

    # A pass may take another course than planned, so what it has entered comes first.
    to_come = planned[num_entered:]
    names = [f"{access.unit} ({access.phase}, group {access.group})" for access in (*entered, *to_come)]
    last = f", the last is {names[num_entered - 1]}" if entered else ""
    yield f"compute: {num_entered} accesses begun{last}; {player.gate.count} are over"
    for count in player.gate.wanted:
        # Without a name if no plan has one for that access.
        wanted = ", ".join(names[count - 1 : count])
        yield f"  the gate: somebody waits for the end of access {count}, {wanted}"


def describe_threads(left_out: Container[str]) -> Iterator[str]:
    """Yield the stacks of Python threads, innermost call first.

    They have no source lines, because a drive that hangs may have the source.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    for number, frame in sys._current_frames().items():
        # A thread that was started by C code has no name here.
        name = names.get(number, str(number))
        if name in left_out or number == own:
            continue
        yield f"thread {name}:"
        for caller, line in traceback.walk_stack(frame):
            code = caller.f_code
            yield f"  {code.co_filename}:{line} in {code.co_name}"


def seconds_since(start_ns: int) -> str:
    """Return the time that has passed since a moment of time.perf_counter_ns."""
    return f"{(time.perf_counter_ns() - start_ns) / 1e9:.0f} s"
