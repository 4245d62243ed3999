"""Drives whose reads end late."""

from __future__ import annotations

import threading
import time

import pytest

from megatier.drives.blockfile import BlockFiles, FileBatch
from megatier.drives.extent import Extent


def slow_reads(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """A drive whose reads end late."""

    class Late:
        def __init__(self, batch: FileBatch) -> None:
            self.batch, self.end = batch, time.monotonic() + seconds

        def wait(self) -> None:
            time.sleep(max(0.0, self.end - time.monotonic()))
            self.batch.wait()

        def done(self) -> bool:
            return time.monotonic() >= self.end and self.batch.done()

        def span_ns(self) -> tuple[int, int]:
            start, _ = self.batch.span_ns()
            return start, start + int(seconds * 1e9)

    real = BlockFiles.read

    def read(self: BlockFiles, key: str, extent: Extent, start: int, stop: int, address: int) -> Late:
        return Late(real(self, key, extent, start, stop, address))

    monkeypatch.setattr(BlockFiles, "read", read)


def held_reads(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A drive whose reads end when the event is set."""
    ended = threading.Event()

    class Held:
        def __init__(self, batch: FileBatch) -> None:
            self.batch = batch

        def wait(self) -> None:
            ended.wait()
            self.batch.wait()

        def done(self) -> bool:
            return ended.is_set() and self.batch.done()

        def span_ns(self) -> tuple[int, int]:
            return self.batch.span_ns()

    real = BlockFiles.read

    def read(self: BlockFiles, key: str, extent: Extent, start: int, stop: int, address: int) -> Held:
        return Held(real(self, key, extent, start, stop, address))

    monkeypatch.setattr(BlockFiles, "read", read)
    return ended
