"""Reads the memory of the other GPUs of a host by each GPU's copy engines.

Copy engines take no multiprocessors from the products that run meanwhile; the kernels of a library for collectives do.
All ranks allocate the memory of their GPU tier together (`SharedMemory`), so that each GPU sees that of all others. A
collective is then a few copies, and two numbers that say when they may begin and when they are over:

1. A rank's stream writes the collective's number as `ready` for each other rank: the bytes it is asked for are there.
2. It waits for the same of each other rank, and copies what it needs from there.
3. It writes the number as `done` for that rank, and goes on when all others have done so: its own bytes may change.

The numbers lie in RAM that the ranks share (`pad`). Hosts wait for each other before each collective, because each
has to tell where its bytes lie.

The way to move bytes is that of PyTorch's symmetric memory and of NCCL's collectives by copy engines (`ce_coll.cc`).

Threads: one thread at a time peer_copies. `release` may be called from any thread.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from megatier.errors import MegatierError
from megatier.ranks.channel import Channel
from megatier.ranks.collective_backend import TRIAL_BYTES, brings_right_bytes
from megatier.ranks.shared_memory import share_memory
from megatier.ranks.signal_pad import Check, Signal, SignalPad
from megatier.ranks.signals import Signals, StreamSignals

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def why_no_peer_access(local_rank: int, local_size: int) -> str | None:
    """Return why this rank's GPU cannot read the memory of the others of its host; None if it can."""
    # A user who sets this for NCCL knows that copies between GPUs go wrong on this machine.
    if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
        return "NCCL_P2P_DISABLE is set"

    for gpu in range(local_size):
        if gpu != local_rank and not torch.cuda.can_device_access_peer(local_rank, gpu):
            return f"GPU {local_rank} cannot read the memory of GPU {gpu}"
    return None


def allocate(num_bytes: int) -> torch.Tensor:
    """Allocate memory of this rank's GPU that others can map: uint8 [num_bytes], zeros.

    Raises:
        torch.OutOfMemoryError: the GPU has no room.
    """
    import torch.distributed._symmetric_memory as symmetric

    # Nothing is sent to several GPUs at once here, so nothing of that kind has to be set up.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        memory = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise torch.OutOfMemoryError(str(error)) from error

    # torch's pool does not know of this memory, so its limit is lowered by as much.
    change_limit(-num_bytes)
    return memory.zero_()


def change_limit(num_bytes: int) -> None:
    """Let torch's pool take so many bytes more of the GPU, if it has a limit at all."""
    limit = torch.cuda.get_per_process_memory_fraction()
    if limit < 1:
        _, total_bytes = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, limit + num_bytes / total_bytes)))


def open_peer_copies(channel: Channel, group: ProcessGroup, memory: torch.Tensor, check: Check) -> PeerCopies:
    """Share this rank's memory with the others of its host. Every rank has to call it.

    Args:
        channel: by which the ranks find each other.
        group: of gloo, which that channel uses.
        memory: as `allocate` has given it.
        check: raises if a rank has failed; see `PeerMonitor.check`.

    Raises:
        OSError, MegatierError, RuntimeError: the system, CUDA or torch refused it.
        PeerError: a rank has failed.
    """
    shared = share_memory(channel, SignalPad.num_bytes(channel.size))
    signals: StreamSignals | None = None
    try:
        with channel.failing_together():
            signals = StreamSignals(SignalPad(shared, channel.rank, channel.size), check)
        return PeerCopies(channel.rank, views(memory, group), signals)
    except (MegatierError, OSError, RuntimeError):
        if signals is not None:
            signals.close()
        raise


def views(memory: torch.Tensor, group: ProcessGroup) -> list[torch.Tensor]:
    """Return the memory of every rank as this one sees it, in the order of the ranks. Every rank has to call it."""
    import torch.distributed._symmetric_memory as symmetric

    shared = symmetric.rendezvous(memory, group)
    memories = []
    for rank in range(shared.world_size):
        seen = shared.get_buffer(rank, memory.shape, memory.dtype)
        memories.append(seen)

    # A rank's own memory is the tensor that `allocate` gave, by whose addresses `PeerCopies` counts.
    memories[shared.rank] = memory
    return memories


class PeerCopies:
    """The reads of one rank from the memory of the others."""

    def __init__(self, rank: int, memories: Sequence[torch.Tensor], signals: Signals) -> None:
        """Take the memory that all ranks have shared.

        Args:
            rank: this rank.
            memories: the memory of each rank as this one sees it, uint8. What others read from this rank lies in its
                own.
            signals: the numbers.
        """
        self._rank = rank
        self._memories = memories
        self._signals = signals
        self._number = 0

        # Each rank begins with the one after it, so no two read from the same one at the same time.
        size = len(memories)
        self._others = [(rank + distance) % size for distance in range(1, size)]

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """See `CollectiveBackend`. `own` lies in the shared memory of this rank."""
        self._pull(whole, own, 0)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """See `CollectiveBackend`. `sent` lies in the shared memory of this rank."""
        shard_bytes = received.numel() // len(self._memories)
        self._pull(received, sent, self._rank * shard_bytes)

    def work(self) -> bool:
        """Gather a few bytes of the memory; see `brings_right_bytes`."""
        # In the very memory that will be pulled: other memory might be mapped in another way.
        own = self._memories[self._rank][:TRIAL_BYTES]
        before = own.clone()
        if not brings_right_bytes(self, own, self._rank, len(self._memories)):
            return False
        own.copy_(before)
        torch.cuda.synchronize()
        return True

    def release(self) -> None:
        """See `CollectiveBackend`."""
        self._signals.release()

    def close(self) -> None:
        """See `CollectiveBackend`."""
        self._signals.close()

    def _pull(self, target: torch.Tensor, source: torch.Tensor, start: int) -> None:
        """Fill shard r of the target from the source of rank r, from byte `start` of the source on."""
        memory = self._memories[self._rank]
        offset = source.data_ptr() - memory.data_ptr()
        assert 0 <= offset <= memory.numel() - source.numel(), "others cannot see these bytes"

        # The slot that a block has may differ from rank to rank, since slots are given back at different times.
        self._number += 1
        number = self._number
        offsets = self._signals.meet(number, offset)
        for peer in self._others:
            self._signals.write(peer, Signal.READY, number)

        shards = target.view(len(self._memories), -1)
        shard_bytes = shards.shape[1]
        own = source[start : start + shard_bytes]
        shards[self._rank].copy_(own, non_blocking=True)

        for peer in self._others:
            self._signals.wait(peer, Signal.READY, number)
            first = offsets[peer] + start
            theirs = self._memories[peer][first : first + shard_bytes]
            shards[peer].copy_(theirs, non_blocking=True)
            self._signals.write(peer, Signal.DONE, number)

        # The caller's next write to the source is in stream order, so it comes after the reads of all others.
        for peer in self._others:
            self._signals.wait(peer, Signal.DONE, number)
