"""The signal pad of a host: numbers in shared memory by which its ranks say when bytes may be read or overwritten.

`peer_copies` and `shared_ram` use it by `signals`. A rank that offers bytes writes the collective's number as `ready`
for each reader. Before it overwrites them it waits until each reader has written the same number as `done`.

Threads: one thread at a time moves bytes. Any thread may call `abort`.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from enum import IntEnum

import numpy as np

from megatier import _native
from megatier.ranks.peer_monitor import TICK_S

NUMBER_BYTES = 4
OFFSET_BYTES = 8
OFFSET_BITS = 44
OFFSET_NUMBER_RANGE = 2 ** (63 - OFFSET_BITS)
"""In the high bits above an offset, numbers of collectives wrap around after so many."""
PAUSE_MIN_S = 20e-6
PAUSE_MAX_S = 1e-3
"""Shortest and longest pause of a host between two looks at the pad. Each look takes the interpreter's lock."""
NUMBER_RANGE = 2**32
"""Numbers of rounds wrap around after so many, which a fast host reaches within weeks."""
HALF_RANGE = 2**31
"""A number counts as greater than another if it is less than this ahead of it."""
ABORT_LEAD = 2**30
"""`abort` writes a number that is this far ahead of the awaited one: no round gets there, but it counts as greater."""
Check = Callable[[float], None]
"""Raises if a rank has failed; see `PeerMonitor.check`."""


class Signal(IntEnum):
    """What a number on the pad says about a collective."""

    READY = 0
    DONE = 1


class SignalPad:
    """The numbers that the ranks of a host write for each other, at the start of shared memory."""

    def __init__(self, memory: mmap.mmap | bytearray, rank: int, size: int) -> None:
        """Use the start of shared memory, which is zero at first.

        Args:
            memory: the memory that all ranks have mapped, at least `num_bytes` of it.
            rank: this rank.
            size: the number of ranks.
        """
        self.rank = rank
        """This rank."""
        self._size = size

        count = size * len(Signal) * size
        numbers = np.frombuffer(memory, dtype=np.uint32, count=count)
        self.numbers = numbers.reshape(size, len(Signal), size)
        """All signals, modulo NUMBER_RANGE: uint32 [reader, signal, writer]."""
        self.awaited = 0
        """The number that this rank has waited for last."""
        self.is_aborted = False
        """Whether `abort` has ended the waits of this rank."""

        offsets = np.frombuffer(memory, dtype=np.int64, count=2 * size, offset=numbers.nbytes)
        self._offsets = offsets.reshape(size, 2)
        """Offsets of each rank's bytes in the last two collectives, with the collective's number above OFFSET_BITS."""

    @staticmethod
    def num_bytes(size: int) -> int:
        """Return the bytes of a pad for so many ranks."""
        return size * (len(Signal) * size * NUMBER_BYTES + 2 * OFFSET_BYTES)

    def address(self, reader: int, signal: Signal, writer: int) -> int:
        """Return the address of a signal, which the CUDA driver takes."""
        # Laid out as in `numbers`, of which the driver knows nothing.
        index = (reader * len(Signal) + signal) * self._size + writer
        return int(self.numbers.ctypes.data) + index * NUMBER_BYTES

    def write(self, reader: int, signal: Signal, number: int) -> None:
        """Write a signal for another rank."""
        self.numbers[reader, signal, self.rank] = number % NUMBER_RANGE

    def has_come(self, writer: int, signal: Signal, number: int) -> bool:
        """Return whether another rank has written this number, or a greater one, for this rank."""
        lead = int(self.numbers[self.rank, signal, writer]) - number
        return lead % NUMBER_RANGE < HALF_RANGE

    def exchange_offsets(self, number: int, offset: int, check: Check) -> list[int]:
        """Wait until all ranks have come to a collective, and return the offsets of their bytes.

        No rank is two collectives ahead of another, so the pad has the offsets of the last two.

        Args:
            number: the number of the collective, one more than that of the last.
            offset: the offset of this rank's bytes.
            check: raises if a rank has failed; see `PeerMonitor.check`.
        """
        # This is one store of 8 bytes, so no rank sees the number without the offset.
        short_number = number % OFFSET_NUMBER_RANGE
        column = self._offsets[:, number % 2]
        column[self.rank] = short_number << OFFSET_BITS | offset

        def have_come() -> bool:
            numbers = column >> OFFSET_BITS
            return bool((numbers == short_number).all())

        self.wait(have_come, check)
        offset_mask = (1 << OFFSET_BITS) - 1
        offsets = column & offset_mask
        return [int(offset) for offset in offsets]

    def wait(self, holds: Callable[[], bool], check: Check) -> None:
        """Wait until a condition holds that other ranks bring about by writing here.

        Args:
            holds: returns whether the condition holds.
            check: raises if a rank has failed.
        """
        pause = _native.Latch()
        pause_s = PAUSE_MIN_S
        waited_s = 0.0
        while not holds():
            pause.wait(pause_s)
            waited_s += pause_s

            # Other ranks mostly come within microseconds. Longer pauses leave the interpreter to other threads.
            pause_s = min(2 * pause_s, PAUSE_MAX_S)
            if waited_s > TICK_S:
                check(waited_s)
                waited_s = 0.0

    def abort(self) -> None:
        """End all waits of this rank."""
        self.is_aborted = True

        # A store of the host needs no stream. All streams may be waiting.
        self.numbers[self.rank] = (self.awaited + ABORT_LEAD) % NUMBER_RANGE
