"""Sealing: the one time at which a store takes its memory and its files.

Threads: whoever calls holds the store's lock.
"""

from __future__ import annotations

from types import TracebackType

from megatier.errors import UnsealedError


class Sealing:
    """A context in which a store takes its memory and its files, once."""

    def __init__(self) -> None:
        """Note that the store has taken nothing."""
        self._failure: BaseException | None = None
        self.has_begun = False
        """Whether blocks and slots come too late."""

    def is_over(self) -> bool:
        """Return whether the store has all that it needs.

        Raises:
            UnsealedError: it tried to take it and failed. What it had taken is given back, so another try is no use.
        """
        if self._failure is not None:
            raise UnsealedError(self._failure) from self._failure
        return self.has_begun

    def __enter__(self) -> None:
        self.has_begun = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._failure = error
