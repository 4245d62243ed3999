"""Marks changes that something broke off between two of their parts.

A signal handler (Ctrl-C, an alarm, the watchdog) may raise between any two statements of the main thread. If a change
has several parts, such as noting a unit and submitting its update, this leaves neither the old state nor the new one.
So such a change runs inside a region. An error that leaves the region early is remembered. From then on the state is
refused, until all of it is loaded anew. State that is being loaded counts as whole only when the last of it is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatier.errors import MegatierError, StallError, TornStateError

HARMLESS = "_megatier_finds_nothing_half_done"
"""The attribute that marks an error that was raised in a wait."""


class Consistency:
    """Knows whether a change was broken off. A store and everything that works with it share one.

    Regions may lie inside each other.
    """

    def __init__(self) -> None:
        """Begin with state that is whole."""
        self.is_torn = False
        """Whether a change was broken off, so that perhaps nobody knows who has the slots."""
        self.is_overwritten = False
        """Whether all state is being overwritten, or was until something broke that off."""
        self.change = Region(self, refuses=False)
        """A region that raises no error on purpose and is never half done in order to wait. So any error tears the
        state, also one that was raised in a wait further inside."""
        self.call = Region(self, refuses=True)
        """A region that may refuse by an error of megatier before it has changed anything, and of which a wait leaves
        nothing half done. Any other error tears."""

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait inside regions. An error that is raised in here tears no `call`.

        Nothing of a call is half done during a wait, and the code that waits undoes its own beginnings as the error
        passes. It cannot undo what somebody has begun who called it: a `change` further outside is torn.
        """
        try:
            yield
        except BaseException as error:
            setattr(error, HARMLESS, True)  # the mark is on the error, since a list here would keep all its frames
            raise

    @contextlib.contextmanager
    def overwriting(self) -> Iterator[None]:
        """Overwrite all state inside. It is not whole from before the first byte until this ends without an error."""
        # Noted before, and not in passing as an error leaves: a second interrupt may come on the way out.
        self.is_overwritten = True
        yield
        self.is_overwritten = False

    def check(self) -> None:
        """Refuse to go on with torn state.

        Raises:
            TornStateError: a change was broken off, or the state is not all loaded.
        """
        if self.is_torn or self.is_overwritten:
            raise TornStateError

    def tears(self, error: BaseException, *, refuses: bool) -> bool:
        """Return whether a region that ends with this error leaves something half done."""
        if not refuses:
            return True

        # The watchdog's error is one of megatier's, but a signal handler raises it, between any two statements.
        is_refusal = isinstance(error, MegatierError) and not isinstance(error, StallError)
        was_in_wait = hasattr(error, HARMLESS)
        return not is_refusal and not was_in_wait


class Region:
    """Statements of which all are done, or none, or the tear tells. Any thread may enter it, any number of times."""

    def __init__(self, consistency: Consistency, *, refuses: bool) -> None:
        """Belong to a tear, which alone makes regions."""
        self._consistency = consistency
        self._refuses = refuses

    def __enter__(self) -> None:
        """Begin. An interrupt in here comes before the first statement of the region.

        An interrupt at the start of `__exit__` comes after its last statement. So neither of them tears.
        """

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._consistency.tears(error, refuses=self._refuses):
            self._consistency.is_torn = True
