"""Rings: pinned pieces through which a queue takes bytes between the GPU and RAM that is not pinned.

The driver copies asynchronously from and to pinned RAM alone. Where it locks less than a run has, a copy goes
piece by piece. To the GPU, native threads fill a piece, and the stream of the queue takes it on. To RAM, the stream
fills a piece, and the worker of the ring takes it on with native threads. A piece is used again once the other side is
through with it, so both sides are at work at once.

Why each queue has pieces of its own: a stream may wait for compute while it has filled pieces. If another queue needed
them for a copy that compute waits for, nothing would move any more.
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
"""Copies uint8 [n] within RAM to the first tensor from the second one, and returns when that is done."""


class Ring:
    """The pieces of one queue. Its thread calls `up` and `down`, and nobody else does."""

    def __init__(self, name: str, pieces: Sequence[torch.Tensor], copy: HostCopy, clock: StreamClock | None) -> None:
        """Take the pieces and start the worker.

        Args:
            name: the name of the queue.
            pieces: uint8 tensors of one size, pinned if there is a CUDA device.
            copy: how the host copies.
            clock: the clock of the CUDA device; None: there is none, and RAM stands for its memory.
        """
        self._piece_bytes = pieces[0].numel()
        self._pieces: deque[tuple[torch.Tensor, Free]] = deque((piece, lambda: None) for piece in pieces)
        """The pieces, each with what waits for its last use. The one whose use began first is the next."""
        self._copy = copy
        self._clock = clock
        self._gpu = torch.cuda.current_device() if clock is not None else None
        self._worker = Workers(1, f"megatier-{name}-ring")

    def up(self, target: torch.Tensor, source: torch.Tensor, requires: Sequence[Transfer]) -> None:
        """Copy uint8 [n] in RAM to the GPU: returns once all has left RAM, and the rest is enqueued.

        Args:
            target: on the GPU.
            source: in RAM.
            requires: transfers that bring the source.

        Raises:
            MegatierError, RuntimeError: one of them failed, or CUDA did.
        """
        # The host reads the source itself, at once, so it is the host that has to wait for it.
        for transfer in requires:
            transfer.wait()
        try:
            for start, stop in self._runs(source):
                piece = self._take(stop - start)
                self._copy(piece, source[start:stop])
                self._move(target[start:stop], piece)

                # The piece is free when the stream has read it. Whoever takes it next waits for that.
                self._give(self._event().synchronize if self._clock is not None else lambda: None)
        except BaseException:
            self.settle()
            raise

    def down(self, target: torch.Tensor, source: torch.Tensor, follows: Sequence[Transfer]) -> Landing:
        """Start copying uint8 [n] on the GPU to RAM.

        Args:
            target: in RAM.
            source: on the GPU.
            follows: transfers that still use the target, however they end.

        Raises:
            RuntimeError: CUDA failed. Nothing of the copy is under way any more.
        """
        began_ns = time.perf_counter_ns()
        began = self._event(timed=True) if self._clock is not None else None
        tasks: list[Task[int]] = []
        try:
            for start, stop in self._runs(source):
                piece = self._take(stop - start)
                self._move(piece, source[start:stop])
                moved = self._event() if self._clock is not None else None

                # The worker empties the piece, while this thread fills the next one.
                task = self._worker.submit(partial(self._land, target[start:stop], piece, moved, follows))
                self._give(task.wait)
                tasks.append(task)

                # The worker goes in order, so the pieces behind the first one have nothing to wait for.
                follows = ()
        except BaseException:
            self.settle()
            raise

        on_device = None
        if self._clock is not None and began is not None:
            on_device = StreamSpan(self._clock, began, self._event(timed=True))
        return Landing(began_ns, tasks, on_device)

    def settle(self) -> None:
        """Block until no piece is in use, whatever failed."""
        for _, free in self._pieces:
            # The copy that used the piece has its own error.
            try:
                free()
            except FAILURES:
                continue

    def close(self) -> None:
        """End the worker. The queue is closed by now, and nothing is under way."""
        self.settle()
        self._worker.close()

    def _land(
        self, target: torch.Tensor, piece: torch.Tensor, moved: torch.cuda.Event | None, follows: Sequence[Transfer]
    ) -> int:
        """Take a piece to RAM once the device has filled it; return when that was done. The worker runs this."""
        if moved is not None:
            # Each thread has a current device of its own.
            torch.cuda.set_device(self._gpu)
            moved.synchronize()

        # Others may still read or write what is overwritten here. Their own errors are told elsewhere.
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
        # It stays in its place while this waits, so that an interrupt loses no piece.
        piece, free = self._pieces[0]
        free()
        return piece[:num_bytes]

    def _give(self, free: Free) -> None:
        """Note the use of the piece that was taken last."""
        piece, _ = self._pieces.popleft()
        self._pieces.append((piece, free))

    def _move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between a piece and the GPU: enqueue it, or do it where RAM stands for the GPU."""
        if self._clock is not None:
            target.copy_(source, non_blocking=True)
            return
        num_bytes = source.numel()
        _native.copy(address_of(target, torch.uint8, num_bytes), address_of(source, torch.uint8, num_bytes), num_bytes)

    def _event(self, *, timed: bool = False) -> torch.cuda.Event:
        """Return an event at the present point of the queue's stream, for which a thread waits asleep."""
        event = torch.cuda.Event(enable_timing=timed, blocking=True)
        event.record()
        return event
