"""A place in a stream of texts, as a checkpoint notes it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from megatier.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """The place in a stream where a sequence ends."""

    epoch: int = 0
    """The number of times that the stream was read to its end before."""
    window: int = 0
    """Number of the window in the epoch."""
    dataset: dict[str, Any] | None = None
    """`IterableDataset.state_dict` before the window; None: the beginning."""
    used: int = 0
    """Tokens of the window that belong to this sequence and those before."""
    crc32: int = 0
    """CRC32 of these tokens."""

    def after(self, tokens: NDArray[np.int64]) -> Position:
        """Return the position after these tokens of the window."""
        crc32 = zlib.crc32(tokens.tobytes(), self.crc32)
        return replace(self, used=self.used + len(tokens), crc32=crc32)

    @classmethod
    def read(cls, stored: object) -> Self:
        """Return the position that a checkpoint holds.

        Raises:
            CheckpointError: it is none.
        """
        names = ("epoch", "window", "used", "crc32")
        if not isinstance(stored, Mapping) or stored.keys() != {*names, "dataset"}:
            raise CheckpointError("the checkpoint is damaged: it has no position in the stream.")

        # By type: True is an int for Python.
        counts = [stored[name] for name in names]
        are_counts = all(type(count) is int and count >= 0 for count in counts)
        has_state = isinstance(stored["dataset"], dict | None)
        if not (are_counts and has_state):
            raise CheckpointError(f"the checkpoint is damaged: its position in the stream is {str(stored)[:200]}.")
        return cls(**stored)
