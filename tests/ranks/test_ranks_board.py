"""Board: numbers in memory that ranks share, waits for them, and memory that nobody else can open."""

from __future__ import annotations

import os
import re
import stat
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_pool import POOL

from megatier.errors import StepAbandonedError
from megatier.ranks.board import NUMBERS, OFFSET_BITS, OPEN, Board, HostSigns, Sign, StreamSigns, share_memory
from megatier.ranks.rendezvous import joined

SIZE = 3


def unmet(waited_s: float) -> None:
    raise AssertionError(f"nobody came for {waited_s} s")


def test_board_gives_each_number_a_place_of_its_own() -> None:
    board = Board(bytearray(Board.num_bytes(SIZE)), 1, SIZE)
    places = {board.place(reader, sign, writer) for reader in range(SIZE) for sign in Sign for writer in range(SIZE)}
    assert len(places) == board.numbers.size == SIZE * len(Sign) * SIZE
    assert min(places) == board.numbers.ctypes.data
    assert board.numbers.dtype == np.int32 and np.iinfo(np.int32).max == OPEN


def test_meeting_gives_offsets_of_all_also_where_numbers_begin_again_and_asks_who_failed() -> None:
    memory = bytearray(Board.num_bytes(2))
    boards = [Board(memory, rank, 2) for rank in range(2)]
    large = 2**OFFSET_BITS - 1
    for number in (1, 2, 3, NUMBERS - 1, NUMBERS, NUMBERS + 1):
        with pytest.raises(AssertionError, match="nobody came"):
            boards[0].meet(number, number, unmet)
        assert boards[1].meet(number, large, lambda _: None) == [number, large]
        assert boards[0].meet(number, number, lambda _: None) == [number, large]


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


def mapped() -> set[str]:
    """The addresses of shared memory that this process has mapped."""
    maps = re.findall(r".*memfd:megatier.*", Path("/proc/self/maps").read_text())
    return {line.split()[0] for line in maps}


def share(num_bytes: int) -> tuple[bytes, bytes, list[str], int]:
    """Write a byte for each rank into shared memory; what it holds before and then, the names of it, and its mode."""
    with joined("cpu") as ranks:
        assert ranks is not None
        # A process of the pool may still have what a failure of an earlier test holds.
        others = mapped()
        memory = share_memory(ranks, num_bytes)
        before = memory[-ranks.size :]
        ranks.gather_objects(0)
        memory[num_bytes - 1 - ranks.rank] = 7 + ranks.rank
        ranks.gather_objects(0)
        named = [path.name for path in Path("/dev/shm").iterdir() if "megatier" in path.name]
        (entry,) = mapped() - others
        mode = stat.S_IMODE((Path("/proc/self/map_files") / entry).stat().st_mode) if os.geteuid() == 0 else 0o600
        return before, memory[-ranks.size :], named, mode


def test_shared_memory_is_the_same_for_all_ranks_and_has_no_name() -> None:
    found = POOL.run(share, SIZE, 8192)
    assert found == [(bytes(3), bytes([9, 8, 7]), [], 0o600)] * SIZE


def share_nothing(what: str) -> str:
    """What memory says that cannot be had on one rank."""
    with joined("cpu") as ranks, pytest.MonkeyPatch.context() as patch:
        assert ranks is not None
        if what == "room" and ranks.rank == 0:
            patch.setattr("megatier.ranks.board.os.posix_fallocate", _refuse)
        if what == "open" and ranks.rank == 1:
            patch.setattr("megatier.ranks.board.os.open", _refuse)
        with pytest.raises(OSError) as error:
            share_memory(ranks, 8192)
        return str(error.value)


def _refuse(*_: object) -> None:
    raise OSError("none left")


@pytest.mark.parametrize("what", ["room", "open"])
def test_shared_memory_that_one_rank_cannot_have_is_an_error_of_all(what: str) -> None:
    assert POOL.run(share_nothing, 2, what) == ["none left"] * 2


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
