"""Counts work that no queue counts, so that the watchdog sees it go on: files that are filled, files of an export."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class WorkCount:
    """A count of finished calls, from any thread. It has no lock: a count that is lost among many does no harm."""

    def __init__(self) -> None:
        """Begin at 0."""
        self.count = 0

    def counting(self, work: Callable[P, R]) -> Callable[P, R]:
        """Return the same function, which also counts each call that has ended."""

        def counted(*args: P.args, **kwargs: P.kwargs) -> R:
            result = work(*args, **kwargs)
            self.count += 1
            return result

        return counted

    @property
    def begun(self) -> int | None:
        """The count; None before the first call has ended."""
        return self.count or None
