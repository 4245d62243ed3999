"""The console of a run. It drops output that cannot be written at once.

So a run neither ends nor waits because of a pipe that is closed or full, a terminal that is gone, or a file on a full
drive. `metrics.jsonl` has every figure anyway.
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
    """A stream that writes to the descriptor of another one without waiting, and drops the rest.

    It has no buffer. A buffer would keep what is dropped, and would refuse a signal handler that prints while another
    print is under way.
    """

    encoding = "utf-8"
    """Encoding of the other stream. rich draws with the characters that it has."""

    def __init__(self, stream: TextIO) -> None:
        """Wrap a stream.

        Raises:
            OSError: the stream has no descriptor.
            ValueError: the stream is closed.
        """
        self._descriptor = stream.fileno()
        self.encoding = stream.encoding
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLOUT)

    def fileno(self) -> int:
        """Return the other stream's descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return whether the other stream is a terminal."""
        return os.isatty(self._descriptor)

    def write(self, text: str, /) -> int:
        """Write as much as possible without waiting, and drop the rest; return the length of the text."""
        rest = text.encode(self.encoding, "replace")
        with contextlib.suppress(OSError):
            # A pipe that is ready takes PIPE_BUF bytes without waiting. A larger write might wait.
            while rest and self._poll.poll(0):
                rest = rest[os.write(self._descriptor, rest[: select.PIPE_BUF]) :]
        return len(text)


def run_console() -> Console:
    """Return the console of a run, on stdout."""
    try:
        return Console(file=cast(TextIO, NonBlockingStream(sys.stdout)))
    except (OSError, ValueError, AttributeError):
        # stdout has no descriptor while Python code captures it, and is None if the caller has closed it.
        return Console()


def console_of(ranks: Ranks | None, console: Console) -> Console:
    """Return the console on the first rank, and a silent one on all others."""
    return console if ranks is None or ranks.rank == 0 else Console(quiet=True)


def say(console: Console, line: str) -> None:
    """Print a line without wrapping it or reading its brackets as markup."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def announce(console: Console, line: str) -> None:
    """Say on the first rank that libraries are being loaded, which takes seconds."""
    # The rank comes from torchrun's variable, since the ranks join once the libraries are loaded.
    if os.environ.get("RANK", "0") == "0":
        say(console, line)
