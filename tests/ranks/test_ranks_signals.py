"""Signals: numbers that hosts and streams write for other ranks, and wait for."""

from __future__ import annotations

import time

import pytest
import torch

from megatier.errors import StepAbandonedError
from megatier.ranks.signal_pad import NUMBER_RANGE, Signal, SignalPad
from megatier.ranks.signals import HostSignals, StreamSignals


def given_up(waited_s: float) -> None:
    raise StepAbandonedError("given up")


FIRST_NUMBERS = (3, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**33 + 2**31)
"""Numbers from which a count goes on, also where 31 and 32 bits end."""


@pytest.mark.parametrize("first", FIRST_NUMBERS)
def test_wait_of_a_host_that_is_aborted_raises_why(first: int) -> None:
    memory = bytearray(SignalPad.num_bytes(2))
    signals = HostSignals(SignalPad(memory, 0, 2), given_up)
    others = HostSignals(SignalPad(memory, 1, 2), given_up)
    others.write(0, Signal.READY, first)
    signals.wait(1, Signal.READY, first - 1)
    signals.wait(1, Signal.READY, first)
    with pytest.raises(StepAbandonedError):
        signals.wait(1, Signal.READY, first + 1)

    others.write(0, Signal.READY, first + 1)
    signals.wait(1, Signal.READY, first + 1)
    signals.abort()
    with pytest.raises(StepAbandonedError):
        signals.wait(1, Signal.READY, first + 2)


@pytest.mark.parametrize("first", FIRST_NUMBERS)
def test_abort_of_a_pad_is_ahead_of_all_that_a_rank_may_wait_for_also_if_it_is_called_again(first: int) -> None:
    pad = SignalPad(bytearray(SignalPad.num_bytes(2)), 0, 2)
    pad.numbers[:] = first % NUMBER_RANGE
    pad.awaited = first
    for _ in range(8):
        pad.abort()
        for number in (first - 2**20, first, first + 2**20):
            assert pad.has_come(1, Signal.DONE, number)


@pytest.mark.gpu
@pytest.mark.parametrize("first", [1, *FIRST_NUMBERS])
def test_stream_waits_for_a_number_that_is_written_later_and_for_an_abort(first: int) -> None:
    pad = SignalPad(bytearray(4096), 0, 1)
    pad.numbers[:] = (first - 1) % NUMBER_RANGE
    signals = StreamSignals(pad, lambda _: None)
    waiting = torch.cuda.Stream()
    over = torch.cuda.Event()
    with torch.cuda.stream(waiting):
        signals.wait(0, Signal.READY, first)
        over.record()
    time.sleep(0.05)
    assert not over.query()

    with torch.cuda.stream(torch.cuda.Stream()):
        signals.write(0, Signal.READY, first)
    over.synchronize()
    assert pad.numbers[0, Signal.READY, 0] == first % NUMBER_RANGE

    with torch.cuda.stream(waiting):
        signals.wait(0, Signal.READY, first + 1)
    signals.abort()
    waiting.synchronize()
    signals.close()
