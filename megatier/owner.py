"""The owner of an object: the process that has opened its threads, locks and files.

A forked child inherits the object without its threads. A lock may be held for ever by one of them, and the files belong
to the parent. So every public method checks the owner first, and a child that closes or collects the object does
nothing.
"""

from __future__ import annotations

import os

from megatier.errors import ForkedError


class Owner:
    """The process that made this object."""

    __slots__ = ("_process", "_what")

    def __init__(self, what: str) -> None:
        """Note this process.

        Args:
            what: a name for the object, as the subject of a sentence.
        """
        self._process = os.getpid()
        self._what = what

    @property
    def is_here(self) -> bool:
        """Whether this is that process, and not a forked child of it."""
        return os.getpid() == self._process

    def check(self) -> None:
        """Refuse to go on in a forked child.

        Raises:
            ForkedError: this is one.
        """
        if os.getpid() != self._process:
            raise ForkedError(self._what, self._process)
