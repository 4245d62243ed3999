"""Conversations with images that share a sequence: which do, and that each is computed as if it were alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tiny_runs import plain_model
from tiny_vision import TEXT, TOWER, VISION_FAMILIES, image_batch, text_batch, vision_config
from torch import Tensor
from transformers import AutoConfig

from megatier.data.columns import count_real_tokens
from megatier.data.image_packs import join_rows, pack_images, positions_of
from megatier.data.image_rows import ImageRow
from megatier.engine.mask_answers import answering
from megatier.errors import DataError, UnsupportedModelError
from megatier.models.decoder import build_skeleton
from megatier.models.masks import BlockMasks

PAD = 9
LENGTH = 64


def row(num_tokens: int, num_patches: int) -> ImageRow:
    return ImageRow(place="a", text="", images=(), num_tokens=num_tokens, learnt=(), crc32=0, num_patches=num_patches)


def test_packs_hold_each_conversation_once_and_keep_both_bounds() -> None:
    draw = random.Random(1)
    rows = [row(draw.randint(1, 100), draw.randint(0, 50)) for _ in range(200)]
    packs = pack_images(rows, 100, 60)
    assert sorted(id(each) for pack in packs for each in pack) == sorted(map(id, rows))
    assert all(sum(each.num_tokens for each in pack) <= 100 for pack in packs)
    assert all(sum(each.num_patches for each in pack) <= 60 for pack in packs)
    assert max(map(len, packs)) > 1
    places = {id(each): place for place, each in enumerate(rows)}
    firsts = [min(places[id(each)] for each in pack) for pack in packs]
    assert firsts == sorted(firsts)
    assert pack_images(rows, 100, 60) == packs


def conversations(family: str) -> list[dict[str, Tensor]]:
    """Two conversations with an image each and one of text, one row of tokens each, without padding."""
    found = []
    for seed in (1, 2):
        batch = image_batch(family, rows=1, seed=seed)
        found.append({name: column for name, column in batch.items() if name != "attention_mask"})
    text = text_batch(rows=1, tokens=9, seed=3)
    names: list[str] = [name for name in ("mm_token_type_ids", "token_type_ids") if name in found[0]]
    kinds = {name: torch.zeros(1, 9, dtype=torch.long) for name in names}
    found.insert(1, {"input_ids": text["input_ids"], "labels": text["labels"], **kinds})
    return found


# Qwen3.5 has layers that do not stop where a conversation does, which is refused before (`check_document_boundaries`).
@pytest.mark.parametrize("family", ["gemma3", "llava", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_conversation_in_a_pack_has_the_logits_that_it_has_alone(family: str) -> None:
    model: Any = plain_model(vision_config(family)).eval()
    alone = conversations(family)
    columns = join_rows([alone], LENGTH, PAD, positions_of(model))
    assert columns["input_ids"].shape == (1, LENGTH)
    assert count_real_tokens(columns) == sum(each["input_ids"].shape[1] for each in alone)
    with torch.no_grad():
        # Version 5.24 of transformers alone would take images of one conversation for those of another.
        with answering(columns, BlockMasks()):
            together = model(**columns, use_cache=False).logits[0]
        first = 0
        for each in alone:
            expected = model(**each, use_cache=False).logits[0]
            found = together[first : first + len(expected)]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            first += len(expected)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_vl"])
def test_numbers_of_a_batch_have_each_a_place_of_their_own(family: str) -> None:
    alone = conversations(family)
    packs = [[each] for each in alone] + [alone]
    for count in (1, len(packs)):
        columns = join_rows(packs[:count], LENGTH, PAD, positions_of(plain_model(vision_config(family))))
        for name, column in columns.items():
            assert column.is_contiguous(), name


def test_sequences_of_a_group_are_joined_in_order() -> None:
    model = plain_model(vision_config("qwen3_vl"))
    alone = conversations("qwen3_vl")
    columns = join_rows([alone[:2], alone[2:]], LENGTH, PAD, positions_of(model))
    assert columns["position_ids"].shape == (4, 2, LENGTH)
    assert torch.equal(columns["pixel_values"], torch.cat([alone[0]["pixel_values"], alone[2]["pixel_values"]]))
    assert columns["image_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 4]]
    assert set(columns["input_ids"][1, 24:].tolist()) == {PAD}
    assert set(columns["labels"][1, 24:].tolist()) == {-100}
    assert int(columns["position_ids"][:, 1, 24:].sum()) == 0


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_models_whose_tokens_look_forward_in_images_alone_count_positions(family: str) -> None:
    positions_of(build_skeleton(vision_config(family), "sdpa"))


def test_model_that_looks_forward_in_more_than_images_is_refused_by_name() -> None:
    text = {**TEXT, "model_type": "gemma", "head_dim": 16}
    tower = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False, "projection_dim": 64}
    config = AutoConfig.for_model("paligemma", text_config=text, vision_config=tower, image_token_index=150)
    with pytest.raises(UnsupportedModelError, match="PaliGemmaForConditionalGeneration looks forward in more than its"):
        positions_of(build_skeleton(config, "sdpa"))


def test_conversations_whose_images_would_touch_are_refused() -> None:
    first, _, last = conversations("gemma3")
    first["token_type_ids"] = first["token_type_ids"].flip(1).roll(2, dims=1)
    last["token_type_ids"] = last["token_type_ids"].roll(-2, dims=1)
    assert (int(first["token_type_ids"][0, -1]), int(last["token_type_ids"][0, 0])) == (1, 1)
    model = plain_model(vision_config("gemma3"))
    with pytest.raises(DataError, match="ends with an image"):
        join_rows([[first, last]], LENGTH, PAD, positions_of(model))
