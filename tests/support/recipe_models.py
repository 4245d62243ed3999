"""The configurations of the models that examples/recipes names, as their folders on the hub have them."""

from __future__ import annotations

from typing import Any

from transformers import (
    Gemma2Config,
    Gemma3Config,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
)

Rope = dict[str, str | float | int]


def rope(theta: float, factor: float | None = None) -> Rope:
    """How positions turn: plainly, or with the scaling of Llama 3.1 and later."""
    if factor is None:
        return {"rope_type": "default", "rope_theta": theta}
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **scaling}


def llama(*sizes: int, factor: float, **others: Any) -> PreTrainedConfig:
    """Llama 3 of so many layers, heads, elements, and elements in its MLP."""
    layers, heads, hidden, inner = sizes
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters=rope(500000.0, factor),
        bos_token_id=128000,
        eos_token_id=128001,
        **others,
    )


def qwen3(*sizes: int, tied: bool = False) -> PreTrainedConfig:
    """Qwen3 of so many layers, heads, elements, and elements in its MLP."""
    layers, heads, hidden, inner = sizes
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_parameters=rope(1000000.0),
        tie_word_embeddings=tied,
        bos_token_id=151643,
        eos_token_id=151645,
    )


def qwen2_7b() -> PreTrainedConfig:
    return Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_parameters=rope(1000000.0),
        tie_word_embeddings=False,
        bos_token_id=151643,
        eos_token_id=151645,
    )


def mistral_7b() -> PreTrainedConfig:
    return MistralConfig(
        vocab_size=32768,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        rope_parameters=rope(1000000.0),
        sliding_window=None,
    )


def olmo2_13b() -> PreTrainedConfig:
    return Olmo2Config(
        vocab_size=100352,
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=40,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        rope_parameters=rope(500000.0),
        pad_token_id=100277,
        eos_token_id=100257,
    )


def gemma2_9b() -> PreTrainedConfig:
    return Gemma2Config(
        vocab_size=256000,
        hidden_size=3584,
        intermediate_size=14336,
        num_hidden_layers=42,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        max_position_embeddings=8192,
        sliding_window=4096,
        rope_parameters=rope(10000.0),
    )


def qwen3_30b_a3b() -> PreTrainedConfig:
    return Qwen3MoeConfig(  # type: ignore[call-arg]  # head_dim is not among its annotations
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=40960,
        rope_parameters=rope(1000000.0),
        tie_word_embeddings=False,
        bos_token_id=151643,
        eos_token_id=151645,
    )


def qwen3_vl_8b() -> PreTrainedConfig:
    return Qwen3VLConfig(
        text_config={
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rope_parameters": {**rope(5000000.0), "mrope_section": [24, 20, 20], "mrope_interleaved": True},
        },
        vision_config={
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "out_hidden_size": 4096,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
        tie_word_embeddings=False,
    )


def gemma3_4b() -> PreTrainedConfig:
    return Gemma3Config(
        text_config={
            "vocab_size": 262208,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 1024,
        },
        vision_config={
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 896,
            "patch_size": 14,
            "vision_use_head": False,
        },
        mm_tokens_per_image=256,
    )


CONFIGS = {
    "meta-llama/Llama-3.2-1B": llama(16, 32, 2048, 8192, factor=32.0, tie_word_embeddings=True, head_dim=64),
    "meta-llama/Llama-3.1-8B": llama(32, 32, 4096, 14336, factor=8.0),
    "meta-llama/Llama-3.1-8B-Instruct": llama(32, 32, 4096, 14336, factor=8.0),
    "meta-llama/Llama-3.3-70B-Instruct": llama(80, 64, 8192, 28672, factor=8.0),
    "Qwen/Qwen2.5-7B-Instruct": qwen2_7b(),
    "Qwen/Qwen3-4B": qwen3(36, 32, 2560, 9728, tied=True),
    "Qwen/Qwen3-14B": qwen3(40, 40, 5120, 17408),
    "Qwen/Qwen3-32B": qwen3(64, 64, 5120, 25600),
    "Qwen/Qwen3-30B-A3B": qwen3_30b_a3b(),
    "mistralai/Mistral-7B-Instruct-v0.3": mistral_7b(),
    "allenai/OLMo-2-1124-13B-Instruct": olmo2_13b(),
    "google/gemma-2-9b": gemma2_9b(),
    "google/gemma-3-4b-it": gemma3_4b(),
    "Qwen/Qwen3-VL-8B-Instruct": qwen3_vl_8b(),
}
"""By the model's name on the hub."""

PARAMETERS = {
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "allenai/OLMo-2-1124-13B-Instruct": 13_716_198_400,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-3-4b-it": 4_300_079_472,
    "Qwen/Qwen3-VL-8B-Instruct": 8_767_123_696,
}
"""How many each of them has, as its page on the hub says."""
