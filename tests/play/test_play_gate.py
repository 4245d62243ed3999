"""The gate between compute and the loads that wait for it."""

from __future__ import annotations

import threading
import time

import pytest
from interrupts import python_locks

from megatier.errors import StepAbandonedError
from megatier.play.gate import Gate


def test_gate_lets_pass_who_waits_for_no_more() -> None:
    gate, passed = Gate(), list[int]()

    def wait(count: int) -> None:
        gate.wait_for(count)
        passed.append(count)

    threads = [threading.Thread(target=wait, args=(count,)) for count in (0, 2, 3)]
    for thread in threads:
        thread.start()
    gate.open_to(2)
    for thread in threads[:2]:
        thread.join(10)
    assert sorted(passed) == [0, 2]
    while not gate.wanted:
        time.sleep(0.001)
    assert (gate.count, gate.wanted) == (2, (3,))
    gate.open_to(3)
    threads[2].join(10)
    assert sorted(passed) == [0, 2, 3]
    assert (gate.count, gate.wanted) == (3, ())


def test_gate_abandoned_wakes_everyone_with_an_error_until_reset() -> None:
    gate, woken = Gate(), threading.Event()

    def wait() -> None:
        with pytest.raises(StepAbandonedError):
            gate.wait_for(1)
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    gate.abandon()
    thread.join(10)
    assert woken.is_set()
    with pytest.raises(StepAbandonedError):
        gate.wait_for(0)
    gate.reset()
    gate.wait_for(0)


def test_gate_falls_only_by_a_reset() -> None:
    gate = Gate()
    gate.open_to(2)
    with pytest.raises(AssertionError):
        gate.open_to(1)
    gate.reset()
    gate.open_to(1)
    assert gate.count == 1


def test_gate_takes_no_lock_by_python_code() -> None:
    gate = Gate()
    with python_locks() as called:
        gate.open_to(3)
        gate.wait_for(2)
        gate.abandon()
        gate.reset()
    assert called == []
