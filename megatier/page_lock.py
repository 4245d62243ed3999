"""Pinned RAM, which the GPU can read and write directly. Arenas, rings and shared RAM use it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import ExitStack

import torch

from megatier.errors import MegatierError
from megatier.tier import cut_at_addresses

LOCKED_BYTES = 64 << 30
"""The most bytes that one call pins. The driver refuses 512 GiB and more, even if they are free."""

LOCK_STEP_BYTES = 32 << 20
"""The bytes that are pinned by one call if the driver does not take a whole memory. Copies end where addresses are
multiples of it."""
SPARE_PIECES = 2
"""Pieces that are given back once the driver has refused one: torch pins a few bytes too, for inputs."""

PIN_REMEDY = "Raise the limit: `ulimit -l unlimited`, `docker run --ulimit memlock=-1`, or more memory in .wslconfig."
"""The remedy if the driver pins only little RAM."""


class PageLock:
    """Memory that is pinned in pieces, until `close`. No copy between RAM and the GPU may cross the end of a piece."""

    def __init__(self, address: int, pieces: Iterable[tuple[int, int]]) -> None:
        """Pin the pieces [start, stop), counted from an address. After an error none stays locked.

        Raises:
            MegatierError: CUDA refused.
        """
        self._locked: list[int] = []
        with ExitStack() as undone:
            undone.callback(self.close)
            for start, stop in pieces:
                self._add(address + start, stop - start)
            undone.pop_all()

    def add_end(self, address: int, num_bytes: int) -> int:
        """Pin as much of the end of a memory as the driver takes, by pieces of LOCK_STEP_BYTES.

        Args:
            address: of the memory.
            num_bytes: its size, in whole pages.

        Returns:
            The offset from which on it is pinned: 0 if the driver takes all, its size if nothing.
        """
        added: list[int] = []

        # From the end on, so that the memory that is not pinned is one run at the beginning.
        for start, stop in reversed(list(cut_at_addresses(address, num_bytes, LOCK_STEP_BYTES))):
            try:
                self._add(address + start, stop - start)
            except MegatierError:
                return self._give_back(added, stop)
            added.append(stop)
        return 0

    def _give_back(self, ends: list[int], start: int) -> int:
        """Unpin the last pieces, which have these ends. Return the start of the remaining run."""
        # The pieces that were pinned last have the lowest addresses, so one run remains.
        for end in ends[-SPARE_PIECES:][::-1]:
            self._unlock_last()
            start = end
        return start

    def _add(self, first: int, num_bytes: int) -> None:
        """Pin one piece.

        Raises:
            MegatierError: CUDA refused.
        """
        cudart = torch.cuda.cudart()
        code = cudart.cudaHostRegister(first, num_bytes, 0)
        if code != cudart.cudaError.success:
            _forget_error()
            reason = cudart.cudaGetErrorString(code)
            raise MegatierError(f"CUDA refused to pin memory ({reason}).")
        self._locked.append(first)

    def close(self) -> None:
        """Give the memory back. Closing twice is safe."""
        while self._locked:
            self._unlock_last()

    def _unlock_last(self) -> None:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._locked.pop()))


def _forget_error() -> None:
    """Clear the error that the driver keeps, which torch would raise at the next kernel."""
    # A small kernel gets the error. Without a CUDA context no kernel can.
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):
            torch.ones(1, dtype=torch.uint8, device="cuda")
