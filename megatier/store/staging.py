"""Staging: the rings for copies between the GPU and RAM that is not pinned.

It has a ring for each copying queue (`ring`), the memory of all rings, and native threads that copy in RAM.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch

from megatier import _native
from megatier.address import address_of
from megatier.errors import PageLockError
from megatier.hardware import cores_usable
from megatier.page_lock import PIN_REMEDY
from megatier.store.arena import Arena
from megatier.store.ring import Ring
from megatier.store.stream_clock import StreamClock
from megatier.tier import COPY_QUEUES, PAGE_BYTES, RING_BYTES

NUM_PIECES = 3
"""The pieces of a ring: one is filled, one is emptied, and one waits."""
PIECE_BYTES = RING_BYTES // len(COPY_QUEUES) // NUM_PIECES
"""The bytes of a piece, 16 MiB: a link takes 0.3 ms for them, so that starting a copy costs little."""
PIECE_BYTES_MIN = 64 << 10
"""The smallest piece that is tried if the driver refuses larger ones."""
COPY_REQUEST_BYTES = 1 << 20
"""The bytes that a native thread copies at once."""
COPY_THREADS_MAX = 8
"""Native threads that together copy as fast as a link. AdamW has other threads."""


class Staging:
    """The rings of all copying queues."""

    def __init__(self, most_bytes: int | None, clock: StreamClock | None) -> None:
        """Allocate and pin the pieces, and start the threads.

        Args:
            most_bytes: the most pinned RAM of the store, of which pieces take at most half; None: no limit is set.
            clock: the clock of the CUDA device; None: there is none, and nothing is pinned.

        Raises:
            PageLockError: the driver refuses to pin even the smallest pieces.
        """
        num_pieces = NUM_PIECES * len(COPY_QUEUES)
        self._arena = _allocate(most_bytes, num_pieces, pin=clock is not None)
        self.num_bytes = self._arena.num_bytes
        """The bytes of all pieces."""
        self.pins = clock is not None
        """Whether RAM is really pinned. Without a CUDA device it is only treated as pinned."""
        self.locked = 0, 0
        """The first address of the other pinned RAM, and one past its last address."""
        self.unlocked_bytes = 0
        """The bytes of other RAM that is not pinned."""

        # The other half of the cores is for AdamW and drives, which work at the same time.
        cores = cores_usable()
        num_threads = max(1, min(COPY_THREADS_MAX, cores // 2))
        with ExitStack() as undone:
            # If threads or a ring cannot be made, nobody else closes the memory.
            undone.callback(self._arena.close)
            self._pool = _native.ThreadPool(num_threads, 2 * PIECE_BYTES // COPY_REQUEST_BYTES * len(COPY_QUEUES))
            self.rings: dict[str, Ring] = {}
            """The ring of each queue."""
            pieces = self._arena.bytes.chunk(num_pieces)
            for number, queue in enumerate(COPY_QUEUES):
                ring_pieces = pieces[number * NUM_PIECES : (number + 1) * NUM_PIECES]
                self.rings[queue] = Ring(queue, ring_pieces, self._copy, clock)
            undone.pop_all()

    def is_locked(self, in_ram: torch.Tensor) -> bool:
        """Return whether all of uint8 [n] in RAM is pinned, so that it needs no ring."""
        num_bytes = in_ram.numel()
        start = address_of(in_ram, torch.uint8, num_bytes)

        # A tensor that is partly pinned counts as not pinned, because its copy would wait for the device.
        first, end = self.locked
        return first <= start and start + num_bytes <= end

    def close(self) -> None:
        """Finish all copies, end the threads and free the pieces."""
        # Rings first, because their workers use the pool and the arena.
        for ring in self.rings.values():
            ring.close()
        self._pool.close()
        self._arena.close()

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy uint8 [n] in RAM, by all threads."""
        num_bytes = source.numel()
        to_address = address_of(target, torch.uint8, num_bytes)
        from_address = address_of(source, torch.uint8, num_bytes)
        self._pool.submit_copy(to_address, from_address, num_bytes, COPY_REQUEST_BYTES).wait()


def _allocate(most_bytes: int | None, num_pieces: int, *, pin: bool) -> Arena:
    """Return memory for so many pieces, as large as the driver allows.

    Raises:
        PageLockError: the driver refuses even the smallest pieces.
    """
    piece_bytes = PIECE_BYTES
    if most_bytes is not None:
        share = most_bytes // 2 // num_pieces // PAGE_BYTES * PAGE_BYTES
        piece_bytes = max(PAGE_BYTES, min(piece_bytes, share))
    while True:
        try:
            return Arena(num_pieces * piece_bytes, torch.device("cpu"), pin=pin)
        except PageLockError as error:
            if piece_bytes <= PIECE_BYTES_MIN:
                remedy = f"{error.remedy} {PIN_REMEDY}"
                raise PageLockError("pinned RAM", num_pieces * piece_bytes, 0, remedy) from error
            piece_bytes //= 2
