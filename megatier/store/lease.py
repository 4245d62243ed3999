"""Leases: who may use the bytes of a copy, and for how long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from megatier.store.residency import Copy, Span

if TYPE_CHECKING:
    from megatier.store.store import TieredStore


class Lease:
    """The right to use a resident copy until exit.

    Attributes:
        bytes: uint8 [stop - start] on the tier's device; valid until exit.
    """

    def __init__(self, store: TieredStore, copy: Copy, span: Span) -> None:
        """Only TieredStore.lease makes one, and has counted it by then."""
        self._store = store
        self._copy = copy
        self._held = True
        self._resets = store._resets
        self.bytes = store._copies.view(copy, span)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def release(self) -> None:
        """Give the right back. Compute enqueued so far on the current stream still reads valid bytes."""
        assert self._held, f"{self._copy.block.spec.key} was released twice"
        # A store that was reset since has no leases any more, and the copy's slot may be somebody else's.
        with self._store.tear.change:
            self._held = False
            if self._resets == self._store._resets:
                self._store._release(self._copy)
