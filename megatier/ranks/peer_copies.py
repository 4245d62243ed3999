"""Collectives by peer-to-peer copies: each GPU reads the memory of the others of its host by its copy engines.

Copy engines leave the multiprocessors to compute, which the kernels of NCCL do not. The GPU tiers of all ranks are
symmetric memory of torch, so that each GPU can read those of the others. A collective is a few copies between signals:

1. A rank's stream writes the collective's number as `ready` for each other rank, because its bytes are there.
2. It waits for the `ready` of each other rank, and copies what it needs from that rank.
3. It writes the number as `done` for that rank. When all others have written theirs, its own bytes may change.

Signals lie in RAM that the ranks share (`signal_pad`). Hosts wait for each other before each collective, because each
has to say where its bytes lie. NCCL's collectives by copy engines (`ce_coll.cc`) work in the same way.

Threads: one thread at a time calls collectives. Any thread may call `abort`.
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
    """Return why this rank's GPU cannot read the memory of the other GPUs of its host; None if it can."""
    # Users set this for NCCL on machines where copies between GPUs go wrong.
    if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
        return "NCCL_P2P_DISABLE is set"

    for gpu in range(local_size):
        if gpu != local_rank and not torch.cuda.can_device_access_peer(local_rank, gpu):
            return f"GPU {local_rank} cannot read the memory of GPU {gpu}"
    return None


def allocate(num_bytes: int) -> torch.Tensor:
    """Allocate memory of this rank's GPU that other ranks can map: uint8 [num_bytes], zeros.

    Raises:
        torch.OutOfMemoryError: the GPU has no room.
    """
    import torch.distributed._symmetric_memory as symmetric

    # No multicast is used here, so none has to be set up.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        memory = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise torch.OutOfMemoryError(str(error)) from error

    # torch's caching allocator does not count this memory, so its limit shrinks by as much.
    change_limit(-num_bytes)
    return memory.zero_()


def change_limit(num_bytes: int) -> None:
    """Raise the limit of torch's caching allocator by so many bytes, if it has a limit."""
    limit = torch.cuda.get_per_process_memory_fraction()
    if limit < 1:
        _, total_bytes = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, limit + num_bytes / total_bytes)))


def open_peer_copies(channel: Channel, group: ProcessGroup, memory: torch.Tensor, check: Check) -> PeerCopies:
    """Share this rank's memory with the others of its host. Every rank has to call it.

    Args:
        channel: a channel to the other ranks.
        group: the channel's process group of gloo.
        memory: a result of `allocate`.
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
        return PeerCopies(channel.rank, map_memories(memory, group), signals)
    except (MegatierError, OSError, RuntimeError):
        if signals is not None:
            signals.close()
        raise


def map_memories(memory: torch.Tensor, group: ProcessGroup) -> list[torch.Tensor]:
    """Map the memory of every rank, in the order of the ranks. Every rank has to call it."""
    import torch.distributed._symmetric_memory as symmetric

    shared = symmetric.rendezvous(memory, group)
    memories = []
    for rank in range(shared.world_size):
        seen = shared.get_buffer(rank, memory.shape, memory.dtype)
        memories.append(seen)

    # `PeerCopies` computes offsets from addresses of the tensor that `allocate` gave.
    memories[shared.rank] = memory
    return memories


class PeerCopies:
    """The collectives of one rank, which reads the memory of the others."""

    def __init__(self, rank: int, memories: Sequence[torch.Tensor], signals: Signals) -> None:
        """Use the memory that all ranks have shared.

        Args:
            rank: this rank.
            memories: the memory of each rank as this one sees it, uint8. The others read from this rank's own.
            signals: the signals between the ranks.
        """
        self._rank = rank
        self._memories = memories
        self._signals = signals
        self._number = 0

        # Each rank begins with the next one, so that no two read from the same rank at the same time.
        size = len(memories)
        self._others = [(rank + distance) % size for distance in range(1, size)]

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """See `CollectiveBackend`. `shard` lies in the shared memory of this rank."""
        self._copy(whole, shard, 0)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """See `CollectiveBackend`. `sent` lies in the shared memory of this rank."""
        shard_bytes = received.numel() // len(self._memories)
        self._copy(received, sent, self._rank * shard_bytes)

    def try_out(self) -> bool:
        """Return whether an all-gather of a few bytes works; see `brings_right_bytes`."""
        # The trial uses the very memory that will be read, because other memory might be mapped in another way.
        shard = self._memories[self._rank][:TRIAL_BYTES]
        before = shard.clone()
        if not brings_right_bytes(self, shard, self._rank, len(self._memories)):
            return False
        shard.copy_(before)
        torch.cuda.synchronize()
        return True

    def abort(self) -> None:
        """See `CollectiveBackend`."""
        self._signals.abort()

    def close(self) -> None:
        """See `CollectiveBackend`."""
        self._signals.close()

    def _copy(self, target: torch.Tensor, source: torch.Tensor, start: int) -> None:
        """Fill shard r of the target from the source of rank r, from byte `start` of the source on."""
        memory = self._memories[self._rank]
        offset = source.data_ptr() - memory.data_ptr()
        assert 0 <= offset <= memory.numel() - source.numel(), "others cannot see these bytes"

        # The slot of a block may differ from rank to rank, because ranks free slots at different times.
        self._number += 1
        number = self._number
        offsets = self._signals.exchange_offsets(number, offset)
        for peer in self._others:
            self._signals.write(peer, Signal.READY, number)

        shards = target.view(len(self._memories), -1)
        shard_bytes = shards.shape[1]
        own_shard = source[start : start + shard_bytes]
        shards[self._rank].copy_(own_shard, non_blocking=True)

        for peer in self._others:
            self._signals.wait(peer, Signal.READY, number)
            first = offsets[peer] + start
            theirs = self._memories[peer][first : first + shard_bytes]
            shards[peer].copy_(theirs, non_blocking=True)
            self._signals.write(peer, Signal.DONE, number)

        # The caller may overwrite the source from now on, in stream order.
        for peer in self._others:
            self._signals.wait(peer, Signal.DONE, number)
