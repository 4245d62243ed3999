"""A count of pieces of work that no queue counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class WorkCount:
    """Counts the pieces of some work in any thread. One count that is lost among many does no harm."""

    def __init__(self) -> None:
        """Begin with none."""
        self.count = 0

    def counting(self, work: Callable[P, R]) -> Callable[P, R]:
        """Return work of which each call counts when it is over."""

        def counted(*args: P.args, **kwargs: P.kwargs) -> R:
            result = work(*args, **kwargs)
            self.count += 1
            return result

        return counted

    @property
    def begun(self) -> int | None:
        """The count; None before the first piece."""
        return self.count or None
