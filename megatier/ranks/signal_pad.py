"""The signal pad of a host: numbers in shared memory by which its ranks say when bytes may be read or overwritten.

`peer_copies` and `shared_ram` use it by `signals`. A rank that offers bytes writes the collective's number as `ready`
for each reader. Before it overwrites them it waits until each reader has written the same number as `done`.

Threads: one thread at a time moves bytes. Any thread may call `release`.
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
NUMBERS = 2 ** (63 - OFFSET_BITS)
"""Numbers of collectives begin again after so many, where they stand above an offset."""
PAUSE_MIN_S = 20e-6
PAUSE_MAX_S = 1e-3
"""How long a host looks away from the pad while it waits for another. Each look takes the interpreter's lock."""
NUMBER_RANGE = 2**32
"""Numbers of rounds begin again after so many. A fast host gets there within weeks."""
HALF_RANGE = 2**31
"""A number is the greater one if it is less than this ahead of another."""
RELEASE_LEAD = 2**30
"""How far ahead of a number that is waited for a release writes: no round gets there, and it is still the greater."""
Check = Callable[[float], None]
"""Raises if a rank has failed; see `PeerMonitor.check`."""


class Signal(IntEnum):
    """The meaning of a number about a collective."""

    READY = 0
    DONE = 1


class SignalPad:
    """The numbers that the ranks of a host show each other, at the start of memory that they share."""

    def __init__(self, memory: mmap.mmap | bytearray, rank: int, size: int) -> None:
        """Find the pad in memory that is zero at first.

        Args:
            memory: what all ranks have mapped, at least `num_bytes` of it.
            rank: this rank.
            size: the number of ranks.
        """
        self.rank = rank
        """This rank."""
        self._size = size

        count = size * len(Signal) * size
        numbers = np.frombuffer(memory, dtype=np.uint32, count=count)
        self.numbers = numbers.reshape(size, len(Signal), size)
        """All numbers that ranks write, modulo NUMBER_RANGE: uint32 [reader, signal, writer]."""
        self.awaited = 0
        """The number that this rank waited for last."""
        self.is_released = False
        """Whether the waits of this rank were ended."""

        offsets = np.frombuffer(memory, dtype=np.int64, count=2 * size, offset=numbers.nbytes)
        self._offsets = offsets.reshape(size, 2)
        """Where the bytes of each rank lie in the last two collectives, with the numbers of these above OFFSET_BITS."""

    @staticmethod
    def num_bytes(size: int) -> int:
        """Return the bytes of the pad of so many ranks."""
        return size * (len(Signal) * size * NUMBER_BYTES + 2 * OFFSET_BYTES)

    def place(self, reader: int, signal: Signal, writer: int) -> int:
        """Return the address of a number."""
        # As `numbers` lies in memory. A driver takes an address, and no array.
        index = (reader * len(Signal) + signal) * self._size + writer
        return int(self.numbers.ctypes.data) + index * NUMBER_BYTES

    def write(self, reader: int, signal: Signal, number: int) -> None:
        """Write a number for another rank."""
        self.numbers[reader, signal, self.rank] = number % NUMBER_RANGE

    def has_come(self, writer: int, signal: Signal, number: int) -> bool:
        """Return whether another rank has written this number for this one, or a greater one."""
        lead = int(self.numbers[self.rank, signal, writer]) - number
        return lead % NUMBER_RANGE < HALF_RANGE

    def meet(self, number: int, offset: int, check: Check) -> list[int]:
        """Tell where this rank's bytes lie, and return where those of all lie, once all have come to this collective.

        No rank is two collectives ahead of another, so the last two are enough.

        Args:
            number: of the collective, one more than that of the last.
            offset: of this rank's bytes.
            check: raises if a rank has failed; see `PeerMonitor.check`.
        """
        # One store of 8 bytes: no rank sees the number without the offset.
        short_number = number % NUMBERS
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
        """Wait until something holds that other ranks write here.

        Args:
            holds: looks whether it does.
            check: raises if a rank has failed.
        """
        pause = _native.Latch()
        pause_s = PAUSE_MIN_S
        waited_s = 0.0
        while not holds():
            pause.wait(pause_s)
            waited_s += pause_s

            # Mostly the others come within microseconds. Longer pauses leave the interpreter to other threads.
            pause_s = min(2 * pause_s, PAUSE_MAX_S)
            if waited_s > TICK_S:
                check(waited_s)
                waited_s = 0.0

    def release(self) -> None:
        """End all waits of this rank."""
        self.is_released = True

        # A plain store of the host, which needs no stream: those may all be waiting.
        self.numbers[self.rank] = (self.awaited + RELEASE_LEAD) % NUMBER_RANGE
