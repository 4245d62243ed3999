"""Owner: the process that has opened something which has threads, locks and files.

A forked child inherits the object and nothing that works for it. Its threads are not there, a lock may be held for ever
by one of them, and the files are the parent's. So every way in asks the owner first, and whatever closes or collects
the object in a child leaves all of it to the parent.
"""

from __future__ import annotations

import os

from megatier.errors import ForkedError


class Owner:
    """The process that made this."""

    __slots__ = ("_process", "_what")

    def __init__(self, what: str) -> None:
        """Note this process.

        Args:
            what: what it has opened, as the subject of a sentence.
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
