"""Tears: changes that something broke off between two of their parts.

Python raises what a signal handler raises (Ctrl-C, an alarm, the watchdog) between any two statements of the main
thread. If a change has several parts, such as noting a unit and submitting its update, that leaves neither the old
state nor the new one. So such a change runs inside a region, and an error that leaves a region early is remembered:
from then on the state is refused, until all of it is loaded anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatier.errors import MegatierError, StallError, TornStateError

HARMLESS = "_megatier_finds_nothing_half_done"
"""Attribute that marks an error that came in a wait."""


class Tear:
    """Whether a change was broken off. There is one for a store and all that works with it; regions may be nested.

    Attributes:
        is_torn: a change was broken off.
        change: a region out of which no error comes on purpose.
        call: a region that may refuse by one of our errors, as if it had never begun.
    """

    def __init__(self) -> None:
        """Begin whole."""
        self.is_torn = False
        self.change = Region(self, refuses=False)
        self.call = Region(self, refuses=True)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait inside a region. An error that is raised in here tears nothing.

        Nothing is half done while one waits, and the code around undoes what it has begun as the error passes.
        """
        try:
            yield
        except BaseException as error:
            setattr(error, HARMLESS, True)  # on the error itself: a note of it here would keep all its frames
            raise

    def check(self) -> None:
        """Refuse to go on with torn state.

        Raises:
            TornStateError: a change was broken off.
        """
        if self.is_torn:
            raise TornStateError

    def tears(self, error: BaseException, *, refuses: bool) -> bool:
        """Whether a region that ends with this error leaves something half done."""
        if hasattr(error, HARMLESS):
            return False
        # The watchdog's error is one of ours, but a signal handler raises it, between any two statements.
        return not refuses or isinstance(error, StallError) or not isinstance(error, MegatierError)


class Region:
    """Statements of which all are done, or none; else the tear shows. Any thread may enter it any number of times."""

    def __init__(self, tear: Tear, *, refuses: bool) -> None:
        """Only Tear makes one."""
        self._tear = tear
        self._refuses = refuses

    def __enter__(self) -> None:
        """An interrupt in here comes before the first statement, one at the start of `__exit__` after the last."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._tear.tears(error, refuses=self._refuses):
            self._tear.is_torn = True
