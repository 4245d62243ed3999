"""Tiny vision-language models, and batches with one image in each of two rows, for the tests of vision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tiny_models import BASE, MOE
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

VOCAB, IMAGE_TOKEN, VIDEO_TOKEN, NUM_IMAGE_TOKENS = 160, 150, 151, 4
TEXT = {key: value for key, value in BASE.items() if key not in ("head_dim", "pad_token_id")}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}
DEEPSTACK: dict[str, Any] = {**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
TOKENS_OF_QWEN: dict[str, Any] = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": VIDEO_TOKEN,
    "vision_start_token_id": 152,
    "vision_end_token_id": 153,
}
VISION_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": {**TEXT, "rope_parameters": ROPE},
        "vision_config": {**QWEN_VISION, "window_size": 8, "fullatt_block_indexes": [1]},
        **TOKENS_OF_QWEN,
    },
    "qwen3_vl": {
        "text_config": {**TEXT, "head_dim": 16, "rope_parameters": ROPE},
        "vision_config": DEEPSTACK,
        "tie_word_embeddings": True,
        **TOKENS_OF_QWEN,
    },
    "qwen3_vl_moe": {
        "text_config": {**TEXT, **MOE, "moe_intermediate_size": 24, "head_dim": 16, "rope_parameters": ROPE},
        "vision_config": DEEPSTACK,
        **TOKENS_OF_QWEN,
    },
    "qwen3_5": {
        "text_config": {**TEXT, **LINEAR, "head_dim": 16, "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}},
        "vision_config": {**QWEN_VISION, "num_position_embeddings": 16},
        **TOKENS_OF_QWEN,
    },
    "gemma3": {
        "text_config": {
            **TEXT,
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER},
        "mm_tokens_per_image": NUM_IMAGE_TOKENS,
        "image_token_index": IMAGE_TOKEN,
        "boi_token_index": 152,
        "eoi_token_index": 153,
    },
    "llava": {
        "text_config": {"model_type": "llama", **TEXT, "head_dim": 16},
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 16, **TOWER, "patch_size": 8},
        "image_token_index": IMAGE_TOKEN,
        "image_seq_length": NUM_IMAGE_TOKENS,
    },
}
"""The model's own last vision block is not used by LLaVA, which takes the features of the one before."""


def vision_config(family: str, **overrides: Any) -> PretrainedConfig:
    """Config of one of VISION_FAMILIES; `overrides` go on top, those of the two parts key by key."""
    options = dict(VISION_FAMILIES[family])
    for key, value in overrides.items():
        options[key] = {**options[key], **value} if isinstance(value, Mapping) else value
    config = AutoConfig.for_model(family, **options)
    assert isinstance(config, PretrainedConfig)
    return config


def text_batch(rows: int = 2, tokens: int = 24, seed: int = 1) -> dict[str, Tensor]:
    """Rows of text alone, padded right, a fifth of the labels masked."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 140, (rows, tokens), generator=generator)
    mask = (torch.arange(tokens) < tokens - 5 * torch.arange(rows)[:, None]).long()
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, -100)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}


def image_batch(family: str, rows: int = 2, seed: int = 1) -> dict[str, Tensor]:
    """The rows of `text_batch`, each with an image from its third token on."""
    batch = text_batch(rows, seed=seed)
    image = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    image[:, 2 : 2 + NUM_IMAGE_TOKENS] = True
    batch["input_ids"] = batch["input_ids"].masked_fill(image, IMAGE_TOKEN)
    batch["labels"] = batch["labels"].masked_fill(image, -100)
    generator = torch.Generator().manual_seed(seed + 100)
    if family.startswith("qwen"):
        grid = torch.tensor([[1, 4, 4]] * rows)  # 4 x 4 patches, merged 2 x 2
        pixels = torch.randn(rows * 16, 3 * 2 * 4 * 4, generator=generator)
        return {**batch, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": image.long()}
    pixels = torch.randn(rows, 3, 16, 16, generator=generator)
    more = {"token_type_ids": image.long()} if family == "gemma3" else {}
    return {**batch, "pixel_values": pixels, **more}


def seen_batch(family: str, images: int, videos: int, seed: int = 1) -> dict[str, Tensor]:
    """Two rows, each with so many images and then so many videos of one frame: of a Qwen model or LLaVA-OneVision."""
    is_qwen = family.startswith("qwen")
    kinds = torch.zeros(2, 64, dtype=torch.long)
    begin = 2
    # LLaVA-OneVision has an image whole and in pieces, with a token that ends each line, and one that ends a video.
    for kind, tokens in [(1, 4 if is_qwen else 36)] * images + [(2, 4 if is_qwen else 5)] * videos:
        kinds[:, begin : begin + tokens] = kind
        begin += tokens + 2
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 140, kinds.shape, generator=generator)
    seen = ids.masked_fill(kinds == 1, IMAGE_TOKEN).masked_fill(kinds == 2, VIDEO_TOKEN)
    batch = {"input_ids": seen, "attention_mask": torch.ones_like(ids), "labels": ids.masked_fill(kinds > 0, -100)}
    if is_qwen:
        batch["mm_token_type_ids"] = kinds
    for name, count in (("image", 2 * images), ("video", 2 * videos)):
        pixels = "pixel_values" if name == "image" else "pixel_values_videos"
        if count and is_qwen:
            batch[pixels] = torch.randn(count * 16, 96, generator=generator)
            batch[f"{name}_grid_thw"] = torch.tensor([[1, 4, 4]] * count)
        elif count:
            batch[pixels] = torch.randn(count, 2 if name == "image" else 1, 3, 16, 16, generator=generator)
    if images and not is_qwen:
        batch["image_sizes"] = torch.tensor([[16, 16]] * 2 * images)
    return batch
