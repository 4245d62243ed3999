"""Masks by blocks: made once for each length, and equal to those that PyTorch makes."""

from __future__ import annotations

import torch
from tiny_models import tiny_config
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import masking_utils
from transformers.masking_utils import causal_mask_function, create_causal_mask

from megatier.engine.unit_model import _answering, _document_numbers, _is_in_order
from megatier.models.masks import MASKS_MAX, BlockMasks

CPU = torch.device("cpu")


def made(masks: BlockMasks, rows: int, tokens: int, positions: Tensor | None = None) -> BlockMask:
    """The mask that Hugging Face makes for a batch."""
    config = tiny_config("llama")
    config._attn_implementation = "flex_attention"
    hidden = torch.empty(rows, tokens, config.hidden_size)
    with _answering(_is_in_order if positions is None else _document_numbers, masks):
        found = create_causal_mask(config, hidden, None, None, position_ids=positions)
    assert isinstance(found, BlockMask)
    return found


def test_causal_mask_is_made_once_for_one_row_and_all_batches() -> None:
    masks = BlockMasks()
    before = masking_utils.create_block_mask  # type: ignore[attr-defined]
    first = made(masks, 3, 300)
    assert made(masks, 2, 300) is first
    assert made(masks, 3, 200) is not first
    assert first.kv_num_blocks.shape[0] == 1
    expected = create_block_mask(lambda b, h, q, k: q >= k, 1, None, 300, 300, device=CPU)
    assert torch.equal(first.to_dense(), expected.to_dense())
    assert masking_utils.create_block_mask is before  # type: ignore[attr-defined]


def test_mask_of_documents_is_made_for_each_batch() -> None:
    masks = BlockMasks()
    positions = torch.cat([torch.arange(130), torch.arange(270)]).repeat(2, 1)
    first, second = (made(masks, 2, 400, positions) for _ in range(2))
    assert first is not second
    assert first.kv_num_blocks.shape[0] == 2
    # The blocks of the second document's end see nothing of the first document's whole block.
    assert first.to_dense()[0, 0].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]
    assert masks._made == {}


def test_masks_are_held_for_a_few_lengths() -> None:
    masks = BlockMasks()
    for tokens in range(1, MASKS_MAX + 5):
        masks.create(causal_mask_function, None, None, tokens, tokens, CPU, _compile=True)
    assert len(masks._made) == MASKS_MAX
