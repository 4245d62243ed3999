"""Pulls: each GPU of a host reads the memory of the others by its copy engines.

Copy engines take no multiprocessors from the products that run meanwhile; the kernels of a library for collectives do.
All ranks allocate the memory of their GPU tier together (`SharedMemory`), so that each GPU sees that of all others. A
collective is then a few copies, and two numbers that say when they may begin and when they are over:

1. A rank's stream writes the collective's number as `ready` for each other rank: the bytes it is asked for are there.
2. It waits for the same of each other rank, and copies what it needs from there.
3. It writes the number as `done` for that rank, and goes on when all others have done so: its own bytes may change.

The numbers lie in RAM that the ranks share (`Board`). Streams write them and wait for them without a kernel, and the
host can let every stream go on that waits for a rank that has failed. No host waits for a GPU. Hosts wait for each
other before each collective, because each has to tell where its bytes lie.

The way to move bytes is that of PyTorch's symmetric memory and of NCCL's collectives by copy engines (`ce_coll.cc`).

Threads: one thread at a time pulls. `release` may be called from any thread.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from megatier import _native
from megatier.errors import MegatierError
from megatier.hardware import CUDA_DRIVER
from megatier.ranks.peers import TICK_S

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SHARED_RAM = Path("/dev/shm")
TRIAL_BYTES = 4096
TRIAL_S = 10.0
"""How long a trial may take. It takes less than a millisecond."""
NUMBER_BYTES = 4
OFFSET_BYTES = 8
OFFSET_BITS = 44
TURNS = 2 ** (63 - OFFSET_BITS)
"""Numbers of collectives begin again after so many, where they stand above an offset."""
PAUSE_MIN_S = 20e-6
PAUSE_MAX_S = 1e-3
"""How long a host looks away from the board while it waits for another. Each look takes the interpreter's lock."""
OPEN = 2**31 - 1
"""A number that no collective reaches: whoever waits goes on."""
GREATER_OR_EQUAL = 0
"""What a stream waits for, to the driver: CU_STREAM_WAIT_VALUE_GEQ."""


def hindrance(local_rank: int, local_size: int) -> str | None:
    """Why this rank's GPU cannot read the memory of the others of its host; None if it can."""
    if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
        return "NCCL_P2P_DISABLE is set"
    others = (gpu for gpu in range(local_size) if gpu != local_rank)
    hidden = [gpu for gpu in others if not torch.cuda.can_device_access_peer(local_rank, gpu)]
    return f"GPU {local_rank} cannot read the memory of GPU {hidden[0]}" if hidden else None


def allocate(num_bytes: int) -> torch.Tensor:
    """Memory of this rank's GPU that others can map: uint8 [num_bytes], zeros.

    Raises:
        torch.OutOfMemoryError: the GPU has no room.
    """
    import torch.distributed._symmetric_memory as symmetric

    # Nothing is sent to several GPUs at once here, so nothing of that kind has to be set up.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    try:
        memory = symmetric.empty(num_bytes, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device()))
    except RuntimeError as error:
        raise torch.OutOfMemoryError(str(error)) from error

    # torch's pool does not know of this memory, so its limit is lowered by as much.
    total_bytes = torch.cuda.mem_get_info()[1]
    if (share := torch.cuda.get_per_process_memory_fraction()) < 1:
        torch.cuda.set_per_process_memory_fraction(max(0.0, share - num_bytes / total_bytes))

    return memory.zero_()


def views(memory: torch.Tensor, group: ProcessGroup) -> list[torch.Tensor]:
    """The memory of every rank as this one sees it, in the order of the ranks. Every rank has to call it."""
    import torch.distributed._symmetric_memory as symmetric

    shared = symmetric.rendezvous(memory, group)
    found = [shared.get_buffer(rank, memory.shape, memory.dtype) for rank in range(shared.world_size)]
    found[shared.rank] = memory
    return found


class Sign(IntEnum):
    """What a number says of a collective."""

    READY = 0
    DONE = 1


class Signs(Protocol):
    """Numbers that a rank's stream writes for other ranks, and waits for."""

    def write(self, peer: int, sign: Sign, number: int) -> None:
        """Write a number for another rank, when the current stream gets here."""

    def wait(self, peer: int, sign: Sign, number: int) -> None:
        """Let the current stream wait until another rank has written this number for this one, or a greater one."""

    def meet(self, number: int, offset: int) -> list[int]:
        """Return the offsets that all ranks give for this number, in their order, once all have come to it."""

    def release(self) -> None:
        """End all waits of this rank. Another rank may still write an older number, so it is called again and again."""

    def close(self) -> None:
        """Give back what they hold. No stream waits any more."""


class Pulls:
    """What one rank reads from the memory of the others."""

    def __init__(self, rank: int, memories: Sequence[torch.Tensor], signs: Signs) -> None:
        """Take what all ranks have shared.

        Args:
            rank: this rank.
            memories: the memory of each rank as this one sees it, uint8. What others read from this rank lies in its
                own.
            signs: the numbers.
        """
        self._rank = rank
        self._memories = memories
        self._signs = signs
        self._number = 0

        # Each rank begins with the one after it, so no two read from the same one at the same time.
        size = len(memories)
        self._others = [(rank + distance) % size for distance in range(1, size)]

    def gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """Bring the shards of all ranks together, in the order of the ranks.

        Args:
            whole: uint8 [size * n], overwritten.
            own: uint8 [n], this rank's shard, in its shared memory.
        """
        self._pull(whole, own, 0)

    def scatter(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Give every rank its shard of this rank's bytes, and take this rank's shard of the bytes of all.

        Args:
            received: uint8 [size * n], overwritten: piece r is what rank r sent.
            sent: uint8 [size * n], in this rank's shared memory: piece r goes to rank r.
        """
        self._pull(received, sent, self._rank * (received.numel() // len(self._memories)))

    def work(self) -> bool:
        """Gather a few bytes of the memory, which change, and return whether they are right, and come in time.

        Some hosts let a GPU read another one's memory, and give it other bytes.
        """
        own = self._memories[self._rank][:TRIAL_BYTES]
        before = own.clone()
        own.fill_(self._rank + 1)
        whole = torch.zeros(len(self._memories) * TRIAL_BYTES, dtype=torch.uint8, device=own.device)
        torch.cuda.synchronize()

        self.gather(whole, own)
        deadline = time.monotonic() + TRIAL_S
        while not torch.cuda.current_stream().query():
            if time.monotonic() > deadline:
                return False
        own.copy_(before)
        torch.cuda.synchronize()
        rows = whole.view(len(self._memories), -1).tolist()
        return all(set(row) == {number + 1} for number, row in enumerate(rows))

    def release(self) -> None:
        """Let every stream go on that waits for another rank; see `Signs`. What it reads is worth nothing then."""
        self._signs.release()

    def close(self) -> None:
        """Give back what the signs hold. No stream pulls any more."""
        self._signs.close()

    def _pull(self, target: torch.Tensor, source: torch.Tensor, start: int) -> None:
        """Fill piece r of the target from the source of rank r, from byte `start` of the source on."""
        memory = self._memories[self._rank]
        offset = source.data_ptr() - memory.data_ptr()
        assert 0 <= offset <= memory.numel() - source.numel(), "others cannot see these bytes"

        # The slot that a block has may differ from rank to rank, since slots are given back at different times.
        self._number += 1
        offsets = self._signs.meet(self._number, offset)
        pieces = target.view(len(self._memories), -1)
        for peer in self._others:
            self._signs.write(peer, Sign.READY, self._number)

        size = pieces.shape[1]
        pieces[self._rank].copy_(source[start : start + size], non_blocking=True)
        for peer in self._others:
            self._signs.wait(peer, Sign.READY, self._number)
            first = offsets[peer] + start
            pieces[peer].copy_(self._memories[peer][first : first + size], non_blocking=True)
            self._signs.write(peer, Sign.DONE, self._number)

        for peer in self._others:
            self._signs.wait(peer, Sign.DONE, self._number)


class Board:
    """What the ranks of a host show each other, in RAM that they share."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        """Map the board. Its file may be removed when all ranks have.

        Args:
            name: of its file, the same for all ranks. Whoever comes first makes it.
            rank: this rank.
            size: the number of ranks.

        Raises:
            OSError: the system has no RAM to share.
        """
        self.rank = rank
        """This rank."""
        self._size = size
        num_numbers = size * len(Sign) * size
        num_bytes = num_numbers * NUMBER_BYTES + size * 2 * OFFSET_BYTES
        descriptor = os.open(SHARED_RAM / name, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, num_bytes)
            self._mapping = mmap.mmap(descriptor, num_bytes)
        finally:
            os.close(descriptor)

        self.numbers = np.frombuffer(self._mapping, dtype=np.int32, count=num_numbers).reshape(size, len(Sign), size)
        """All numbers that streams write: int32 [reader, sign, writer]."""
        self._offsets = np.frombuffer(self._mapping, dtype=np.int64, offset=self.numbers.nbytes).reshape(size, 2)
        """Where the bytes of each rank lie in the last two collectives, with the numbers of these above OFFSET_BITS."""

    @staticmethod
    def unlink(name: str) -> None:
        """Remove the file. The board lives as long as it is mapped."""
        (SHARED_RAM / name).unlink(missing_ok=True)

    def place(self, reader: int, sign: Sign, writer: int) -> int:
        """The address of a number."""
        index = (reader * len(Sign) + sign) * self._size + writer
        return int(self.numbers.ctypes.data) + index * NUMBER_BYTES

    def meet(self, number: int, offset: int, check: Callable[[float], None]) -> list[int]:
        """Tell where this rank's bytes lie, and return where those of all lie, once all have come to this collective.

        No rank is two collectives ahead of another, so the last two are enough.

        Args:
            number: of the collective, one more than that of the last.
            offset: of this rank's bytes.
            check: raises if a rank has failed; see `Peers.check`.
        """
        # One store of 8 bytes: no rank sees the number without the offset.
        turn = number % TURNS
        column = self._offsets[:, number % 2]
        column[self.rank] = turn << OFFSET_BITS | offset

        pause = _native.Latch()
        pause_s = PAUSE_MIN_S
        waited_s = 0.0
        while (column >> OFFSET_BITS != turn).any():
            pause.wait(pause_s)
            waited_s += pause_s
            pause_s = min(2 * pause_s, PAUSE_MAX_S)
            if waited_s > TICK_S:
                check(waited_s)
                waited_s = 0.0
        return [int(found) for found in column & (1 << OFFSET_BITS) - 1]

    def release(self) -> None:
        """End all waits of this rank."""
        self.numbers[self.rank] = OPEN


class StreamSigns:
    """Signs that CUDA streams write and wait for."""

    def __init__(self, board: Board, check: Callable[[float], None]) -> None:
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
        driver = ctypes.CDLL(CUDA_DRIVER)
        self._write = driver.cuStreamWriteValue32_v2
        self._wait = driver.cuStreamWaitValue32_v2
        for function in (self._write, self._wait):
            function.argtypes = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint

        self._address = int(board.numbers.ctypes.data)
        cudart = torch.cuda.cudart()
        code = cudart.cudaHostRegister(self._address, board.numbers.nbytes, 0)
        if code != cudart.cudaError.success:
            raise MegatierError(f"CUDA refused to page-lock memory ({cudart.cudaGetErrorString(code)}).")

    def write(self, peer: int, sign: Sign, number: int) -> None:
        """See `Signs`."""
        # The driver puts a memory barrier before it: other GPUs see all that the stream has written so far.
        self._call(self._write, self._board.place(peer, sign, self._board.rank), number, 0)

    def wait(self, peer: int, sign: Sign, number: int) -> None:
        """See `Signs`."""
        self._call(self._wait, self._board.place(self._board.rank, sign, peer), number, GREATER_OR_EQUAL)

    def meet(self, number: int, offset: int) -> list[int]:
        """See `Signs`."""
        return self._board.meet(number, offset, self._check)

    def release(self) -> None:
        """See `Signs`."""
        self._board.release()

    def close(self) -> None:
        """See `Signs`."""
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._address))

    def _call(self, function: Callable[..., int], address: int, number: int, flags: int) -> None:
        code = function(torch.cuda.current_stream().cuda_stream, address, number, flags)
        if code:
            raise MegatierError(f"CUDA refused an operation on a stream (CUresult {code}).")
