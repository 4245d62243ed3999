"""Rows of tokens as the arguments of a model: `input_ids`, `labels`, and `position_ids` if documents are apart."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from megatier.data.packer import FIRST_MARK, LEARNT_MARK, MARK_BITS

IGNORED = -100
"""Label of a token that is not learnt, as Hugging Face has it."""


def make_columns(rows: NDArray[np.integer], *, is_apart: bool) -> dict[str, torch.Tensor]:
    """Return the model's arguments for rows of marked tokens, all int64 [rows, length].

    These are `input_ids`; `labels`, which are equal or -100 for a token that is not learnt (the model shifts them);
    and, if documents are apart, `position_ids`, which count from 0 in each document.
    """
    ids = (rows >> MARK_BITS).astype(np.int64)
    labels = np.where(rows & LEARNT_MARK, ids, IGNORED)
    columns = {"input_ids": ids, "labels": labels}
    if is_apart:
        begins = rows & FIRST_MARK != 0

        # A first token has nothing before it from which it could be told. Labels are not shifted yet.
        labels[begins] = IGNORED

        # A position counts from the last token at or before it that begins a document. A row's first token has position
        # 0 whether or not it begins one.
        order = np.arange(rows.shape[1])
        begin_or_0 = np.where(begins, order, 0)
        last_begin = np.maximum.accumulate(begin_or_0, axis=1)
        columns["position_ids"] = order - last_begin
    return {name: torch.from_numpy(column) for name, column in columns.items()}


def split_groups(batch: Mapping[str, torch.Tensor], count: int) -> list[dict[str, torch.Tensor]]:
    """Return the rows of a batch in so many groups, or fewer if it has fewer rows."""
    # A group has the same rows of every column: ids, labels, and positions if documents are apart.
    columns = [value.chunk(count) for value in batch.values()]
    return [dict(zip(batch, rows, strict=True)) for rows in zip(*columns, strict=True)]


def count_real_tokens(batch: Mapping[str, torch.Tensor]) -> int:
    """Return the number of a batch's tokens without the fill.

    If documents are apart, a token that is alone in one teaches nothing.
    """
    if "attention_mask" in batch:
        return int(batch["attention_mask"].sum())
    count = batch["input_ids"].numel()
    if "position_ids" not in batch:
        return count

    # Of images that are counted in several directions, the first positions are those of tokens.
    positions = batch["position_ids"]
    if positions.dim() == 3:
        positions = positions[0]

    # A token is fill if a document begins with it and another one with the next token, or the row ends.
    begins = torch.nn.functional.pad(positions, (0, 1)) == 0
    is_fill = begins[:, :-1] & begins[:, 1:]
    num_fill = int(is_fill.sum())
    return count - num_fill
