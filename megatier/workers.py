"""Workers: threads that do submitted work, for which other threads wait at native latches.

They replace executors of the standard library, which take locks in Python code. If a signal handler (Ctrl-C, the
watchdog) raises there in the thread that submits or waits, a lock stays taken for ever, and workers and the code that
closes them hang. Here a thread that submits or waits takes no such lock (`store/transfer.py` says more).
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
    """A piece of work, for whose result any thread may wait, any number of times."""

    __slots__ = ("_ended", "_error", "_result", "_work")

    def __init__(self, work: Callable[[], Result]) -> None:
        """Begin before the work starts. Only `Workers.submit` makes a task."""
        self._work: Callable[[], Result] | None = work
        self._ended = _native.Latch()
        self._result: Result
        self._error: Exception | None = None

    def result(self) -> Result:
        """Block until the work is done, and return its result.

        Raises:
            Exception: what the work raised.
        """
        # An error that a signal handler raises in this wait is not stored, because it is not the work's.
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def wait(self) -> None:
        """Block until the work has ended or failed."""
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
        # For example a SystemExit in this thread. In the thread that waits it would end that one.
        except BaseException as error:  # noqa: BLE001 - who waits was not interrupted
            self._error = StepAbandonedError(f"work in thread {worker} was broken off by {error!r}")
            self._error.__cause__ = error

        # The latch is set last, because other threads then read the fields without a lock. The work is dropped, so that
        # a stored task does not keep its memory alive.
        self._work = None
        self._ended.set()


class Workers:
    """Threads that do work in the order of submission."""

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

            # A daemon, because a thread that hangs in a drive must not keep the process alive.
            thread = threading.Thread(target=self._run, args=(worker,), name=worker, daemon=True)
            self._threads.append(thread)

        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], Result]) -> Task[Result]:
        """Submit work, and return the task to wait for."""
        task = Task(work)
        self._tasks.put(task)
        return task

    def map(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Do the same work with several items, and return the results in the order of the items.

        If the wait is interrupted, threads may go on for a while. So the work has to keep references to the memory that
        it uses, and not only addresses.

        Raises:
            Exception: the error of the first item that failed.
        """
        # All are submitted before the first wait, so that all threads are busy.
        tasks = [self.submit(partial(work, item)) for item in items]
        return [task.result() for task in tasks]

    def close(self) -> None:
        """Drop the work that has not begun, and end the threads. No thread may wait for a task any more."""
        # Otherwise the end marks below would come after all waiting work.
        with contextlib.suppress(Empty):
            while True:
                self._tasks.get_nowait()

        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, name: str) -> None:
        """Do submitted work until `close`. This is the body of a thread."""
        while (task := self._tasks.get()) is not None:
            task._run(name)

            # Otherwise the last task would stay alive until the next one comes.
            del task
