"""Tiny configurations of the model families that every family test runs over: 4 layers, hidden size 64."""

from __future__ import annotations

import os
from typing import Any

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError
from packaging.version import Version
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

IS_OLD = Version(transformers.__version__) < Version("5.23")
"""Whether some of the newest models may be missing, or be without their newest layers."""

BASE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.05,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
"""Attention over a latent, and experts beside a shared one."""
SPARSE: dict[str, Any] = {
    **LATENT,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "indexer_types": ["full", "full", "shared", "shared"],
}
"""Its attention over the tokens that an indexer chooses."""
SHARED_KV: dict[str, Any] = {
    "num_hidden_layers": 6,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 4,
}
"""As Gemma 3n and 4 ship: keys and values of the last own layer of each kind serve all layers above."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_tied": {"_t": "llama", "tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 8},
    "phi3": {},
    "olmo2": {},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "apertus": {},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0},
    "cohere2": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2, "logit_scale": 0.25},
    "gemma2": {"sliding_window": 8, "tie_word_embeddings": True},
    "gemma3_text": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": dict(**MOE),
    "qwen2_moe": dict(shared_expert_intermediate_size=48, **MOE),
    "mixtral": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.05,
    },
    "olmoe": dict(**{k: v for k, v in MOE.items() if k != "moe_intermediate_size"}),
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "output_router_logits": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "deepseek_v2": {**LATENT, "first_k_dense_replace": 1},
    "deepseek_v3": {**LATENT, "first_k_dense_replace": 1, "n_group": 2},
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "glm_moe_dsa": dict(**SPARSE),
    "hy_v4": dict(hc_mult=2, **SPARSE),
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "q_lora_rank": 16,
        "o_lora_rank": 16,
        "o_groups": 2,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 2,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "mlp_layer_types": ["moe"] * 4,
        "partial_rotary_factor": 0.5,
    },
    "qwen4_exp_text": dict(
        layer_types=["linear_attention", "linear_attention", "linear_attention", "indexed_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
        shared_expert_intermediate_size=32,
        hc_lowrank=16,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=8,
        indexer_compress_ratio=2,
        ple_layer_ids=[1],
        ple_embed_dim=16,
        ngram_vocab_size_base=64,
        heads_per_ngram=2,
        make_ngram_vocab_size_divisible_by=8,
        split_ngram_parts=1,
        **MOE,
    ),
    "qwen3_next": dict(
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
        shared_expert_intermediate_size=32,
        **MOE,
    ),
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
    },
    "gemma3n_text": {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 160,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 6,
        "intermediate_size": [96] * 6,
        **SHARED_KV,
    },
    "gemma4_text": {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 160,
        "use_double_wide_mlp": True,
        **SHARED_KV,
    },
    "llama4_text": {
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 1, 1, 0],
        "attention_chunk_size": 8,
    },
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128},
    "gemma4_unified_text": {"global_head_dim": 16, "use_double_wide_mlp": True, **SHARED_KV},
}
FAMILIES = {family: options for family, options in FAMILIES.items() if options.get("_t", family) in CONFIG_MAPPING}
"""Those that the installed transformers has: the newest are not in every version that is supported."""


FUSED = tuple(
    family
    for family in (
        "qwen3_moe",
        "qwen2_moe",
        "qwen3_next",
        "mixtral",
        "olmoe",
        "gpt_oss",
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe",
        "minimax_m2",
        "glm_moe_dsa",
        "hy_v4",
        "deepseek_v4",
        "qwen4_exp_text",
    )
    if family in FAMILIES
)
"""Those whose experts share parameters, a row for each, and can be cut."""


IN_FP32: dict[str, dict[str, Any]] = {
    "ernie4_5_moe": {**BASE, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1},
    "inkling2_text": {
        **BASE,
        "moe_intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "unpadded_vocab_size": BASE["vocab_size"],
    },
}
"""Further models of which Hugging Face keeps some parameters in fp32 beside bf16, as of others above."""


def tiny_config(family: str, **overrides: Any) -> PretrainedConfig:
    """Config of one of FAMILIES; `overrides` go on top, such as dropout rates."""
    options = {**FAMILIES[family], **overrides}
    model_type = options.pop("_t", family)
    base = {"vocab_size": BASE["vocab_size"]} if model_type == "gpt2" else BASE
    return known_config(model_type, **{**base, **options})


def config_class(family: str) -> type[PretrainedConfig]:
    """What tells a test module, while it is imported, what transformers can do with one of FAMILIES."""
    found: type[PretrainedConfig] = CONFIG_MAPPING[FAMILIES[family].get("_t", family)]
    return found


def known_config(model_type: str, **options: Any) -> PretrainedConfig:
    """Config of a model of transformers. A test of a model that an older version lacks is skipped."""
    # Outside a test nothing can be skipped, and its whole module would fail.
    assert model_type == "llama" or "PYTEST_CURRENT_TEST" in os.environ, f"{model_type} is made at import"
    try:
        config = AutoConfig.for_model(model_type, **options)
    except (ValueError, StrictDataclassError):
        if IS_OLD:
            pytest.skip(f"transformers {transformers.__version__} does not have this {model_type}")
        raise
    assert isinstance(config, PretrainedConfig)
    return config
