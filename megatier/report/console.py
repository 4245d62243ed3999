"""Prints for a run, and drops what nobody takes.

So a run neither ends nor waits because of its reader, which may be a pipe that is closed or full, a terminal that is
gone, or a file on a full drive. `metrics.jsonl` has every figure anyway.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from typing import TYPE_CHECKING, TextIO, cast

from rich.console import Console

if TYPE_CHECKING:
    from megatier.ranks.ranks import Ranks


class NonBlockingStream(io.TextIOBase):
    """A stream that writes to another one's descriptor, as far as that takes it at once.

    It has no buffer. A buffer would hold on to what is dropped, and would refuse a signal's handler that prints while a
    print is under way.
    """

    encoding = "utf-8"
    """The other stream's encoding; rich draws with characters that it has."""

    def __init__(self, stream: TextIO) -> None:
        """Write to a stream's descriptor.

        Raises:
            OSError: it has none.
            ValueError: it is closed.
        """
        self._descriptor = stream.fileno()
        self.encoding = stream.encoding
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLOUT)

    def fileno(self) -> int:
        """Return the other stream's descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return whether a person looks at it."""
        return os.isatty(self._descriptor)

    def write(self, text: str, /) -> int:
        """Write as much as is taken at once, and drop the rest; return the length of the text."""
        rest = text.encode(self.encoding, "replace")
        with contextlib.suppress(OSError):
            # A pipe that can be written to takes PIPE_BUF bytes without waiting, and a larger piece might wait.
            while rest and self._poll.poll(0):
                rest = rest[os.write(self._descriptor, rest[: select.PIPE_BUF]) :]
        return len(text)


def run_console() -> Console:
    """Return the console of a run, on stdout."""
    try:
        return Console(file=cast(TextIO, NonBlockingStream(sys.stdout)))
    except (OSError, ValueError, AttributeError):
        # Python code captures stdout, which has no descriptor then, or the caller has closed it, so that it is None.
        return Console()


def console_of(ranks: Ranks | None, console: Console) -> Console:
    """Return the console of a run, which is silent on all ranks but the first."""
    return console if ranks is None or ranks.rank == 0 else Console(quiet=True)


def say(console: Console, words: str) -> None:
    """Print a line as it is, however long it is and whatever brackets it has."""
    console.print(words, markup=False, highlight=False, soft_wrap=True)


def announce(console: Console, words: str) -> None:
    """Say something before libraries are loaded that take seconds. The first rank alone does."""
    # By torchrun's own variable: ranks join only when the libraries are there.
    if os.environ.get("RANK", "0") == "0":
        say(console, words)
