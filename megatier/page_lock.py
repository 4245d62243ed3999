"""Page-locked memory, which the GPU reads and writes by itself."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

import torch

from megatier.errors import MegatierError

LOCKED_BYTES = 64 << 30
"""The most bytes that are page-locked by one call: the driver refuses 512 GiB and more, whatever is free."""


class PageLock:
    """Memory that is page-locked in pieces, until `close`. No copy between RAM and the GPU may cross their ends."""

    def __init__(self, address: int, pieces: Iterable[tuple[int, int]]) -> None:
        """Page-lock the pieces [start, stop), counted from an address. After an error none stays locked.

        Raises:
            MegatierError: CUDA refused.
        """
        self._locked: list[int] = []
        cudart = torch.cuda.cudart()
        with ExitStack() as undone:
            undone.callback(self.close)
            for start, stop in pieces:
                first = address + start
                code = cudart.cudaHostRegister(first, stop - start, 0)
                if code != cudart.cudaError.success:
                    reason = cudart.cudaGetErrorString(code)
                    raise MegatierError(f"CUDA refused to page-lock memory ({reason}).")
                self._locked.append(first)
            undone.pop_all()

    def close(self) -> None:
        """Give the memory back. Closing twice is safe."""
        while self._locked:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._locked.pop()))
