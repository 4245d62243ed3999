"""What `bench_images.py` measures: a model, its conversations and settings, at full size and for a smoke run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rows import GIB

MERGED = 2
"""Patches along each side of a square that become one token."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What is measured: a model, and its conversations."""

    text: Mapping[str, Any]
    """The language model's settings."""
    vision: Mapping[str, Any]
    """The tower's settings."""
    side: int
    """Width and height of an image, in pixels."""
    sequence: int
    """Tokens of a sequence."""
    num_chats: int
    """Conversations of a step."""
    characters: tuple[int, int]
    """Fewest and most characters of a conversation."""
    groups: int
    """Groups of a step."""
    settings: Mapping[str, Any]
    """Other settings, by dotted names."""

    @property
    def image_patches(self) -> int:
        """Patches of an image."""
        return int(self.side // self.vision["patch_size"]) ** 2

    @property
    def image_tokens(self) -> int:
        """Tokens of an image, with the two around it."""
        return self.image_patches // MERGED**2 + 2


FULL = Scale(
    text={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
    },
    vision={
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": 16,
        "out_hidden_size": 4096,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
    side=1024,
    sequence=5120,
    num_chats=12,
    characters=(100, 1000),
    groups=3,
    # The tower recomputes, since what its blocks save of 8 images has no room beside the layers, which keep theirs.
    settings={
        "model.saved_share": 0.4,
        "model.loss_chunk": 2048,
        "tiers.state": ("gpu", "ram"),
        "tiers.gpu": 16 * GIB,
        "tiers.ram": 98 * GIB,
        "train.moments": "bf16",
        "train.activations": "recompute",
        "train.kept_layers": 36,
    },
)
TINY = Scale(
    text={
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    },
    vision={
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    },
    side=32,
    sequence=128,
    num_chats=7,
    characters=(10, 60),
    groups=2,
    settings={
        "model.compute_dtype": "fp32",
        "tiers.device": "cpu",
        "tiers.state": ("gpu", "ram"),
        "tiers.gpu": 4 << 20,
        "tiers.ram": 32 << 20,
    },
)
