"""The consistency of training state: whether an interrupt has left a change half done.

A signal handler (Ctrl-C, an alarm, the watchdog) may raise between any two statements of the main thread. If a change
has several parts, such as noting a unit and submitting its update, only some of them may be done then. So each such
change runs inside a region. An error that leaves a region early marks the state as torn, and torn state is refused
until all of it was loaded again. While state is being loaded it counts as torn until its last byte is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatier.errors import MegatierError, StallError, TornStateError

HARMLESS = "_megatier_finds_nothing_half_done"
"""The attribute that marks an error that was raised in a wait."""


class Consistency:
    """Whether state is whole. A store and all objects that work with it share one. Regions may be nested."""

    def __init__(self) -> None:
        """Begin with state that is whole."""
        self.is_torn = False
        """Whether a change was interrupted, so that the owners of slots may be unknown."""
        self.is_overwritten = False
        """Whether all state is being overwritten, or was when an interrupt came."""
        self.change = Region(self, refuses=False)
        """A region whose statements raise nothing on purpose. Any error tears the state, even one from a wait
        inside."""
        self.call = Region(self, refuses=True)
        """A region that may raise an error of megatier before it has changed anything, and that may be interrupted in a
        wait. Any other error tears the state."""

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait inside regions. An error that is raised in here does not tear a `call`.

        During a wait nothing of a `call` is half done, and the waiting code undoes its own work when the error passes.
        It cannot undo the work of its callers, so a `change` outside is torn.
        """
        try:
            yield
        except BaseException as error:
            setattr(error, HARMLESS, True)  # a list of errors here would keep all their frames alive
            raise

    @contextlib.contextmanager
    def overwriting(self) -> Iterator[None]:
        """Overwrite all state inside. The state is torn until the block ends without an error."""
        # Set in advance, because a second interrupt could come while an error leaves the block.
        self.is_overwritten = True
        yield
        self.is_overwritten = False

    def check(self) -> None:
        """Refuse to go on with torn state.

        Raises:
            TornStateError: a change was interrupted, or the state is not all loaded.
        """
        if self.is_torn or self.is_overwritten:
            raise TornStateError

    def tears(self, error: BaseException, *, refuses: bool) -> bool:
        """Return whether a region that ends with this error may have left something half done."""
        if not refuses:
            return True

        # The watchdog's error is one of megatier's, but a signal handler raises it, so it comes anywhere.
        is_refusal = isinstance(error, MegatierError) and not isinstance(error, StallError)
        was_in_wait = hasattr(error, HARMLESS)
        return not is_refusal and not was_in_wait


class Region:
    """Statements that are all done or none, or else the state is torn. Any thread may enter it, repeatedly."""

    def __init__(self, consistency: Consistency, *, refuses: bool) -> None:
        """Belong to a `Consistency`, which alone makes regions."""
        self._consistency = consistency
        self._refuses = refuses

    def __enter__(self) -> None:
        """Begin. An interrupt in here comes before the first statement of the region, and so does not tear.

        Nor does one at the start of `__exit__`, which comes after the last statement.
        """

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._consistency.tears(error, refuses=self._refuses):
            self._consistency.is_torn = True
