"""Transfers, the queues that start them, and instants, on the CPU."""

from __future__ import annotations

import contextlib
import errno
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from interrupts import python_locks

from megatier.errors import ClosedError, StallError, StepAbandonedError, TransferError
from megatier.store.queue import Queue
from megatier.store.stream_clock import Instant
from megatier.store.transfer import Transfer, compute_point
from megatier.tier import Tier


class Late:
    """A move that ends when told."""

    def __init__(self, error: Exception | None = None) -> None:
        self.ended, self.error = threading.Event(), error

    def wait(self) -> None:
        self.ended.wait()
        if self.error is not None:
            raise self.error

    def done(self) -> bool:
        return self.ended.is_set()

    def span_ns(self) -> tuple[int, int]:
        return 5, 2_000_000_005


def failure() -> TransferError:
    return TransferError("read of block x", "nvme", "/somewhere", 4096, errno.EIO)


@pytest.fixture
def queue() -> Iterator[Queue]:
    queue = Queue("test")
    yield queue
    queue.close()


def test_items_run_in_order_on_one_thread(queue: Queue) -> None:
    seen: list[tuple[int, str]] = []
    transfers = [
        queue.submit("key", 0, lambda number=number: seen.append((number, threading.current_thread().name)))  # type: ignore[misc]
        for number in range(100)
    ]
    transfers[-1].wait()
    assert seen == [(number, "megatier-test") for number in range(100)]


def test_wait_returns_the_seconds_of_the_move_every_time(queue: Queue) -> None:
    late = Late()
    transfer = queue.submit("key", 7, lambda: late)
    assert transfer.has_started(10)
    assert not transfer.done()
    late.ended.set()
    assert [transfer.wait(), transfer.wait()] == [2.0, 2.0]
    assert transfer.span_ns() == (5, 2_000_000_005)
    assert (transfer.queue, transfer.key, transfer.num_bytes) == ("test", "key", 7)
    assert transfer.done()
    assert not transfer.failed()


def test_state_tells_the_item_under_way_the_moves_in_flight_and_who_waits(queue: Queue) -> None:
    late, held, started = Late(), threading.Event(), threading.Event()

    def hold() -> None:
        started.set()
        held.wait()

    moved = queue.submit("a", 0, lambda: late)
    queue.submit("b", 0, lambda: None)
    at, last = queue.submit("c", 0, hold), queue.submit("d", 0, lambda: None)
    started.wait()
    state = queue.state()
    assert state.current is not None
    assert (state.num_begun, state.current[0], state.in_flight, state.num_waiting) == (3, at, (moved,), 1)
    late.ended.set()
    assert queue.state().in_flight == ()
    held.set()
    last.wait()


def test_queue_forgets_moves_that_have_ended(queue: Queue) -> None:
    for _ in range(100):
        queue.submit("key", 0, lambda: None)
    queue.submit("key", 0, lambda: None).wait()
    assert len(queue._in_flight) == 1


def test_queue_goes_on_while_a_move_is_in_flight(queue: Queue) -> None:
    late = Late()
    first, second = queue.submit("a", 0, lambda: late), queue.submit("b", 0, lambda: None)
    second.wait()
    assert not first.done()
    late.ended.set()
    first.wait()


def test_item_starts_after_what_it_depends_on() -> None:
    late, started = Late(), threading.Event()
    source, target = Queue("source"), Queue("target")
    first = source.submit("a", 0, lambda: late)
    second = target.submit("b", 0, started.set, requires=[first])
    assert not started.wait(0.02)
    assert list(second.requires) == [first]
    late.ended.set()
    second.wait()
    assert not second.requires  # no chain is kept
    for queue in (source, target):
        queue.close()


@pytest.mark.parametrize("error", [failure(), RuntimeError("cuda"), OSError(errno.EIO, "drive")])
def test_failure_reaches_every_waiter_and_what_depends_on_it(queue: Queue, error: Exception) -> None:
    late, started = Late(error), threading.Event()
    late.ended.set()
    first = queue.submit("a", 0, lambda: late)
    second = queue.submit("b", 0, started.set, requires=[first])
    third = queue.submit("c", 0, lambda: None, follows=[first])
    for transfer in (first, second):
        for use in (transfer.wait, transfer.wait_on_stream, lambda t=transfer: t.wait_before_use(Tier.RAM)):
            with pytest.raises(type(error)) as caught:
                use()
            assert caught.value is error
        assert transfer.failed()
        assert not transfer.wait_for_end()
    assert not started.is_set()
    third.wait()
    assert third.wait_for_end()


def test_failure_to_start_is_the_transfers_alone(queue: Queue) -> None:
    def start() -> None:
        raise failure()

    first, second = queue.submit("a", 0, start), queue.submit("b", 0, lambda: None)
    with pytest.raises(TransferError):
        first.wait()
    second.wait()


class Interrupted(Late):
    """A move whose waiter is interrupted, once."""

    def __init__(self, by: BaseException, error: Exception | None = None) -> None:
        super().__init__(error)
        self.ended.set()
        self.by: BaseException | None = by

    def wait(self) -> None:
        by, self.by = self.by, None
        if by is not None:
            raise by
        super().wait()


SIGNALLED = [KeyboardInterrupt(), SystemExit(1), StallError(5, "stall.txt"), TimeoutError("an alarm")]


@pytest.mark.parametrize("by", SIGNALLED, ids=lambda by: type(by).__name__)
def test_interrupt_of_a_wait_is_no_failure_of_the_move(queue: Queue, by: BaseException) -> None:
    transfer = queue.submit("a", 0, lambda: Interrupted(by))
    with pytest.raises(type(by)):
        transfer.wait()
    assert transfer.wait() == 2.0
    assert not transfer.failed()
    queue.submit("b", 0, lambda: None, requires=[transfer]).wait()


@pytest.mark.parametrize("by", SIGNALLED, ids=lambda by: type(by).__name__)
@pytest.mark.parametrize(
    "ask", [Transfer.wait_for_end, lambda t: t.wait_before_use(Tier.RAM, raises=False)], ids=["end", "use"]
)
def test_interrupt_reaches_who_does_not_mind_failures(
    queue: Queue, by: BaseException, ask: Callable[[Transfer], object]
) -> None:
    transfer = queue.submit("a", 0, lambda: Interrupted(by))
    with pytest.raises(type(by)):
        ask(transfer)
    assert transfer.wait_for_end()
    failed = queue.submit("b", 0, lambda: Interrupted(by, failure()))
    with contextlib.suppress(type(by)):
        assert not failed.wait_for_end()
    assert not failed.wait_for_end()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)], ids=["interrupt", "exit"])
def test_item_that_breaks_off_fails_by_a_typed_error_and_its_queue_goes_on(queue: Queue, error: BaseException) -> None:
    def start() -> None:
        raise error

    transfer = queue.submit("a", 0, start)
    with pytest.raises(StepAbandonedError, match="a on queue test was broken off"):
        transfer.wait()
    assert not transfer.wait_for_end()
    queue.submit("b", 0, lambda: None).wait()


def test_signal_during_a_wait_is_raised_once(queue: Queue) -> None:
    late = Late()
    transfer = queue.submit("a", 0, lambda: late)
    kill = threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        kill.start()
        with pytest.raises(KeyboardInterrupt):
            transfer.wait()
        late.ended.set()
        assert transfer.wait() == 2.0
    finally:
        signal.signal(signal.SIGINT, before)
        kill.join()


def test_close_finishes_what_was_submitted_and_then_refuses() -> None:
    queue, seen = Queue("test"), list[int]()
    for number in range(50):
        queue.submit("key", 0, lambda number=number: seen.append(number))  # type: ignore[misc]
    queue.close()
    queue.close()
    assert seen == list(range(50))
    with pytest.raises(ClosedError, match="the store was closed"):
        queue.submit("key", 0, lambda: None)


def test_compute_point_and_instant_without_a_gpu_are_now() -> None:
    assert compute_point(None, "key") is None
    before = time.perf_counter_ns()
    assert before <= Instant(None).ns() <= time.perf_counter_ns()


def test_transfer_remembers_nothing_of_what_it_waited_for(queue: Queue) -> None:
    first = queue.submit("a", 0, lambda: None)
    second = queue.submit("b", 0, lambda: None, requires=[first], follows=[first])
    second.wait()
    assert (second.requires, second.follows) == ((), ())


def test_transfer_takes_no_lock_by_python_code_in_the_thread_that_submits_and_waits() -> None:
    queue = Queue("nvme_to_ram")
    with python_locks() as called:
        transfer = queue.submit("block", 1, lambda: None)
        transfer.wait()
        transfer.wait_on_stream()
        assert transfer.has_started(1.0)
        assert transfer.done()
        queue.settle()
        queue.state()
    assert called == []
    queue.close()
