"""Collectives through RAM that the ranks of a host share, for GPUs that cannot read each other's memory, and for CPUs.

Each rank has buffers in that RAM, which it alone writes. A collective takes as many rounds as buffers have to be
filled:

1. A rank copies a run of its bytes to a buffer, and writes the round's number as `ready` for each other rank.
2. It waits for the `ready` of each other rank, and copies what it needs from that rank's buffer.
3. It writes the number as `done` for that rank, which overwrites the buffer only then.

There are `SHARED_STAGES` buffers for each rank, so that one round is written while the one before is read. GPUs copy by
their copy engines, each over its own link, and take nothing from compute; the RAM is pinned for them. NCCL would use
RAM here too, but by kernels. On CPUs the hosts copy.

Ranks do not read shards from each other's homes in RAM. AdamW changes homes, and they may be on their way to NVMe, so
leases of a store would have to bind other processes. The price is one copy of each shard out of the GPU.

Threads: one thread at a time calls collectives. Any thread may call `abort`.
"""

from __future__ import annotations

import contextlib
import mmap
import platform
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from megatier.errors import MegatierError
from megatier.page_lock import LOCKED_BYTES, PageLock
from megatier.ranks.channel import Channel
from megatier.ranks.collective_backend import TRIAL_BYTES, brings_right_bytes
from megatier.ranks.shared_memory import share_memory
from megatier.ranks.signal_pad import Check, Signal, SignalPad
from megatier.ranks.signals import HostSignals, Signals, StreamSignals
from megatier.tier import SHARED_STAGES, cut_at_addresses, round_up

ALIGNMENT_BYTES = 256
"""Runs for different ranks begin at multiples of it."""
ORDERED = ("x86_64", "AMD64")
"""Processors whose stores others see in order, so that a plain store can say that earlier bytes are there."""


class SharedRam:
    """The collectives of one rank, through buffers that the ranks of its host share."""

    def __init__(self, rank: int, stages: torch.Tensor, signals: Signals, lock: PageLock | None = None) -> None:
        """Use the memory that all ranks have mapped.

        Args:
            rank: this rank.
            stages: uint8 [SHARED_STAGES, size, n]: a buffer for each stage and rank.
            signals: the signals between the ranks.
            lock: keeps `stages` pinned until `close`, if a GPU copies them; None on CPUs.
        """
        self._rank = rank
        self._size = stages.shape[1]
        self._stages = stages
        self._signals = signals
        self._collective = 0
        """The number of the last collective."""
        self._round = 0
        """The number of the last round."""
        self._lock = lock
        self._writes = torch.cuda.Stream() if lock is not None else None
        """The stream of copies to RAM, which run beside those from RAM: a link works in both directions at once."""
        self._reads: deque[torch.cuda.Event] = deque()
        """The ends of the last rounds that the GPU was asked for."""

        # Each rank begins with the next one, so that not all read the same buffer at the same time.
        self._others = [(rank + distance) % self._size for distance in range(1, self._size)]

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """See `CollectiveBackend`."""
        shards = whole.view(self._size, -1)
        self._move(shards, shard, [shard])

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """See `CollectiveBackend`."""
        taken = received.view(self._size, -1)
        given = sent.view(self._size, -1)

        # The rank's own piece needs no buffer.
        own_row = given[self._rank]
        self._move(taken, own_row, list(given))

    def try_out(self, device: str) -> None:
        """Try an all-gather of a few bytes on GPUs; see `brings_right_bytes`.

        Raises:
            MegatierError: the bytes are wrong, or come too late.
        """
        shard = torch.empty(TRIAL_BYTES, dtype=torch.uint8, device=device)
        if not brings_right_bytes(self, shard, self._rank, self._size):
            raise MegatierError("a trial of copies through shared RAM failed")

    def abort(self) -> None:
        """See `CollectiveBackend`."""
        self._signals.abort()

    def close(self) -> None:
        """See `CollectiveBackend`."""
        self._reads.clear()
        self._signals.close()
        if self._lock is not None:
            self._lock.close()

    def _move(self, target: torch.Tensor, own_row: torch.Tensor, sent: Sequence[torch.Tensor]) -> None:
        """Fill row r of the target with what rank r sends to this one.

        Args:
            target: uint8 [size, n], overwritten.
            own_row: the bytes for this rank itself: uint8 [n].
            sent: the bytes that it sends, uint8 [n] each: one tensor for all others, or one for each rank.
        """
        # Hosts wait for each other here, so streams wait for late ranks only a moment.
        self._collective += 1
        self._signals.exchange_offsets(self._collective, 0)
        target[self._rank].copy_(own_row, non_blocking=True)

        # A buffer has a run of each tensor that is sent.
        buffer_bytes = self._stages.shape[2]
        run_bytes = buffer_bytes // len(sent) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        starts = range(0, target.shape[1], run_bytes)
        spans = [slice(start, start + run_bytes) for start in starts]
        first = self._rank * run_bytes if len(sent) > 1 else 0

        # The queue's stream has made what is sent.
        if self._writes is not None:
            self._writes.wait_stream(torch.cuda.current_stream())

        # Each round is written before the one before it is read, so that both directions of the link are busy.
        num_rounds = len(spans)
        for index in range(num_rounds + 1):
            if index < num_rounds:
                runs = [tensor[spans[index]] for tensor in sent]
                self._put(self._round + index + 1, run_bytes, runs)
            if index:
                read = target[:, spans[index - 1]]
                self._take(self._round + index, first, read)
        self._round += num_rounds

        # The caller may overwrite what was sent from now on.
        if self._writes is not None:
            torch.cuda.current_stream().wait_stream(self._writes)

    def _put(self, number: int, run_bytes: int, runs: Sequence[torch.Tensor]) -> None:
        """Write the runs of a round to this rank's buffer, after all others have read its old bytes."""
        buffer = self._stages[number % SHARED_STAGES, self._rank]

        # In the first rounds the buffer is empty, and a wait for 0 is over at once.
        last_of_buffer = max(0, number - SHARED_STAGES)

        # `torch.cuda.stream(None)` would look for a GPU.
        stream = contextlib.nullcontext() if self._writes is None else torch.cuda.stream(self._writes)
        with stream:
            for peer in self._others:
                self._signals.wait(peer, Signal.DONE, last_of_buffer)

            for place, run in enumerate(runs):
                is_for_others = len(runs) == 1 or place != self._rank
                if is_for_others:
                    first = place * run_bytes
                    stop = first + run.numel()
                    buffer[first:stop].copy_(run, non_blocking=True)

            for peer in self._others:
                self._signals.write(peer, Signal.READY, number)

    def _take(self, number: int, first: int, target: torch.Tensor) -> None:
        """Read the round's run of each other rank, from byte `first` of its buffer on."""
        # The GPU gets few rounds at a time, so that copies of other queues come between, and little work waits for a
        # late rank.
        if len(self._reads) == SHARED_STAGES:
            oldest = self._reads.popleft()
            oldest.synchronize()

        buffers = self._stages[number % SHARED_STAGES]
        end = first + target.shape[1]
        for peer in self._others:
            self._signals.wait(peer, Signal.READY, number)
            target[peer].copy_(buffers[peer, first:end], non_blocking=True)
            self._signals.write(peer, Signal.DONE, number)

        if self._writes is not None:
            event = torch.cuda.Event()
            event.record()
            self._reads.append(event)


def why_not_shared(*, is_on_gpu: bool) -> str | None:
    """Return why ranks of this host cannot share RAM; None if nothing speaks against a trial."""
    processor = platform.machine()
    if not is_on_gpu and processor not in ORDERED:
        return f"stores of {processor} may be seen in another order"
    return None


def open_shared_ram(channel: Channel, buffer_bytes: int, check: Check, *, device: str) -> SharedRam:
    """Share RAM with the other ranks, which have to be on one host. Every rank has to call it.

    Args:
        channel: a channel to the other ranks.
        buffer_bytes: the size of a buffer in whole pages, the same for all ranks.
        check: raises if a rank has failed; see `PeerMonitor.check`.
        device: the device whose bytes move, "cuda" or "cpu".

    Raises:
        OSError, MegatierError: there is no RAM to share, or CUDA refused to pin it.
        PeerError: a rank has failed.
    """
    size = channel.size
    pad_bytes = round_up(SignalPad.num_bytes(size))
    memory = share_memory(channel, pad_bytes + SHARED_STAGES * size * buffer_bytes)
    pad = SignalPad(memory, channel.rank, size)
    stages = _stages(memory, pad_bytes, size)
    if device == "cpu":
        return SharedRam(channel.rank, stages, HostSignals(pad, check))

    with contextlib.ExitStack() as opened:
        with channel.failing_together():
            signals = StreamSignals(pad, check)
            opened.callback(signals.close)

            # Buffers are powers of two, so no buffer, and no copy, crosses the end of a pinned piece.
            lock = PageLock(stages.data_ptr(), cut_at_addresses(0, stages.nbytes, LOCKED_BYTES))
            opened.callback(lock.close)
            shared = SharedRam(channel.rank, stages, signals, lock)

        # No rank has failed. Otherwise the pages must not stay pinned, because CUDA would refuse to pin what is mapped
        # at their addresses next.
        opened.pop_all()

    try:
        with channel.failing_together():
            shared.try_out(device)
    except (MegatierError, OSError, RuntimeError):
        # Streams may still wait for a signal that will not come, and must not lose the memory under them.
        shared.abort()
        torch.cuda.synchronize()
        shared.close()
        raise
    return shared


def _stages(memory: mmap.mmap, first: int, size: int) -> torch.Tensor:
    """Return the buffers of all ranks: uint8 [SHARED_STAGES, size, n]."""
    # The array of np.frombuffer keeps the mapping alive as long as any view.
    stages = np.frombuffer(memory, dtype=np.uint8, offset=first)
    return torch.from_numpy(stages).view(SHARED_STAGES, size, -1)
