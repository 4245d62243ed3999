"""SignalPad: numbers in memory that ranks share, and meetings there."""

from __future__ import annotations

import numpy as np
import pytest

from megatier.ranks.signal_pad import NUMBER_RANGE, OFFSET_BITS, OFFSET_NUMBER_RANGE, Signal, SignalPad

SIZE = 3


def unmet(waited_s: float) -> None:
    raise AssertionError(f"nobody came for {waited_s} s")


def test_board_gives_each_number_a_place_of_its_own() -> None:
    pad = SignalPad(bytearray(SignalPad.num_bytes(SIZE)), 1, SIZE)
    places = {
        pad.address(reader, signal, writer) for reader in range(SIZE) for signal in Signal for writer in range(SIZE)
    }
    assert len(places) == pad.numbers.size == SIZE * len(Signal) * SIZE
    assert min(places) == pad.numbers.ctypes.data
    assert np.iinfo(pad.numbers.dtype).max == NUMBER_RANGE - 1


def test_meeting_gives_offsets_of_all_also_where_numbers_begin_again_and_asks_who_failed() -> None:
    memory = bytearray(SignalPad.num_bytes(2))
    pads = [SignalPad(memory, rank, 2) for rank in range(2)]
    large = 2**OFFSET_BITS - 1
    for number in (1, 2, 3, OFFSET_NUMBER_RANGE - 1, OFFSET_NUMBER_RANGE, OFFSET_NUMBER_RANGE + 1):
        with pytest.raises(AssertionError, match="nobody came"):
            pads[0].exchange_offsets(number, number, unmet)
        assert pads[1].exchange_offsets(number, large, lambda _: None) == [number, large]
        assert pads[0].exchange_offsets(number, number, lambda _: None) == [number, large]
