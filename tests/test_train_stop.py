from __future__ import annotations

import os
import signal
import threading

import pytest

from megatier.train.stop import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stop_request_signal_is_noted_and_the_second_one_interrupts(number: signal.Signals) -> None:
    said: list[str] = []
    signal.signal(number, signal.default_int_handler)  # a shell may have started this process with SIGINT ignored
    with StopRequest(said.append) as stop:
        os.kill(os.getpid(), number)
        assert stop.is_asked
        assert said == ["stopping after this step, with a checkpoint; once more to stop at once"]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)


def test_stop_request_second_signal_while_the_first_is_handled_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    real = StopRequest._restore

    def restore(self: StopRequest) -> None:
        monkeypatch.undo()
        os.kill(os.getpid(), signal.SIGTERM)
        real(self)

    monkeypatch.setattr(StopRequest, "_restore", restore)
    with StopRequest(lambda _: None) as stop, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.is_asked


def test_stop_request_left_gives_the_handlers_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopRequest(lambda _: None):
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


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
