"""Pulls: what ranks read from each other's memory, in the right order, and how a wait for a rank that failed ends."""

from __future__ import annotations

import random
import time
import unittest.mock
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_pool import POOL

from megatier.ranks.pulls import OFFSET_BITS, OPEN, TURNS, Board, Pulls, Sign, StreamSigns
from megatier.ranks.ranks import Ranks, joined
from megatier.workers import Workers

MEMORY_BYTES = 4096
SIZE = 3
ROUNDS = 40


class HostSigns:
    """Signs that the host writes and waits for, in the place of a stream."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.waits = 0

    def write(self, peer: int, sign: Sign, number: int) -> None:
        self.board.numbers[peer, sign, self.board.rank] = number

    def wait(self, peer: int, sign: Sign, number: int) -> None:
        while self.board.numbers[self.board.rank, sign, peer] < number:
            self.waits += 1
            time.sleep(0)

    def meet(self, number: int, offset: int) -> list[int]:
        return self.board.meet(number, offset, self.check)

    def check(self, waited_s: float) -> None:
        raise AssertionError(f"nobody came for {waited_s} s")

    def release(self) -> None:
        self.board.release()

    def close(self) -> None:
        pass


def opened(ranks: Ranks, folder: Path) -> tuple[Pulls, torch.Tensor, HostSigns]:
    """The pulls of this rank by memory of the host, which all ranks map; its own memory, and its signs."""
    names = [str(folder / f"memory {rank}") for rank in range(ranks.size)]
    memories = [torch.from_file(name, shared=True, size=MEMORY_BYTES, dtype=torch.uint8) for name in names]
    board = Board(folder.name, ranks.rank, ranks.size)
    ranks.agree(0)
    Board.unlink(folder.name)
    signs = HostSigns(board)
    return Pulls(ranks.rank, memories, signs), memories[ranks.rank], signs


def content(rank: int, number: int, num_bytes: int) -> torch.Tensor:
    """What a rank has in a collective."""
    return torch.arange(num_bytes).mul(7).add(50 * rank + number).to(torch.uint8)


def pull_in_turn(folder: Path) -> int:
    """Gather and scatter, with sources at other places on each rank and delays; count what came wrong."""
    wrong = 0
    with joined("cpu") as ranks:
        assert ranks is not None
        pulls, memory, _ = opened(ranks, folder)
        chance = random.Random(ranks.rank)
        for number in range(ROUNDS):
            is_gather = number % 2 == 0
            size = 96 if is_gather else 96 * ranks.size
            first = chance.randrange(MEMORY_BYTES - size)
            time.sleep(chance.choice((0, 0, 0.002)))

            # Each writes over what others may have been reading: this must not begin before they are done.
            source = memory[first : first + size]
            source.copy_(content(ranks.rank, number, size))
            target = torch.empty(96 * ranks.size, dtype=torch.uint8)
            (pulls.gather if is_gather else pulls.scatter)(target, source)
            memory.fill_(255)

            start = 0 if is_gather else 96 * ranks.rank
            expected = [content(rank, number, size)[start : start + 96] for rank in range(ranks.size)]
            wrong += not torch.equal(target, torch.cat(expected))
    return wrong


def test_pulls_with_delays_bring_each_piece_and_leave_sources_until_all_have_them(tmp_path: Path) -> None:
    assert POOL.run(pull_in_turn, SIZE, tmp_path) == [0] * SIZE


def wait_for_nobody(folder: Path) -> bool:
    """Wait for a rank that never comes, and end it by a release; return whether the wait had begun before."""
    with joined("cpu") as ranks:
        assert ranks is not None
        _, memory, signs = opened(ranks, folder)
        if ranks.rank:
            return True

        pulls = Pulls(0, [memory] * ranks.size, signs)
        with closing(Workers(1, "release")) as workers, unittest.mock.patch.object(signs, "meet", lambda *_: [0, 0]):
            workers.submit(partial(release_later, pulls, signs))
            pulls.gather(torch.empty(64 * ranks.size, dtype=torch.uint8), memory[:64])
        return signs.waits > 0


def release_later(pulls: Pulls, signs: HostSigns) -> None:
    """Release the waits once one of them has begun."""
    while not signs.waits:
        time.sleep(0.001)
    pulls.release()


def test_release_ends_waits_for_a_rank_that_does_not_come(tmp_path: Path) -> None:
    assert POOL.run(wait_for_nobody, 2, tmp_path) == [True, True]


def test_source_outside_of_the_shared_memory_is_refused() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    pulls = Pulls(0, [memory], HostSigns.__new__(HostSigns))
    with pytest.raises(AssertionError, match="others cannot see"):
        pulls.gather(torch.empty(8, dtype=torch.uint8), torch.empty(8, dtype=torch.uint8))


def test_board_gives_each_number_a_place_of_its_own(tmp_path: Path) -> None:
    board = Board(tmp_path.name, 1, SIZE)
    Board.unlink(tmp_path.name)
    places = {board.place(reader, sign, writer) for reader in range(SIZE) for sign in Sign for writer in range(SIZE)}
    assert len(places) == board.numbers.size == SIZE * len(Sign) * SIZE
    assert min(places) == board.numbers.ctypes.data
    assert board.numbers.dtype == np.int32 and np.iinfo(np.int32).max == OPEN


def test_meeting_gives_offsets_of_all_also_where_numbers_begin_again_and_asks_who_failed(tmp_path: Path) -> None:
    boards = [Board(tmp_path.name, rank, 2) for rank in range(2)]
    Board.unlink(tmp_path.name)
    large = 2**OFFSET_BITS - 1
    for number in (1, 2, 3, TURNS - 1, TURNS, TURNS + 1):
        with pytest.raises(AssertionError, match="nobody came"):
            boards[0].meet(number, number, HostSigns(boards[0]).check)
        assert boards[1].meet(number, large, lambda _: None) == [number, large]
        assert boards[0].meet(number, number, lambda _: None) == [number, large]


@pytest.mark.gpu
def test_stream_waits_for_a_number_that_is_written_later_and_for_a_release(tmp_path: Path) -> None:
    board = Board(tmp_path.name, 0, 1)
    Board.unlink(tmp_path.name)
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
