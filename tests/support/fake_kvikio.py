"""A kvikio that reads into the arena that stands for the GPU: what `megatier.drives.gds` uses of it, and no more."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import pytest
import torch
from from_outside import granule_checksums

from megatier.drives import gds

HANG_S = 10
"""A test that failed must not wait for ever."""


class Future:
    """A read that happens when somebody asks for its result."""

    def __init__(self, library: Kvikio, read: Callable[[], int]) -> None:
        self._library, self._read = library, read

    def get(self) -> int:
        self._library.is_open.wait(HANG_S)
        self._library.under_way -= 1
        return self._read()


class CuFile:
    """An open file."""

    def __init__(self, library: Kvikio, path: Path, flags: str) -> None:
        assert flags == "r"
        self._library, self.path = library, path.resolve()
        self._file = os.open(path, os.O_RDONLY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.path.exists(), "the file was removed before it was closed"
        os.close(self._file)
        self._library.closed.append(self.path)

    def pread(self, buffer: torch.Tensor, size: int, file_offset: int) -> Future:
        assert buffer.numel() == size
        self._library.requests.append((self.path, file_offset, size))
        self._library.refuse("pread", file_offset)
        self._library.under_way += 1

        def read() -> int:
            self._library.refuse("get", file_offset)
            found = os.preadv(self._file, [buffer.numpy().data], file_offset)
            self._library.posix_bytes += found
            return found - self._library.missing_bytes

        return Future(self._library, read)


class Kvikio:
    """The package.

    Attributes:
        settings: as they are now.
        requests: (path, file offset, bytes) of every read.
        under_way: reads that nobody has waited for.
        closed: files, in order.
        failing: (where, file offset) that raises: "pread" or "get".
        missing_bytes: less than asked for that every read gives.
        is_open: reads end while it is set.
    """

    def __init__(self) -> None:
        self.settings: dict[str, object] = {}
        self.requests: list[tuple[Path, int, int]] = []
        self.under_way = self.posix_bytes = self.gds_bytes = self.missing_bytes = 0
        self.is_open = threading.Event()
        self.is_open.set()
        self.closed: list[Path] = []
        self.failing: tuple[str, int] | None = None
        self.defaults = SimpleNamespace(set=self._set)

    def CuFile(self, path: Path, flags: str) -> CuFile:  # noqa: N802  kvikio's name
        return CuFile(self, path, flags)

    @contextlib.contextmanager
    def SummaryMonitor(self) -> Iterator[SimpleNamespace]:  # noqa: N802
        yield SimpleNamespace(get=lambda: SimpleNamespace(by_backend=self._by_backend()))

    def refuse(self, where: str, file_offset: int) -> None:
        if self.failing == (where, file_offset):
            raise RuntimeError("POSIX error on pread: Input/output error")

    def _by_backend(self) -> dict[str, dict[str, int]]:
        moved = {"POSIX": self.posix_bytes, "GDS": self.gds_bytes}
        return {name: {"bytes_transferred": num_bytes} for name, num_bytes in moved.items()}

    @contextlib.contextmanager
    def _set(self, settings: dict[str, object]) -> Iterator[None]:
        before, self.settings = self.settings, settings
        yield
        self.settings = before


def install(monkeypatch: pytest.MonkeyPatch) -> Kvikio:
    """Let every store of this process find a kvikio, whose reads go to RAM."""
    library = Kvikio()
    monkeypatch.setattr(gds, "load_library", lambda _: library)
    monkeypatch.setattr(gds, "checksums", granule_checksums)
    return library
