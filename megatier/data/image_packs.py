"""Lays conversations with images side by side into sequences: whole ones, each with positions of its own.

A sequence has a fixed number of tokens, and patches up to a bound, so that the memory of a step is bounded too. Which
conversations share one is decided once, as they are read. Positions are the model's own: those that it counts itself
for images in a conversation that is alone, such as M-RoPE.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatier.config.data_section import DataConfig
from megatier.data.image_rows import ImageRow
from megatier.errors import DataError, UnsupportedModelError

Pack = tuple[ImageRow, ...]
"""Conversations that share a sequence."""
Columns = Mapping[str, Tensor]
"""What a model takes of one conversation: its tokens as one row without padding, and its pixels."""
Positions = Callable[[Columns], Tensor]
"""Gives the positions of a conversation's tokens: int64 [1, tokens], or [4, 1, tokens] if images are counted in three
directions. The first of these four are the numbers of the tokens."""

KINDS = "token_type_ids"
"""Transformers' name of the kind of each token: 1 in images."""
MORE_KINDS = "mm_token_type_ids"
"""Its name of kinds that tell images from videos."""
MASKS_BY_IMAGES = "create_masks_for_vision_model"
"""Transformers' name of the function that makes masks of whole images, in a model's own module."""


def pack_images(rows: Sequence[ImageRow], num_tokens: int, max_patches: int) -> list[Pack]:
    """Return which conversations share a sequence: the longest first, each in the fullest one that has room for it.

    Sequences come in the order of their first conversations.

    Args:
        rows: conversations, none of them larger than a sequence.
        num_tokens: tokens of a sequence.
        max_patches: the most patches of one.
    """
    # This is best fit decreasing: long ones need new sequences anyway, and short ones fill what is left.
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for place in sorted(range(len(rows)), key=lambda place: -rows[place].num_tokens):
        row = rows[place]
        fits = [
            number
            for number, (tokens, patches) in enumerate(room)
            if row.num_tokens <= tokens and row.num_patches <= patches
        ]
        if fits:
            # By free tokens, and by free patches among those with equally many.
            number = min(fits, key=lambda number: room[number])
        else:
            number = len(packs)
            packs.append([])
            room.append((num_tokens, max_patches))
        tokens, patches = room[number]
        room[number] = tokens - row.num_tokens, patches - row.num_patches
        packs[number].append(place)

    # Sorting by length was for packing alone, so all is in the order of the records again.
    return [tuple(rows[place] for place in sorted(pack)) for pack in sorted(packs, key=min)]


def positions_of(model: PreTrainedModel) -> Positions:
    """Return what gives the positions of a model's tokens in a conversation that is alone.

    Raises:
        UnsupportedModelError: attention of this model looks forward, and not in images alone, so its masks are not
            known to stop where a conversation does.
    """
    # A model that counts images in several directions has this method, and takes four rows of positions.
    counts: Callable[..., Any] | None = None
    for module in model.modules():
        counts = counts or getattr(module, "get_rope_index", None)
    if counts is None:
        if _looks_forward(model) and not _sees_by_images(model):
            raise UnsupportedModelError(
                f"{type(model).__name__} looks forward in more than its images, so conversations with images cannot "
                "share its sequences. Set data.max_patches to null."
            )
        return lambda columns: _numbers(columns)[None]

    wanted = inspect.signature(counts).parameters

    def count(columns: Columns) -> Tensor:
        # Models count by what describes their images, and each takes other columns for that.
        given = {}
        for name in wanted:
            if name in columns:
                given[name] = columns[name]
        of_images, _ = counts(**given)

        # [1, 1, tokens] before [3, 1, tokens].
        of_tokens = _numbers(columns)
        return torch.cat([of_tokens.expand(1, 1, -1), of_images])

    return count


def _looks_forward(model: PreTrainedModel) -> bool:
    """Return whether a model is told of which kind each token is, so that its attention may look forward."""
    return KINDS in inspect.signature(model.forward).parameters


def _sees_by_images(model: PreTrainedModel) -> bool:
    """Return whether tokens look forward only within their own image, as Gemma 3's do, and never past it."""
    is_told_more = MORE_KINDS in inspect.signature(model.forward).parameters
    return not is_told_more and MASKS_BY_IMAGES in vars(sys.modules[type(model).__module__])


def _numbers(columns: Columns) -> Tensor:
    """Return the numbers of a conversation's tokens: int64 [tokens]."""
    ids = columns["input_ids"]
    return torch.arange(ids.shape[1], dtype=torch.int64, device=ids.device)


def join_rows(
    packs: Sequence[Sequence[Columns]], num_tokens: int, pad_token: int, positions: Positions
) -> dict[str, Tensor]:
    """Return what the model takes of some sequences, each of several conversations.

    Args:
        packs: the columns of each conversation, its labels among them, without padding.
        num_tokens: tokens of a sequence. The rest of one is fill, of which each token is a document of its own.
        pad_token: the token of the fill.
        positions: gives the positions of a conversation.

    Raises:
        DataError: images of two conversations would touch, in a model that sees a whole image at once.
    """
    rows = [_sequence(pack, num_tokens, pad_token, positions) for pack in packs]
    joined = {}
    for name in _names_in(rows):
        parts = [row[name] for row in rows if name in row]

        # Positions of three axes have the axis before the row.
        has_axes = name == "position_ids" and parts[0].dim() == 3
        joined[name] = torch.cat(parts, dim=1 if has_axes else 0)
    return joined


def _sequence(pack: Sequence[Columns], num_tokens: int, pad_token: int, positions: Positions) -> dict[str, Tensor]:
    """Return the columns of one sequence: a row of each for tokens, and pixels one after the other."""
    fill = {"input_ids": pad_token, "labels": -100}
    by_token = []
    ends_in_image = False
    for columns in pack:
        of_tokens = _of_tokens(columns)
        kinds = of_tokens.get(KINDS)
        begins_with_image = kinds is not None and bool(kinds[0, 0] == 1)
        if ends_in_image and begins_with_image:
            raise DataError(
                "a conversation ends with an image, and the next one of its sequence begins with one, so the model "
                "would take both for one image. Set data.max_patches to null."
            )
        ends_in_image = kinds is not None and bool(kinds[0, -1] == 1)
        by_token.append({**of_tokens, "position_ids": positions(columns)})

    joined: dict[str, Tensor] = {}
    for name in _names_in(by_token):
        parts = []
        for columns in by_token:
            # A processor may describe tokens only where there is an image.
            absent = torch.zeros_like(columns["input_ids"])
            parts.append(columns.get(name, absent))
        joined_part = torch.cat(parts, dim=-1)
        left = num_tokens - joined_part.shape[-1]
        joined[name] = torch.nn.functional.pad(joined_part, (0, left), value=fill.get(name, 0))

    # The rest are pixels and what describes them. Which tokens count is told by positions, and not by a mask.
    for name in _names_in(pack):
        if name not in joined and name != "attention_mask":
            parts = [columns[name] for columns in pack if name in columns]
            joined[name] = torch.cat(parts)
    return joined


def _names_in(columns: Iterable[Columns]) -> list[str]:
    """Return the names of all these columns, each once, in their order."""
    names: dict[str, None] = {}
    for given in columns:
        names |= dict.fromkeys(given)
    return list(names)


def _of_tokens(columns: Columns) -> dict[str, Tensor]:
    """Return the columns that have a number for each token. The mask is told by positions."""
    shape = columns["input_ids"].shape
    return {name: column for name, column in columns.items() if column.shape == shape and name != "attention_mask"}


def without_first(labels: Tensor) -> Tensor:
    """Return labels of a conversation whose first token is not told from the conversation before."""
    labels = labels.clone()
    labels[:, 0] = -100
    return labels


def check_room(num_tokens: int, num_patches: int, num_images: int, config: DataConfig, place: str) -> None:
    """Refuse a conversation that has more tokens or patches than a sequence may have.

    Args:
        num_tokens: its tokens.
        num_patches: its patches; of a model whose images are equally large, its images.
        num_images: its images.
        config: what a sequence may have.
        place: where it comes from.

    Raises:
        DataError: it has more.
    """
    if num_tokens > config.sequence_length:
        raise DataError(
            f"{place}: the conversation has {num_tokens:,} tokens with its images, and data.sequence_length is "
            f"{config.sequence_length:,}. Raise it, let the processor make smaller images, or leave the record out."
        )
    if config.max_patches is None or num_patches <= config.max_patches:
        return
    if num_patches == num_images:
        raise DataError(
            f"{place}: the conversation has {num_images:,} images, and data.max_patches is {config.max_patches:,}, "
            "which bounds their number, since this model's images are equally large. Raise it, or leave the record out."
        )
    raise DataError(
        f"{place}: its images have {num_patches:,} patches, and data.max_patches is {config.max_patches:,}. Raise it, "
        "let the processor make smaller images, or leave the record out."
    )
