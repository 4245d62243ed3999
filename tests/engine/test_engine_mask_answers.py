"""Masks of rows that hold several documents with images: each document sees what it sees alone."""

from __future__ import annotations

import pytest
import torch
from tiny_vision import vision_config
from torch import Tensor
from transformers import masking_utils
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model, get_block_sequence_ids_for_mask

from megatier.engine.mask_answers import REMAP, answering
from megatier.models.masks import BlockMasks

KINDS = [[0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1, 1, 1, 0, 0]]
"""The kinds of the tokens of two documents: where their images lie differs."""


def masks(kinds: list[list[int]], kind: str) -> Tensor:
    """What the tokens of a row see, by the kind of layer."""
    config = vision_config("gemma3").text_config
    config.sliding_window = 4
    config._attn_implementation = "sdpa"
    of_tokens = torch.tensor([[kind for each in kinds for kind in each]])
    positions = torch.cat([torch.arange(len(each)) for each in kinds])[None]
    hidden = torch.empty(*of_tokens.shape, config.hidden_size)
    with answering({"position_ids": positions, "token_type_ids": of_tokens}, BlockMasks()):
        of_images = get_block_sequence_ids_for_mask(of_tokens)
        made = create_masks_for_vision_model(config, hidden, None, None, positions, of_images)
    found: Tensor = made[kind][0, 0]
    return found


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_document_of_a_row_sees_what_it_sees_alone(kind: str) -> None:
    together = masks(KINDS, kind)
    first, second = (masks([each], kind) for each in KINDS)
    assert torch.equal(together, torch.block_diag(first, second).bool())
    assert bool(first[1, 3])
    assert bool(second[5, 7])
    assert not bool(first[0, 1])


def test_masks_are_asked_by_place_only_where_documents_with_images_share_rows() -> None:
    before = vars(masking_utils).get(REMAP)
    positions, kinds = torch.zeros(1, 2), torch.zeros(1, 2)
    for batch in ({"position_ids": positions}, {"token_type_ids": kinds}):
        with answering(batch, BlockMasks()):
            assert vars(masking_utils).get(REMAP) is before
    with answering({"position_ids": positions, "mm_token_type_ids": kinds}, BlockMasks()):
        assert vars(masking_utils)[REMAP] is not before
    assert vars(masking_utils).get(REMAP) is before
