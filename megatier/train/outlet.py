"""Where a run prints. What nobody takes is dropped: a run neither ends nor waits because of who reads it.

A pipe that is closed or full, a terminal that is gone, a file on a full drive: `metrics.jsonl` has every figure anyway.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from typing import TextIO, cast

from rich.console import Console


class Outlet(io.TextIOBase):
    """A stream in front of another one's descriptor.

    It has no buffer, which would hold on to what is dropped, and would refuse a signal's handler that prints while a
    print is under way.
    """

    encoding = "utf-8"
    """The other stream's: rich draws with characters that it has."""

    def __init__(self, stream: TextIO) -> None:
        """Go to the stream's descriptor.

        Raises:
            OSError: it has none.
            ValueError: it is closed.
        """
        self._descriptor = stream.fileno()
        self.encoding = stream.encoding
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLOUT)

    def fileno(self) -> int:
        """The other stream's."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether a person looks at it."""
        return os.isatty(self._descriptor)

    def write(self, text: str, /) -> int:
        """Write what is taken at once. A pipe that can be written to takes PIPE_BUF bytes without waiting."""
        rest = text.encode(self.encoding, "replace")
        with contextlib.suppress(OSError):
            while rest and self._poll.poll(0):
                rest = rest[os.write(self._descriptor, rest[: select.PIPE_BUF]) :]
        return len(text)


def run_console() -> Console:
    """The console of a run, on stdout."""
    try:
        return Console(file=cast(TextIO, Outlet(sys.stdout)))
    except (OSError, ValueError, AttributeError):  # captured by Python code, or closed by the caller: None
        return Console()


def say(console: Console, words: str) -> None:
    """Print a line as it is, however long it is and whatever brackets it has."""
    console.print(words, markup=False, highlight=False, soft_wrap=True)
