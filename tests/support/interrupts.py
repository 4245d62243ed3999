"""Interrupts at any line: what a signal handler may raise between two statements of the thread that trains."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import megatier

PACKAGE = Path(megatier.__file__).parent


def files_of(place: str) -> list[Path]:
    """The files of a room, or the one file that a place names; both from the package on."""
    room = PACKAGE / place
    files = sorted(room.rglob("*.py")) if room.is_dir() else [room.with_suffix(".py")]
    assert files
    assert all(file.is_file() for file in files), f"{place} is no room and no file of the package"
    return files


@functools.cache
def headers(path: Path) -> set[int]:
    """Lines of the heads of with and try statements: their ends count as such lines, where no signal is handled."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.With | ast.Try)]
    return {line for node in nodes for line in range(node.lineno, node.body[0].lineno)}


class Interrupts:
    """Counts the lines that this thread runs in some places, and raises KeyboardInterrupt before one of them.

    Attributes:
        count: of the lines so far.
    """

    def __init__(self, places: tuple[str, ...], at: int | None) -> None:
        """Places are those of `files_of`; `at` counts from 0, None: nowhere."""
        self._headers = {str(path): headers(path) for place in places for path in files_of(place)}
        self._at, self.count = at, 0

    def trace(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        """For sys.settrace."""
        if (left_out := self._headers.get(frame.f_code.co_filename)) is None:
            return None
        if event == "line" and frame.f_lineno not in left_out:
            self.count += 1
            if self.count - 1 == self._at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.trace


@contextmanager
def python_locks() -> Iterator[list[str]]:
    """Calls of this thread into Python code that takes and gives back a lock: an interrupt there leaves it locked."""
    called = list[str]()

    def trace(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_globals.get("__name__") in ("threading", "queue"):
            called.append(frame.f_code.co_qualname)

    sys.settrace(trace)
    try:
        yield called
    finally:
        sys.settrace(None)


@contextmanager
def interrupted(places: tuple[str, ...], at: int | None = None) -> Iterator[Interrupts]:
    """Raise before line `at` of those that run inside."""
    interrupts = Interrupts(places, at)
    sys.settrace(interrupts.trace)
    try:
        yield interrupts
    finally:
        sys.settrace(None)
