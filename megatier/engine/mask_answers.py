"""Answers what Hugging Face asks as it makes the masks of a batch, so that it reads nothing from the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import masking_utils

from megatier.models.masks import BlockMasks
from megatier.patch import patched

KINDS = "token_type_ids"
"""How transformers' names of the kind of each token end."""
REMAP = "remap_positions_for_packed_sequence"
"""Transformers' function by which masks are asked by positions, in versions that have it."""

MaskFunction = Callable[..., Tensor]
"""Says for (row, head, query, key) whether the query sees the key."""


def is_packed(batch: Mapping[str, Tensor]) -> bool:
    """Return whether rows of a batch hold several documents, which are to be kept apart."""
    return "position_ids" in batch


@contextmanager
def answering(batch: Mapping[str, Tensor], masks: BlockMasks) -> Iterator[list[Tensor]]:
    """Answer Hugging Face for a while whether position ids restart within a row; yields those that it asks about.

    Hugging Face would read them from the device. The host would wait for that, and for all work and copies that are
    queued before. Masks by blocks are made by `masks`.
    """
    asked = list[Tensor]()
    answer = _document_numbers if is_packed(batch) else _is_in_order

    def known(position_ids: Tensor) -> Tensor | None:
        # Noted, since a model that never asks cannot keep documents apart.
        asked.append(position_ids)
        return answer(position_ids)

    functions: dict[str, object] = {"find_packed_sequence_indices": known, "create_block_mask": masks.create}
    if is_packed(batch) and any(name.endswith(KINDS) for name in batch):
        functions[REMAP] = _by_place
    with patched(vars(masking_utils), **functions):
        yield asked


def _is_in_order(position_ids: Tensor) -> Tensor | None:
    """Answer for rows that hold one document each."""
    return None


def _document_numbers(position_ids: Tensor) -> Tensor:
    """Answer for rows that hold several documents: the number of each token's document in its row, from 0."""
    return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)


def _by_place(mask_function: MaskFunction, position_ids: Tensor) -> MaskFunction:
    """Return a mask's function as it is, to be asked by the places of tokens in their row.

    Transformers 5.24 asks by positions, which begin anew in each document. But it knows images by place, so tokens of a
    second document would see those at the places of the first one's image. Causal masks and windows look at distances
    alone, which are the same by place.
    """
    return mask_function
