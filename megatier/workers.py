"""Workers: threads that take work from others, who wait for it at native latches.

The standard library has executors for this, but they take locks by Python code. If a signal handler (Ctrl-C, the
watchdog) raises there in the thread that submits or waits, a lock stays taken for ever: the workers stop, and so does
the code that closes them. Here the thread that submits and waits takes no such lock (`store/transfer.py` says more).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from megatier import _native
from megatier.errors import StepAbandonedError

Item = TypeVar("Item")
Result = TypeVar("Result")


class Task(Generic[Result]):
    """One piece of work, whose result any thread may wait for, any number of times."""

    __slots__ = ("_ended", "_error", "_result", "_work")

    def __init__(self, work: Callable[[], Result]) -> None:
        """Take work that was not begun. Only `Workers.submit` makes a task."""
        self._work: Callable[[], Result] | None = work
        self._ended = _native.Latch()
        self._result: Result
        self._error: Exception | None = None

    def result(self) -> Result:
        """Block until the work is done, and return its result.

        Raises:
            Exception: what the work raised.
        """
        # What a signal handler raises in this wait is not the work's, and is not kept.
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def wait(self) -> None:
        """Block until the work is done, however it went."""
        self._ended.wait()

    def done(self) -> bool:
        """Return whether `wait` would not block."""
        return self._ended.is_set()

    def _run(self, worker: str) -> None:
        """Do the work; this runs in a worker."""
        assert self._work is not None
        try:
            self._result = self._work()
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits; the worker must live on
            self._error = error
        # A SystemExit of this thread, say. Raised in the thread that waits, it would end that one.
        except BaseException as error:  # noqa: BLE001 - who waits was not interrupted
            self._error = StepAbandonedError(f"work in thread {worker} was broken off by {error!r}")
            self._error.__cause__ = error

        # The latch is set last, since a thread that sees it set reads the other fields without a lock. A task that is
        # kept must not keep what its work was made of.
        self._work = None
        self._ended.set()


class Workers:
    """Threads that do work in the order in which it comes."""

    def __init__(self, num_threads: int, name: str) -> None:
        """Start the threads.

        Args:
            num_threads: number of threads.
            name: the name of the threads, to which each adds its number.
        """
        self._tasks: SimpleQueue[Task[Any] | None] = SimpleQueue()
        self._threads = []
        for number in range(num_threads):
            worker = f"{name}_{number}"

            # A daemon, since a thread that hangs in a drive must not keep the process from ending.
            thread = threading.Thread(target=self._run, args=(worker,), name=worker, daemon=True)
            self._threads.append(thread)

        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], Result]) -> Task[Result]:
        """Let a thread do work, and return what to wait for."""
        task = Task(work)
        self._tasks.put(task)
        return task

    def map(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Do the same work with several items, and return the results in the order of the items.

        If the wait is interrupted, threads may go on for a while. So the work itself has to hold the memory that it
        reads and writes, rather than addresses alone.

        Raises:
            Exception: what the work raised with the first item with which it raised anything.
        """
        # All are submitted before the first wait, so that all threads are busy.
        tasks = [self.submit(partial(work, item)) for item in items]
        return [task.result() for task in tasks]

    def close(self) -> None:
        """Drop the work that was not begun, and end the threads. Nobody may wait for a task any more."""
        # What is waiting is dropped first. Otherwise the ends below would come after it, and closing would do all of
        # that work.
        with contextlib.suppress(Empty):
            while True:
                self._tasks.get_nowait()

        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, name: str) -> None:
        """Do what comes, until `close`. This is the body of a thread."""
        while (task := self._tasks.get()) is not None:
            task._run(name)
            # Otherwise the last task would live until the next one comes.
            del task
