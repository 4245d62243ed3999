"""Tiny configs of models that hold a language model and another one, beside those of `tiny_vision`."""

from __future__ import annotations

from typing import Any

from tiny_models import BASE, FAMILIES, MOE, known_config
from tiny_vision import IMAGE_TOKEN, LINEAR, QWEN_VISION, ROPE, TEXT, TOKENS_OF_QWEN, TOWER, VIDEO_TOKEN
from transformers import PretrainedConfig

IMAGE = IMAGE_TOKEN
LLAMA: dict[str, Any] = {"model_type": "llama", **TEXT, "head_dim": 16}
QWEN2: dict[str, Any] = {"model_type": "qwen2", **TEXT}
MISTRAL: dict[str, Any] = {"model_type": "mistral", **TEXT, "head_dim": 16}
COHERE2: dict[str, Any] = {
    "model_type": "cohere2",
    **TEXT,
    "head_dim": 16,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
SIGLIP: dict[str, Any] = {"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER}
CLIP: dict[str, Any] = {"model_type": "clip_vision_model", "projection_dim": 16, **TOWER}
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
}
GLM_TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": 151,
    "image_start_token_id": 152,
    "image_end_token_id": 153,
    "video_start_token_id": 154,
    "video_end_token_id": 155,
}
GEMMA4_TOKENS: dict[str, Any] = {"image_token_id": IMAGE, "audio_token_id": 151, "video_token_id": 152}
COMPOSITES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "text_config": {**TEXT, "rope_parameters": ROPE},
        "vision_config": {"depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4},
        **TOKENS_OF_QWEN,
    },
    "gemma4_unified": {
        "text_config": {**BASE, **FAMILIES.get("gemma4_unified_text", {})},
        **GEMMA4_TOKENS,
    },
    "mistral3": {
        "text_config": MISTRAL,
        "vision_config": {"model_type": "pixtral", **TOWER, "head_dim": 16},
        "image_token_index": IMAGE,
    },
    "glm4v": {
        "text_config": {**TEXT, "rope_parameters": ROPE},
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 4,
            "image_size": 16,
        },
        **GLM_TOKENS,
    },
    "internvl": {
        "text_config": QWEN2,
        "vision_config": {**TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
        "image_token_id": IMAGE,
        "image_seq_length": 4,
    },
    "aya_vision": {
        "text_config": COHERE2,
        "vision_config": SIGLIP,
        "image_token_index": IMAGE,
        "alignment_intermediate_size": 64,
    },
    "llava_next": {
        "text_config": LLAMA,
        "vision_config": CLIP,
        "image_token_index": IMAGE,
        "image_grid_pinpoints": [[16, 16]],
    },
    "paligemma": {
        "text_config": {**MISTRAL, "model_type": "gemma"},
        "vision_config": {**SIGLIP, "projection_dim": 64},
        "image_token_index": IMAGE,
        "projection_dim": 64,
    },
    "paligemma2": {
        "_t": "paligemma",
        "text_config": {**MISTRAL, "model_type": "gemma2", "sliding_window": 8, "query_pre_attn_scalar": 16},
        "vision_config": {**SIGLIP, "projection_dim": 64},
        "image_token_index": IMAGE,
        "projection_dim": 64,
    },
    "lfm2_vl": {
        "text_config": {"model_type": "lfm2", **TEXT, "layer_types": ["conv", "full_attention"] * 2},
        "vision_config": {
            "model_type": "siglip2_vision_model",
            **SMALL,
            "num_patches": 16,
            "vision_use_head": False,
        },
        "image_token_id": IMAGE,
        "projector_hidden_size": 32,
    },
    "qwen3_5_moe": {
        "text_config": {
            **TEXT,
            **LINEAR,
            **MOE,
            "head_dim": 16,
            "shared_expert_intermediate_size": 32,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0},
        },
        "vision_config": {**QWEN_VISION, "num_position_embeddings": 16},
        **TOKENS_OF_QWEN,
    },
    "cohere2_vision": {
        "text_config": COHERE2,
        "vision_config": SIGLIP,
        "image_token_id": IMAGE,
        "alignment_intermediate_size": 64,
    },
    "llava_onevision": {
        "text_config": QWEN2,
        "vision_config": SIGLIP,
        "image_token_index": IMAGE,
        "video_token_index": VIDEO_TOKEN,
        "image_grid_pinpoints": [[16, 16]],
    },
    "vipllava": {
        "text_config": LLAMA,
        "vision_config": CLIP,
        "image_token_index": IMAGE,
        "vision_feature_layers": [-1, -2],
    },
    "idefics3": {"text_config": LLAMA, "vision_config": TOWER, "image_token_id": IMAGE, "scale_factor": 2},
    "smolvlm": {"text_config": LLAMA, "vision_config": TOWER, "image_token_id": IMAGE, "scale_factor": 2},
    "deepseek_vl": {"text_config": LLAMA, "vision_config": SIGLIP, "image_token_id": IMAGE},
    "aria": {
        "text_config": {
            **TEXT,
            "head_dim": 16,
            "moe_num_experts": 4,
            "moe_topk": 2,
            "moe_num_shared_experts": 1,
            "intermediate_size": 32,
        },
        "vision_config": {"model_type": "idefics3_vision", **TOWER},
        "image_token_index": IMAGE,
        "projector_patch_to_query_dict": {16: 4},
    },
    "emu3": {
        "text_config": {**TEXT, "pad_token_id": 0, "attention_dropout": 0.0},
        "vq_config": {
            "codebook_size": 8,
            "hidden_size": 32,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "attn_resolutions": [1],
        },
        "vocabulary_map": {"<image>": IMAGE, "<|extra_200|>": 151, "<|visual token 000000|>": 152},
    },
    "chameleon": {
        **TEXT,
        "vq_config": {
            "embed_dim": 16,
            "num_embeddings": 8,
            "latent_channels": 16,
            "resolution": 16,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
        },
        "vocabulary_map": {"<image>": IMAGE, "IMGIMGAZ": 151},
    },
}
"""Types whose configs hold the config of a language model, or of a tower under another name, as Chameleon; `_t` is the
type where a key is not."""


def composite_config(name: str, options: dict[str, Any] | None = None) -> PretrainedConfig:
    """Config of one of COMPOSITES, or with these options."""
    given = dict(COMPOSITES[name] if options is None else options)
    return known_config(given.pop("_t", name), **given)
