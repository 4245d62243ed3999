"""Tokens of a file, as numbered sequences of equal length.

`packed_text` reads its batches here, in the training thread or in that of a loader.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megatier.data.columns import make_columns
from megatier.errors import DataError
from megatier.files import open_regular


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRange:
    """Consecutive tokens of a file, in which sequences are counted."""

    path: Path
    dtype: np.dtype[np.unsignedinteger]
    """The integers of the file: a token's id with the marks of `packer` below it."""
    start: int
    """Number of its first token in the file."""
    num_tokens: int
    """The number of tokens."""
    is_apart: bool
    """Whether documents are apart, so that positions and attention start anew in each of them."""
    crc32: int
    """CRC32 of the whole file."""
    num_documents: int | None = None
    """Documents in it; None: unknown."""
    num_learnt: int | None = None
    """Tokens in it that are learnt; None: unknown."""

    def read(self, numbers: Sequence[int], length: int) -> dict[str, torch.Tensor]:
        """Return the sequences of these numbers, as `make_columns` gives them.

        The file is read and not mapped, because mapped pages would count as this process's.

        Raises:
            DataError: the file was cut short or removed from outside.
        """
        rows = np.empty((len(numbers), length), self.dtype)
        try:
            with os.fdopen(open_regular(self.path), "rb") as file:
                for row, number in zip(rows, numbers, strict=True):
                    first = self.start + number * length
                    file.seek(first * self.dtype.itemsize)
                    # Without the count numpy would spread the last token of a file that was cut over the whole row.
                    row[:] = np.frombuffer(file.read(row.nbytes), self.dtype, count=length)
        except (OSError, ValueError) as error:
            raise DataError(
                f"cannot read tokens from {self.path}: {error}. Something outside the run changed the file; `megatier "
                "resume` makes it again."
            ) from error

        return make_columns(rows, is_apart=self.is_apart)

    def batches(self, batch: int, length: int) -> Iterator[dict[str, torch.Tensor]]:
        """Yield all whole sequences in order, so many at a time."""
        numbers = range(self.num_tokens // length)
        for start in range(0, len(numbers), batch):
            some = numbers[start : start + batch]
            yield self.read(some, length)
