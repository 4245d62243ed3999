"""Pinned memory, which the GPU reads and writes by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import ExitStack

import torch

from megatier.errors import MegatierError
from megatier.tier import cut_at_addresses

LOCKED_BYTES = 64 << 30
"""The most bytes that are pinned by one call: the driver refuses 512 GiB and more, whatever is free."""

LOCK_STEP_BYTES = 32 << 20
"""The bytes that are pinned by one call if the driver does not take a whole memory. Copies end where addresses are
multiples of it."""
SPARE_PIECES = 2
"""Pieces that are given back once the driver has refused one: torch pins a few bytes too, for inputs."""

PIN_REMEDY = "Raise the limit: `ulimit -l unlimited`, `docker run --ulimit memlock=-1`, or more memory in .wslconfig."
"""The remedy if the driver pins little."""


class PageLock:
    """Memory that is pinned in pieces, until `close`. No copy between RAM and the GPU may cross their ends."""

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

        # From the end on, so that what stays unlocked is one run at the beginning.
        for start, stop in reversed(list(cut_at_addresses(address, num_bytes, LOCK_STEP_BYTES))):
            try:
                self._add(address + start, stop - start)
            except MegatierError:
                return self._give_back(added, stop)
            added.append(stop)
        return 0

    def _give_back(self, ends: list[int], start: int) -> int:
        """Unlock the last pieces, which have these ends; return where the first of the others starts."""
        # Those that were locked last lie first, so what stays locked is one run too.
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
    """Take back the error that the driver keeps, which torch would raise as that of the next kernel."""
    # A small kernel gets it, so that no other one does. Without a context of CUDA there is no kernel that could.
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):
            torch.ones(1, dtype=torch.uint8, device="cuda")
