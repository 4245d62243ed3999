"""The queues between the tiers, and their copies between RAM and the GPU.

Each direction between two tiers has a queue of its own, so that moves of different kinds do not wait for each other.
This file has hop 2 (RAM slot -> GPU slot) and hop 4 (gradients -> RAM slot) of a byte's journey.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from megatier import _native
from megatier.address import address_of
from megatier.page_lock import LOCK_STEP_BYTES
from megatier.store.queue import Queue
from megatier.store.staging import Staging
from megatier.store.stream_clock import StreamClock
from megatier.store.transfer import FAILURES, Completion, Transfer, compute_point
from megatier.tier import COPY_QUEUES, QUEUES, Kind, cut_at_addresses

LOG_TRANSFERS_MAX = 1 << 17
"""The most transfers that are kept for a trace. The oldest are dropped if nobody takes them."""
COPY_BYTES_MAX = 128 << 20
"""The most bytes that a queue copies at once between RAM and the GPU. The device does the copies of one direction in
the order of enqueueing, whatever their streams. So each queue enqueues one piece at a time; otherwise many pieces could
hold up a copy for which compute waits. Pieces end at multiples of this in RAM, so that none crosses the end of what one
call has pinned (`page_lock.LOCKED_BYTES`), where a copy might fail."""
AWAITED = (Kind.WEIGHT, Kind.GRAD, Kind.ACTIVATION)
"""The kinds for which compute waits. All others are optimizer state, which has queues of its own."""


def queue_to_gpu(kind: Kind) -> str:
    """Return the queue that takes bytes of a kind from RAM to the GPU."""
    return "ram_to_gpu" if kind in AWAITED else "state_to_gpu"


def queue_to_ram(kind: Kind) -> str:
    """Return the queue that takes bytes of a kind from the GPU to RAM."""
    return "gpu_to_ram" if kind in AWAITED else "state_to_ram"


class TierQueues:
    """The queues between the tiers, the bytes that moved on each, and a log for the trace.

    Threads: one thread at a time submits or takes the log, because it holds the store's lock.
    """

    def __init__(self, device: torch.device) -> None:
        """Start their threads."""
        self.clock = StreamClock() if device.type == "cuda" else None
        """Maps device times to the host's; None without a CUDA device."""
        self.moved_bytes: Counter[str] = Counter()
        """The bytes that were submitted to each queue since the start."""
        self.queues: dict[str, Queue] = {}
        """Every queue by its name."""
        for name in QUEUES:
            # Queues to and from the GPU have a stream. The two between RAM and NVMe have none, because native threads
            # move their bytes.
            has_stream = name == "nvme_to_gpu" or name in COPY_QUEUES
            self.queues[name] = Queue(name, self.clock if has_stream else None)

        self.staging: Staging | None = None
        """The rings for RAM that is not pinned; None: all of RAM is pinned. It is set before any copy, and closed with
        the queues."""
        self._log: deque[Transfer] = deque(maxlen=LOG_TRANSFERS_MAX)
        self._pieces: dict[str, torch.cuda.Event] = {}
        """The last piece of each queue. Only that queue's thread uses it."""

    @property
    def pins(self) -> bool:
        """Whether copies need pinned RAM, because there is a GPU and no ring."""
        return self.clock is not None and self.staging is None

    def submit(
        self,
        queue: str,
        key: str,
        num_bytes: int,
        start: Callable[[], Completion | None],
        requires: Sequence[Transfer] = (),
        follows: Sequence[Transfer] = (),
    ) -> Transfer:
        """Append a move to a queue, as `Queue.submit` does. A move of 0 bytes is neither counted nor logged."""
        transfer = self.queues[queue].submit(key, num_bytes, start, requires, follows)

        # Bytes count when they are submitted, so that sums do not depend on how fast moves end.
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
        requires: Sequence[Transfer] = (),
        follows: Sequence[Transfer] = (),
        *,
        queue: str = "ram_to_gpu",
    ) -> Transfer:
        """Copy uint8 [n] in RAM to uint8 [n] on the GPU."""
        work = partial(self.copy, queue, target, source, requires)
        return self.submit(queue, key, source.numel(), work, requires, follows)

    # HOP 4/6: gradient in a GPU slot -> RAM slot
    def to_ram(
        self,
        key: str,
        target: torch.Tensor,
        source: torch.Tensor,
        requires: Sequence[Transfer] = (),
        follows: Sequence[Transfer] = (),
        *,
        queue: str = "gpu_to_ram",
    ) -> Transfer:
        """Copy uint8 [n] on the GPU to uint8 [n] in RAM."""
        work = partial(self.copy, queue, target, source, follows)
        return self.submit(queue, key, source.numel(), work, requires, follows)

    def carry(self, key: str, target: torch.Tensor, source: torch.Tensor, *, to_gpu: bool) -> Transfer:
        """Copy uint8 [n] of state between RAM and any memory on the GPU, after the work that is on this stream now.

        The caller leases the bytes in RAM, and keeps both tensors until it has waited for the copy.
        """
        # torch's allocator is not told of the copy, because it would keep the memory for later copies too.
        queue = "state_to_gpu" if to_gpu else "state_to_ram"
        work = partial(self._copy, queue, target, source)
        point = self.point(key)
        return self.submit(queue, key, source.numel(), work, follows=point)

    def point(self, key: str) -> list[Transfer]:
        """Return the present point in compute's stream, as a list. It is empty if compute is synchronous."""
        point = compute_point(self.clock, key)
        return [] if point is None else [point]

    def take_log(self) -> list[Transfer]:
        """Return the transfers that were submitted since the last call."""
        log = self._log
        self._log = deque(maxlen=LOG_TRANSFERS_MAX)
        return list(log)

    def close(self) -> None:
        """Finish all submitted moves, and stop the threads."""
        with ExitStack() as closing:
            # Called last, because moves that wait on a queue still pass through the rings.
            closing.callback(self._close_staging)
            for queue in reversed(self.queues.values()):
                closing.callback(queue.close)

    def _close_staging(self) -> None:
        """Close the rings, if there are any."""
        if self.staging is not None:
            self.staging.close()
            self.staging = None

    def copy(
        self, queue: str, target: torch.Tensor, source: torch.Tensor, users: Sequence[Transfer] = ()
    ) -> Completion | None:
        """Copy uint8 [n] on a queue. The queue's thread calls this.

        Args:
            queue: the name of the queue.
            target: the destination.
            source: the bytes.
            users: earlier transfers that use the memory in RAM.
        """
        completion = self._copy(queue, target, source, users)

        # torch's allocator must not reuse the memory before the copy is over.
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream())
        return completion

    def _copy(
        self, queue: str, target: torch.Tensor, source: torch.Tensor, users: Sequence[Transfer] = ()
    ) -> Completion | None:
        """Copy uint8 [n] on a queue, without telling torch's allocator."""
        staging = self.staging
        goes_up = queue.endswith("to_gpu")
        in_ram = source if goes_up else target
        if staging is not None and not staging.is_locked(in_ram):
            ring = staging.rings[queue]
            if not goes_up:
                return ring.down(target, source, users)
            ring.up(target, source, users)
            return None

        if staging is not None:
            _wait_for_landings(users, raises=goes_up)
        self._copy_at_once(queue, target, source, in_ram)
        return None

    def _copy_at_once(self, queue: str, target: torch.Tensor, source: torch.Tensor, in_ram: torch.Tensor) -> None:
        """Copy uint8 [n] without a ring."""
        if self.clock is None:
            num_bytes = source.numel()
            to_address = address_of(target, torch.uint8, num_bytes)
            from_address = address_of(source, torch.uint8, num_bytes)
            _native.copy(to_address, from_address, num_bytes)
            return

        # Wait for the queue's last piece, perhaps of an earlier copy, before the next one is enqueued. So the queues of
        # one direction take turns (`COPY_BYTES_MAX`).
        most = COPY_BYTES_MAX if self.staging is None else LOCK_STEP_BYTES
        for start, stop in cut_at_addresses(in_ram.data_ptr(), in_ram.numel(), most):
            before = self._pieces.get(queue)
            if before is not None:
                before.synchronize()
            target[start:stop].copy_(source[start:stop], non_blocking=True)
            self._pieces[queue] = torch.cuda.current_stream().record_event()


def _wait_for_landings(transfers: Sequence[Transfer], *, raises: bool) -> None:
    """Block until copies through rings have landed in memory that is copied next without a ring.

    Such memory is partly pinned, at the end of the RAM that is not.
    """
    for transfer in transfers:
        try:
            transfer.wait_for_landing()
        except FAILURES:
            if raises or not transfer.failed():
                raise
