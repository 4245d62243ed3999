"""A ring: pinned pieces through which a queue copies between the GPU and RAM that is not pinned.

CUDA copies asynchronously only from and to pinned RAM. If a run cannot pin all of its RAM, copies of the rest go piece
by piece. To the GPU, native threads fill a piece and the queue's stream copies it on. To RAM, the stream fills a piece
and the ring's worker copies it on with native threads. A piece is reused when the other side has finished with it, so
both sides work at the same time.

Each queue has its own pieces to avoid a deadlock: a stream may wait for compute while its pieces are full, and another
queue might need them for a copy for which compute waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from megatier import _native
from megatier.address import address_of
from megatier.store.landing import Landing
from megatier.store.stream_clock import StreamClock, StreamSpan
from megatier.store.transfer import FAILURES, Transfer
from megatier.tier import Tier
from megatier.workers import Task, Workers

Free = Callable[[], object]
"""Blocks until a piece is free."""
HostCopy = Callable[[torch.Tensor, torch.Tensor], None]
"""Copies uint8 [n] in RAM to the first tensor from the second one, and returns when that is done."""


class Ring:
    """The pieces of one queue. Only its thread calls `up` and `down`."""

    def __init__(self, name: str, pieces: Sequence[torch.Tensor], copy: HostCopy, clock: StreamClock | None) -> None:
        """Start the worker.

        Args:
            name: the name of the queue.
            pieces: uint8 tensors of one size, pinned if there is a CUDA device.
            copy: how the host copies.
            clock: the clock of the CUDA device; None: there is no CUDA device.
        """
        self._piece_bytes = pieces[0].numel()
        self._pieces: deque[tuple[torch.Tensor, Free]] = deque((piece, lambda: None) for piece in pieces)
        """The pieces, each with a wait for its last use. The one that was used first comes next."""
        self._copy = copy
        self._clock = clock
        self._gpu = torch.cuda.current_device() if clock is not None else None
        self._worker = Workers(1, f"megatier-{name}-ring")

    def up(self, target: torch.Tensor, source: torch.Tensor, requires: Sequence[Transfer]) -> None:
        """Copy uint8 [n] in RAM to the GPU. It returns when all bytes are in pieces, and the copies are enqueued.

        Args:
            target: a tensor on the GPU.
            source: a tensor in RAM.
            requires: transfers that bring the source.

        Raises:
            MegatierError, RuntimeError: a transfer or CUDA failed.
        """
        # The host itself reads the source, so the host has to wait.
        for transfer in requires:
            transfer.wait()
        try:
            for start, stop in self._runs(source):
                piece = self._take(stop - start)
                self._copy(piece, source[start:stop])
                self._move(target[start:stop], piece)

                # The next use of the piece waits until the stream has read it.
                self._give(self._event().synchronize if self._clock is not None else lambda: None)
        except BaseException:
            self.settle()
            raise

    def down(self, target: torch.Tensor, source: torch.Tensor, follows: Sequence[Transfer]) -> Landing:
        """Start to copy uint8 [n] on the GPU to RAM.

        Args:
            target: a tensor in RAM.
            source: a tensor on the GPU.
            follows: transfers that still use the target, however they end.

        Raises:
            RuntimeError: CUDA failed. No part of the copy is under way any more.
        """
        began_ns = time.perf_counter_ns()
        began = self._event(timed=True) if self._clock is not None else None
        tasks: list[Task[int]] = []
        try:
            for start, stop in self._runs(source):
                piece = self._take(stop - start)
                self._move(piece, source[start:stop])
                moved = self._event() if self._clock is not None else None

                # The worker empties the piece while this thread fills the next one.
                task = self._worker.submit(partial(self._land, target[start:stop], piece, moved, follows))
                self._give(task.wait)
                tasks.append(task)

                # The worker works in order, so only the first piece has to wait.
                follows = ()
        except BaseException:
            self.settle()
            raise

        on_device = None
        if self._clock is not None and began is not None:
            on_device = StreamSpan(self._clock, began, self._event(timed=True))
        return Landing(began_ns, tasks, on_device)

    def settle(self) -> None:
        """Block until no piece is in use, even after errors."""
        for _, free in self._pieces:
            # The copy that used the piece reports its own error.
            try:
                free()
            except FAILURES:
                continue

    def close(self) -> None:
        """End the worker. The queue must be closed before."""
        self.settle()
        self._worker.close()

    def _land(
        self, target: torch.Tensor, piece: torch.Tensor, moved: torch.cuda.Event | None, follows: Sequence[Transfer]
    ) -> int:
        """Copy a piece to RAM when the device has filled it. Return the time of the end. The worker runs this."""
        if moved is not None:
            # Each thread has its own current device.
            torch.cuda.set_device(self._gpu)
            moved.synchronize()

        # Other transfers may still use the target. They report their own errors.
        for transfer in follows:
            transfer.wait_before_use(Tier.RAM, raises=False)
        self._copy(target, piece)
        return time.perf_counter_ns()

    def _runs(self, tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
        num_bytes = tensor.numel()
        for start in range(0, num_bytes, self._piece_bytes):
            yield start, min(start + self._piece_bytes, num_bytes)

    def _take(self, num_bytes: int) -> torch.Tensor:
        """Wait for the next piece, and return so many bytes of it."""
        # It stays in the list during the wait, so that an interrupt loses no piece.
        piece, free = self._pieces[0]
        free()
        return piece[:num_bytes]

    def _give(self, free: Free) -> None:
        """Put the piece that was taken last at the end, with a wait for its use."""
        piece, _ = self._pieces.popleft()
        self._pieces.append((piece, free))

    def _move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy between a piece and the GPU, or do it at once without a CUDA device."""
        if self._clock is not None:
            target.copy_(source, non_blocking=True)
            return
        num_bytes = source.numel()
        _native.copy(address_of(target, torch.uint8, num_bytes), address_of(source, torch.uint8, num_bytes), num_bytes)

    def _event(self, *, timed: bool = False) -> torch.cuda.Event:
        """Record an event on the queue's stream. A thread sleeps while it waits for it."""
        event = torch.cuda.Event(enable_timing=timed, blocking=True)
        event.record()
        return event
