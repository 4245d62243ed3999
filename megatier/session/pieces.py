"""Pieces: the elements of a unit as they come from a file, (first element, flat values) in increasing order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

Piece = tuple[int, Tensor]
"""The first element, and the values of all, flat."""


def assemble(master: Tensor, elements: tuple[int, int], pieces: Iterator[Piece], ahead: Piece | None) -> Piece | None:
    """Put the elements of a run together from pieces, with zeros where no piece has any.

    Args:
        master: the elements of the run, which are overwritten.
        elements: the run [start, stop).
        pieces: (first element, flat values) in increasing order.
        ahead: the piece that reached beyond the run before.

    Returns:
        The piece that reaches beyond this run.
    """
    start, stop = elements
    done = start

    # Not by torch, which would start a team of threads for each thread that fills.
    numbers = master.numpy()
    while (piece := ahead or next(pieces, None)) is not None:
        first, values = piece
        lower = max(first, start)
        upper = min(first + values.numel(), stop)
        if lower < upper:
            # Between two tensors there is padding, which is in no piece.
            numbers[done - start : lower - start] = 0
            part = values[lower - first : upper - first].detach().to("cpu", torch.float32)
            np.copyto(numbers[lower - start : upper - start], part.numpy())
            done = upper

        # The rest of this piece, or all of it, belongs to the next run.
        if first + values.numel() > stop or first >= stop:
            break
        ahead = None

    numbers[done - start :] = 0
    return piece
