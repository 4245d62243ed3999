"""Rows of tokens as the arguments of a model: `input_ids`, `labels`, and `position_ids` if documents are apart."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from megatier.data.packer import FIRST_MARK, LEARNT_MARK, MARK_BITS

IGNORE_INDEX = -100
"""Label of a token that is not learnt, as Hugging Face has it."""


def make_columns(rows: NDArray[np.integer], *, is_apart: bool) -> dict[str, torch.Tensor]:
    """Return the arguments of the model for rows of marked tokens, all int64 [rows, length].

    These are `input_ids`; `labels`, which are equal to them, or -100 for a token that is not learnt (the model shifts
    them); and, if documents are apart, `position_ids`, which count from 0 in each document.
    """
    ids = (rows >> MARK_BITS).astype(np.int64)
    labels = np.where(rows & LEARNT_MARK, ids, IGNORE_INDEX)
    columns = {"input_ids": ids, "labels": labels}
    if is_apart:
        begins = rows & FIRST_MARK != 0

        # The first token of a document cannot be predicted from anything. Labels are not shifted yet.
        labels[begins] = IGNORE_INDEX

        # A position counts from the last token up to it that begins a document. The first token of a row has position
        # 0 in any case.
        order = np.arange(rows.shape[1])
        begin_or_0 = np.where(begins, order, 0)
        last_begin = np.maximum.accumulate(begin_or_0, axis=1)
        columns["position_ids"] = order - last_begin
    return {name: torch.from_numpy(column) for name, column in columns.items()}


def split_groups(batch: Mapping[str, torch.Tensor], count: int) -> list[dict[str, torch.Tensor]]:
    """Return the rows of a batch as `count` groups, or fewer if it has fewer rows."""
    # A group has the same rows of each column.
    columns = [value.chunk(count) for value in batch.values()]
    return [dict(zip(batch, rows, strict=True)) for rows in zip(*columns, strict=True)]


def count_real_tokens(batch: Mapping[str, torch.Tensor]) -> int:
    """Return the number of a batch's tokens without padding."""
    if "attention_mask" in batch:
        return int(batch["attention_mask"].sum())
    count = batch["input_ids"].numel()
    if "position_ids" not in batch:
        return count

    # If positions have three axes, as with images, the first axis is that of tokens.
    positions = batch["position_ids"]
    if positions.dim() == 3:
        positions = positions[0]

    # A token is padding if a document begins with it, and another one with the next token or at the end of the row.
    begins = torch.nn.functional.pad(positions, (0, 1)) == 0
    is_fill = begins[:, :-1] & begins[:, 1:]
    num_fill = int(is_fill.sum())
    return count - num_fill
