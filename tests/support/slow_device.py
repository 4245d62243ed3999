"""A device whose copies are over later than they were enqueued, in order, as on a CUDA stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import pytest
import torch

from megatier.store.ring import Ring


class SlowDevice:
    """Does what was enqueued, in order, on a thread of its own. Copy number `fails_at` fails, and all behind it."""

    def __init__(self, patch: pytest.MonkeyPatch, fails_at: int = -1, delay_s: float = 0.0005) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._fails_at = fails_at
        self._delay_s = delay_s
        self._failed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.num_copies = 0
        patch.setattr(Ring, "_move", lambda _, target, source: self.move(target, source))
        patch.setattr(Ring, "_event", lambda _, timed=False: SlowEvent(self))
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "set_device", lambda _: None)

    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        number = self.num_copies
        self.num_copies += 1

        def copy() -> None:
            time.sleep(self._delay_s)
            self._failed |= number == self._fails_at
            if not self._failed:
                target.copy_(source)

        self._work.put(copy)

    def enqueue(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def check(self) -> None:
        """CUDA's errors stay: all that is asked after one fails."""
        if self._failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class SlowEvent:
    """A point in the work of a device."""

    def __init__(self, device: SlowDevice) -> None:
        self._device = device
        self._passed = threading.Event()
        device.enqueue(self._passed.set)

    def synchronize(self) -> None:
        assert self._passed.wait(60)
        self._device.check()
