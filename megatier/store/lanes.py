"""Lanes: the queues between the tiers, and the copies that they make between RAM and the GPU.

Where it stands: hop 2 (RAM slot -> GPU slot) and hop 4 (gradients -> RAM slot) of a byte's journey.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

import torch

from megatier import _native
from megatier.store.queue import Queue
from megatier.store.stream_clock import StreamClock
from megatier.store.transfer import Completion, Transfer, mark
from megatier.tier import Kind

LOG_TRANSFERS_MAX = 1 << 17
"""Transfers kept for a trace that nobody takes; the oldest go first."""
QUEUES = ("nvme_to_ram", "nvme_to_gpu", "ram_to_gpu", "gpu_to_ram", "ram_to_nvme", "state_to_gpu", "state_to_ram")
"""The lanes between tiers. Between RAM and the GPU, state has two of its own: it yields to what compute waits for."""
PIECE_BYTES = 128 << 20
"""Copies between RAM and the GPU go piece by piece, one of a lane enqueued at a time: those of one direction run in the
order in which they were enqueued, on any stream, so a long row of them would hold up one that compute waits for."""
YIELDING = (Kind.REMAINDER, Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.MOMENTS)
"""Kinds of state that compute does not wait for, as it does for weights, gradients and activations."""


def queue_to_gpu(kind: Kind) -> str:
    """The queue that takes bytes of a kind from RAM to the GPU."""
    return "state_to_gpu" if kind in YIELDING else "ram_to_gpu"


def queue_to_ram(kind: Kind) -> str:
    """The queue that takes bytes of a kind from the GPU to RAM."""
    return "state_to_ram" if kind in YIELDING else "gpu_to_ram"


class Lanes:
    """The queues between the tiers, the bytes that moved on each, and a log for the trace.

    Threads: one at a time submits and takes the log; the store's lock sees to that.

    Attributes:
        clock: maps device times to the host's; None without a CUDA device.
        queues: every queue, by name.
        moved_bytes: bytes submitted per queue since the start.
    """

    def __init__(self, device: torch.device) -> None:
        """Start the workers."""
        self.clock = StreamClock() if device.type == "cuda" else None
        self.moved_bytes: Counter[str] = Counter()
        self.queues = {name: Queue(name, self.clock if "gpu" in name or "state" in name else None) for name in QUEUES}
        self._log: deque[Transfer] = deque(maxlen=LOG_TRANSFERS_MAX)
        self._pieces: dict[str, torch.cuda.Event] = {}
        """The last piece of each lane, read and set by that lane's worker alone."""

    def submit(
        self,
        queue: str,
        key: str,
        num_bytes: int,
        start: Callable[[], Completion | None],
        after: Sequence[Transfer] = (),
        behind: Sequence[Transfer] = (),
    ) -> Transfer:
        """Append a move to a queue; see Queue.submit. A move of 0 bytes is neither counted nor logged."""
        transfer = self.queues[queue].submit(key, num_bytes, start, after, behind)
        if num_bytes:
            self.moved_bytes[queue] += num_bytes
            self._log.append(transfer)
        return transfer

    # HOP 2/6: RAM slot -> GPU slot
    def to_gpu(
        self,
        key: str,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Sequence[Transfer] = (),
        behind: Sequence[Transfer] = (),
        *,
        queue: str = "ram_to_gpu",
    ) -> Transfer:
        """Copy uint8 [n] in RAM to uint8 [n] on the GPU."""
        return self.submit(queue, key, source.numel(), lambda: self.copy(queue, target, source), after, behind)

    # HOP 4/6: gradient in a GPU slot -> RAM slot
    def to_ram(
        self,
        key: str,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Sequence[Transfer] = (),
        behind: Sequence[Transfer] = (),
        *,
        queue: str = "gpu_to_ram",
    ) -> Transfer:
        """Copy uint8 [n] on the GPU to uint8 [n] in RAM."""
        return self.submit(queue, key, source.numel(), lambda: self.copy(queue, target, source), after, behind)

    def point(self, key: str) -> list[Transfer]:
        """The present point of compute if it is asynchronous, else nothing."""
        point = mark(self.clock, key)
        return [] if point is None else [point]

    def take_log(self) -> list[Transfer]:
        """Transfers submitted since the last call."""
        log = self._log
        self._log = deque(maxlen=LOG_TRANSFERS_MAX)
        return list(log)

    def close(self) -> None:
        """Finish every move that was submitted, and stop the workers."""
        for lane in self.queues.values():
            lane.close()

    def copy(self, queue: str, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy on the lane whose worker calls it."""
        if self.clock is None:
            _native.copy(target.data_ptr(), source.data_ptr(), source.numel())
            return

        # One piece at a time: the piece before is over, on the device, before the next is enqueued (`PIECE_BYTES`).
        for start in range(0, source.numel(), PIECE_BYTES):
            if (before := self._pieces.get(queue)) is not None:
                before.synchronize()
            stop = min(start + PIECE_BYTES, source.numel())
            target[start:stop].copy_(source[start:stop], non_blocking=True)
            self._pieces[queue] = torch.cuda.current_stream().record_event()

        # The caching allocator must not hand the memory out before the copy is over.
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream())
