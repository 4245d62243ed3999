"""Shares memory between the ranks of a host, with numbers by which they say when bytes are there.

The memory is a file without a name (`memfd_create`), which the other ranks open by the descriptor of the first. It ends
with the last process that has it, also if all are killed, and no other user can open it.

The code that moves bytes between ranks (`pulls`, `shared_ram`) writes a collective's number as `ready` for each rank
that may take them, and waits for its `done` before they change. CUDA streams write and wait without a kernel
(`StreamSigns`), so no host waits for a GPU. On CPUs the hosts do so themselves (`HostSigns`). A wait for a rank that
has failed is ended by a plain store of the host.

Threads: one thread at a time moves bytes. `release` may be called from any thread.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

import numpy as np
import torch

from megatier import _native
from megatier.errors import MegatierError
from megatier.hardware import CUDA_DRIVER
from megatier.page_lock import PageLock
from megatier.ranks.channel import Channel
from megatier.ranks.peers import TICK_S

TRIAL_BYTES = 4096
TRIAL_S = 10.0
"""How long a trial may take. It takes less than a millisecond."""
NUMBER_BYTES = 4
OFFSET_BYTES = 8
OFFSET_BITS = 44
NUMBERS = 2 ** (63 - OFFSET_BITS)
"""Numbers of collectives begin again after so many, where they stand above an offset."""
PAUSE_MIN_S = 20e-6
PAUSE_MAX_S = 1e-3
"""How long a host looks away from the board while it waits for another. Each look takes the interpreter's lock."""
OPEN = 2**31 - 1
"""A number that no collective reaches: all waits end."""
GREATER_OR_EQUAL = 0
"""What a stream waits for, to the driver: CU_STREAM_WAIT_VALUE_GEQ."""

Check = Callable[[float], None]
"""Raises if a rank has failed; see `Peers.check`."""


class RankCarrier(Protocol):
    """The protocol of whatever moves weights and gradients between ranks in place of torch's collectives."""

    def gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """Bring the shards of all ranks together, in the order of the ranks.

        Args:
            whole: uint8 [size * n], overwritten.
            own: uint8 [n], this rank's shard.
        """

    def scatter(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Give every rank its shard of this rank's bytes, and take this rank's shard of the bytes of all.

        Args:
            received: uint8 [size * n], overwritten: piece r is what rank r sent.
            sent: uint8 [size * n]: piece r goes to rank r.
        """

    def release(self) -> None:
        """Let everybody go on who waits for another rank; see `Signs`. What they read is worth nothing then."""

    def close(self) -> None:
        """Give back what it holds. Nothing moves any more."""


def share_memory(channel: Channel, num_bytes: int) -> mmap.mmap:
    """Map memory that all ranks have. They have to be of one host, and all of them have to call it.

    All of it is taken now, and counts as RAM of the first rank.

    Args:
        channel: by which the ranks find it.
        num_bytes: its size.

    Returns:
        The mapping, zeros.

    Raises:
        OSError: the system has no RAM to share, or does not let one rank open what another has.
        PeerError: a rank has failed.
    """
    made: list[int] = []

    def make() -> tuple[int, int]:
        file = os.memfd_create("megatier", os.MFD_CLOEXEC)
        made.append(file)

        # Ranks open it by its path under /proc, and users other than theirs may not.
        os.fchmod(file, 0o600)

        # Pages that are missing when they are touched end the process.
        os.posix_fallocate(file, 0, num_bytes)
        return os.getpid(), file

    try:
        process, number = channel.from_first(make)

        # If one rank cannot open it, none goes on: the others would wait for that one.
        with channel.together():
            if not made:
                file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
                made.append(file)
            return mmap.mmap(made[0], num_bytes)
    finally:
        # The mapping holds the memory without them.
        for descriptor in made:
            os.close(descriptor)


def brings_right_bytes(carrier: RankCarrier, own: torch.Tensor, rank: int, size: int) -> bool:
    """Gather a few bytes on GPUs, and return whether they are right, and come in time.

    Some hosts let a GPU read another one's memory, and give it other bytes.

    Args:
        carrier: what gathers.
        own: uint8 [TRIAL_BYTES] that others can read, overwritten.
        rank: this rank.
        size: the number of ranks.
    """
    # Of zeros nobody could tell whether they came.
    own.fill_(rank + 1)
    whole = torch.zeros(size * TRIAL_BYTES, dtype=torch.uint8, device=own.device)
    torch.cuda.synchronize()

    carrier.gather(whole, own)

    # A stream that waits for a number which never comes would hold up `synchronize` for ever.
    deadline = time.monotonic() + TRIAL_S
    stream = torch.cuda.current_stream()
    while not stream.query():
        if time.monotonic() > deadline:
            return False

    shards = whole.view(size, -1).tolist()
    return all(set(shard) == {number + 1} for number, shard in enumerate(shards))


class Sign(IntEnum):
    """The meaning of a number about a collective."""

    READY = 0
    DONE = 1


class Signs(Protocol):
    """Numbers that a rank writes for other ranks, and waits for, when its current stream gets there."""

    def write(self, peer: int, sign: Sign, number: int) -> None:
        """Write a number for another rank, which finds all that was written before."""

    def wait(self, peer: int, sign: Sign, number: int) -> None:
        """Wait until another rank has written this number for this one, or a greater one."""

    def meet(self, number: int, offset: int) -> list[int]:
        """Return the offsets that all ranks give for this number, in their order, once all have come to it."""

    def release(self) -> None:
        """End all waits of this rank. Another rank may still write an older number, so it is called again and again."""

    def close(self) -> None:
        """Give back what they hold. No stream waits any more."""


class Board:
    """The numbers that the ranks of a host show each other, at the start of memory that they share."""

    def __init__(self, memory: mmap.mmap | bytearray, rank: int, size: int) -> None:
        """Find the board in memory that is zero at first.

        Args:
            memory: what all ranks have mapped, at least `num_bytes` of it.
            rank: this rank.
            size: the number of ranks.
        """
        self.rank = rank
        """This rank."""
        self._size = size

        count = size * len(Sign) * size
        numbers = np.frombuffer(memory, dtype=np.int32, count=count)
        self.numbers = numbers.reshape(size, len(Sign), size)
        """All numbers that ranks write: int32 [reader, sign, writer]."""

        offsets = np.frombuffer(memory, dtype=np.int64, count=2 * size, offset=numbers.nbytes)
        self._offsets = offsets.reshape(size, 2)
        """Where the bytes of each rank lie in the last two collectives, with the numbers of these above OFFSET_BITS."""

    @staticmethod
    def num_bytes(size: int) -> int:
        """Return the bytes of the board of so many ranks."""
        return size * (len(Sign) * size * NUMBER_BYTES + 2 * OFFSET_BYTES)

    def place(self, reader: int, sign: Sign, writer: int) -> int:
        """Return the address of a number."""
        # As `numbers` lies in memory. A driver takes an address, and no array.
        index = (reader * len(Sign) + sign) * self._size + writer
        return int(self.numbers.ctypes.data) + index * NUMBER_BYTES

    def meet(self, number: int, offset: int, check: Check) -> list[int]:
        """Tell where this rank's bytes lie, and return where those of all lie, once all have come to this collective.

        No rank is two collectives ahead of another, so the last two are enough.

        Args:
            number: of the collective, one more than that of the last.
            offset: of this rank's bytes.
            check: raises if a rank has failed; see `Peers.check`.
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
        # A plain store of the host, which needs no stream: those may all be waiting.
        self.numbers[self.rank] = OPEN


class HostSigns:
    """Signs that the host writes and waits for, on a CPU whose stores others see in their order."""

    def __init__(self, board: Board, check: Check) -> None:
        """Take the board of the host, and what raises if a rank has failed."""
        self._board = board
        self._check = check

    def write(self, peer: int, sign: Sign, number: int) -> None:
        """See `Signs`."""
        self._board.numbers[peer, sign, self._board.rank] = number

    def wait(self, peer: int, sign: Sign, number: int) -> None:
        """See `Signs`.

        Raises:
            PeerError: a rank has failed.
        """
        numbers = self._board.numbers[self._board.rank, sign]
        self._board.wait(lambda: bool(numbers[peer] >= number), self._check)

        # A wait that was ended has brought nothing.
        if numbers[peer] == OPEN:
            self._check(0.0)

    def meet(self, number: int, offset: int) -> list[int]:
        """See `Signs`."""
        return self._board.meet(number, offset, self._check)

    def release(self) -> None:
        """See `Signs`."""
        self._board.release()

    def close(self) -> None:
        """See `Signs`."""


class StreamSigns:
    """Signs that CUDA streams write and wait for."""

    def __init__(self, board: Board, check: Check) -> None:
        """Page-lock the board for the GPU.

        Args:
            board: of the host.
            check: raises if a rank has failed; see `Peers.check`.

        Raises:
            OSError: there is no CUDA driver.
            MegatierError: CUDA refused.
        """
        self._board = board
        self._check = check

        # torch has no call for these two. A signal of its symmetric memory is a kernel, which nobody can end.
        driver = ctypes.CDLL(CUDA_DRIVER)
        self._write = driver.cuStreamWriteValue32_v2
        self._wait = driver.cuStreamWaitValue32_v2
        for function in (self._write, self._wait):
            function.argtypes = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint

        address = int(board.numbers.ctypes.data)
        whole = 0, board.numbers.nbytes
        self._lock = PageLock(address, [whole])

    def write(self, peer: int, sign: Sign, number: int) -> None:
        """See `Signs`."""
        # The driver puts a memory barrier before it: other GPUs see all that the stream has written so far.
        address = self._board.place(peer, sign, self._board.rank)
        self._call(self._write, address, number, 0)

    def wait(self, peer: int, sign: Sign, number: int) -> None:
        """See `Signs`."""
        address = self._board.place(self._board.rank, sign, peer)
        self._call(self._wait, address, number, GREATER_OR_EQUAL)

    def meet(self, number: int, offset: int) -> list[int]:
        """See `Signs`."""
        return self._board.meet(number, offset, self._check)

    def release(self) -> None:
        """See `Signs`."""
        self._board.release()

    def close(self) -> None:
        """See `Signs`."""
        self._lock.close()

    def _call(self, function: Callable[..., int], address: int, number: int, flags: int) -> None:
        stream = torch.cuda.current_stream()
        code = function(stream.cuda_stream, address, number, flags)
        if code:
            raise MegatierError(f"CUDA refused an operation on a stream (CUresult {code}).")
