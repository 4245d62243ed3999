"""Board: numbers in memory that ranks share, and meetings there."""

from __future__ import annotations

import numpy as np
import pytest

from megatier.ranks.board import NUMBER_RANGE, NUMBERS, OFFSET_BITS, Board, Sign

SIZE = 3


def unmet(waited_s: float) -> None:
    raise AssertionError(f"nobody came for {waited_s} s")


def test_board_gives_each_number_a_place_of_its_own() -> None:
    board = Board(bytearray(Board.num_bytes(SIZE)), 1, SIZE)
    places = {board.place(reader, sign, writer) for reader in range(SIZE) for sign in Sign for writer in range(SIZE)}
    assert len(places) == board.numbers.size == SIZE * len(Sign) * SIZE
    assert min(places) == board.numbers.ctypes.data
    assert np.iinfo(board.numbers.dtype).max == NUMBER_RANGE - 1


def test_meeting_gives_offsets_of_all_also_where_numbers_begin_again_and_asks_who_failed() -> None:
    memory = bytearray(Board.num_bytes(2))
    boards = [Board(memory, rank, 2) for rank in range(2)]
    large = 2**OFFSET_BITS - 1
    for number in (1, 2, 3, NUMBERS - 1, NUMBERS, NUMBERS + 1):
        with pytest.raises(AssertionError, match="nobody came"):
            boards[0].meet(number, number, unmet)
        assert boards[1].meet(number, large, lambda _: None) == [number, large]
        assert boards[0].meet(number, number, lambda _: None) == [number, large]
