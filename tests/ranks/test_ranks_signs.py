"""Signs: numbers that hosts and streams write for other ranks, and wait for."""

from __future__ import annotations

import time

import pytest
import torch

from megatier.errors import StepAbandonedError
from megatier.ranks.board import Board, Sign
from megatier.ranks.signs import HostSigns, StreamSigns


def given_up(waited_s: float) -> None:
    raise StepAbandonedError("given up")


def test_wait_of_a_host_that_is_released_raises_why() -> None:
    board = Board(bytearray(Board.num_bytes(2)), 0, 2)
    signs = HostSigns(board, given_up)
    board.numbers[0, Sign.READY, 1] = 3
    signs.wait(1, Sign.READY, 3)
    signs.release()
    with pytest.raises(StepAbandonedError):
        signs.wait(1, Sign.READY, 4)


@pytest.mark.gpu
def test_stream_waits_for_a_number_that_is_written_later_and_for_a_release() -> None:
    board = Board(bytearray(4096), 0, 1)
    signs = StreamSigns(board, lambda _: None)
    waiting = torch.cuda.Stream()
    over = torch.cuda.Event()
    with torch.cuda.stream(waiting):
        signs.wait(0, Sign.READY, 1)
        over.record()
    time.sleep(0.05)
    assert not over.query()

    with torch.cuda.stream(torch.cuda.Stream()):
        signs.write(0, Sign.READY, 1)
    over.synchronize()
    assert board.numbers[0, Sign.READY, 0] == 1

    with torch.cuda.stream(waiting):
        signs.wait(0, Sign.READY, 2)
    signs.release()
    waiting.synchronize()
    signs.close()
