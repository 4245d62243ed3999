"""Workers: results in order, errors where one waits, and nothing that an interrupt leaves locked."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from types import FrameType

import pytest
from interrupts import python_locks

from megatier.errors import StepAbandonedError
from megatier.workers import Task, Workers

WAIT_S = 20


@pytest.fixture
def workers() -> Iterator[Workers]:
    with closing(Workers(2, "test")) as made:
        yield made


@pytest.fixture
def alarm() -> Iterator[None]:
    """An alarm raises KeyboardInterrupt, as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def stop(started: threading.Event, go: threading.Event) -> None:
    started.set()
    go.wait(WAIT_S)


def test_map_gives_results_in_the_order_of_items(workers: Workers) -> None:
    def slow(item: int) -> int:
        time.sleep(item / 1000)
        return item

    assert workers.map(slow, (9, 3, 0, 5)) == [9, 3, 0, 5]
    assert workers.map(abs, []) == []


def test_error_of_work_is_raised_every_time_where_one_waits(workers: Workers) -> None:
    task = workers.submit(lambda: 1 // 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            task.result()
    with pytest.raises(ZeroDivisionError):
        workers.map(lambda item: 1 // item, (1, 0, 1))
    assert workers.map(abs, (-1,)) == [1]


def test_work_that_ends_its_thread_is_an_error_of_ours_where_one_waits(workers: Workers) -> None:
    def leave() -> None:
        raise SystemExit(3)

    for _ in range(3):
        with pytest.raises(StepAbandonedError, match=r"thread test_\d was broken off by SystemExit\(3\)"):
            workers.submit(leave).result()
    assert workers.map(abs, (-1, -2)) == [1, 2]


def test_close_ends_what_was_begun_and_drops_the_rest() -> None:
    started, go, done = threading.Event(), threading.Event(), list[int]()
    workers = Workers(1, "test")
    workers.submit(partial(stop, started, go))
    workers.submit(partial(done.append, 1))
    assert started.wait(WAIT_S)
    threading.Timer(0.05, go.set).start()
    workers.close()
    assert go.is_set()
    assert done == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test_")]


def test_workers_take_no_lock_by_python_code_in_the_thread_that_submits_and_waits(workers: Workers) -> None:
    with python_locks() as called:
        assert workers.map(abs, (-1, -2, -3)) == [1, 2, 3]
        workers.submit(int).result()
    assert called == []


@pytest.mark.usefixtures("alarm")
def test_wait_that_is_interrupted_leaves_the_work_and_its_result(workers: Workers) -> None:
    started, go = threading.Event(), threading.Event()
    task = workers.submit(partial(stop, started, go))
    assert started.wait(WAIT_S)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    with pytest.raises(KeyboardInterrupt):
        task.result()
    go.set()
    assert task.result() is None


@pytest.mark.usefixtures("alarm")
def test_workers_that_are_interrupted_anywhere_go_on(workers: Workers) -> None:
    """With an executor of the standard library about twenty of these interrupts are enough for it to stop for ever."""
    draw = random.Random(0)
    for _ in range(200):
        try:
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(2e-4, 2e-3))
            while True:
                workers.map(abs, range(4))
        except KeyboardInterrupt:
            pass

    # A thread that signals do not reach asks, so that this test ends if nobody answers.
    answers = list[list[int]]()
    asking = threading.Thread(target=lambda: answers.append(workers.map(abs, (-1, -2, -3))), daemon=True)
    asking.start()
    asking.join(WAIT_S)
    assert answers == [[1, 2, 3]]


def test_task_that_is_kept_keeps_nothing_but_its_result(workers: Workers) -> None:
    class Memory:
        """Whatever the work needs."""

    memory = Memory()
    seen = weakref.ref(memory)
    task: Task[int] = workers.submit(partial(lambda held: 7, memory))
    assert task.result() == 7
    del memory
    gc.collect()
    assert seen() is None
    assert task.result() == 7
