from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from megatier.train import stop
from megatier.train.stop import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stop_request_signal_is_noted_and_the_second_one_interrupts(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "REPEAT_S", 0.0)
    said: list[str] = []
    before = signal.signal(number, signal.default_int_handler)  # a shell may have started this process with it ignored
    with StopRequest(said.append) as request:
        os.kill(os.getpid(), number)
        assert request.is_asked
        assert said == ["stopping after this step, with a checkpoint; once more to stop at once"]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    signal.signal(number, before)


def test_stop_request_under_nohup_leaves_sighup_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest(lambda _: None) as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not request.is_asked
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_stop_request_signal_that_comes_twice_at_once_is_one() -> None:
    said: list[str] = []
    with StopRequest(said.append) as request:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
    assert request.is_asked
    assert len(said) == 1


def test_stop_request_other_signal_while_the_first_is_handled_interrupts() -> None:
    with (
        StopRequest(lambda _: os.kill(os.getpid(), signal.SIGTERM)) as request,
        pytest.raises(KeyboardInterrupt),
    ):
        os.kill(os.getpid(), signal.SIGINT)
    assert request.is_asked


def test_stop_request_left_gives_the_handlers_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopRequest(lambda _: None):
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_stop_request_left_gives_back_the_default_for_a_handler_of_c_and_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_handler = signal.signal
    found = {number: signal.getsignal(number) for number in stop.SIGNALS}

    def set_over_c(number: signal.Signals, handler: Any) -> Any:
        before = set_handler(number, handler)
        return None if number is signal.SIGINT else before

    try:
        with monkeypatch.context() as patch:
            patch.setattr(signal, "signal", set_over_c)
            with StopRequest(lambda _: None):
                pass
        expected = found | {signal.SIGINT: signal.SIG_DFL}
        assert {number: signal.getsignal(number) for number in stop.SIGNALS} == expected
    finally:
        for number, handler in found.items():
            set_handler(number, handler)


def test_stop_request_outside_the_main_thread_catches_nothing() -> None:
    caught: list[bool] = []

    def enter() -> None:
        before = signal.getsignal(signal.SIGINT)
        with StopRequest(lambda _: None):
            caught.append(signal.getsignal(signal.SIGINT) is before)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert caught == [True]
