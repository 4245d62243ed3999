"""Sealing: the allocation of a store's memory and files, which happens once.

Threads: the caller holds the store's lock.
"""

from __future__ import annotations

from types import TracebackType

from megatier.errors import UnsealedError


class Sealing:
    """The context in which a store allocates its memory and files, once."""

    def __init__(self) -> None:
        """Begin before the allocation."""
        self._failure: BaseException | None = None
        self.has_begun = False
        """Whether it is too late to register blocks and reserve slots."""

    def is_over(self) -> bool:
        """Return whether everything is allocated.

        Raises:
            UnsealedError: the allocation has failed. What was allocated stays until the store is closed.
        """
        if self._failure is not None:
            raise UnsealedError(self._failure) from self._failure
        return self.has_begun

    def __enter__(self) -> None:
        self.has_begun = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Kept, so that later calls name the cause instead of finding half of the memory.
        self._failure = error
