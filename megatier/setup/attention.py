"""Attention: which of its kernels a run takes, from the model's config, the GPU and the settings."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PretrainedConfig

from megatier.config.schema import RunConfig
from megatier.models.decoder import supports_flex
from megatier.setup.attention_rule import HOPPER, Attention, chosen
from megatier.setup.machine import choose_device, compiles
from megatier.setup.skeleton import model_config_of

DROPOUTS = ("attention_dropout", "attn_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"""Names of the dropout of attention in configs."""


def with_kernel(config: RunConfig, *, here: bool = True) -> tuple[RunConfig, str]:
    """Return the config with `model.attention` as it will be, and why `auto` did not become flex attention.

    The reason is empty if it did, if there was nothing to choose, or on a CPU.

    Args:
        config: the run.
        here: whether this machine will run it. Another one is taken to have a GPU that was measured, if it has one.

    Raises:
        UnsupportedModelError: there is no such model.
    """
    if config.model.attention != "auto":
        return config, ""

    if here:
        device = choose_device(config.tiers)
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        compiled = compiles(config.model, device)
    else:
        capability = None if config.tiers.device == "cpu" else HOPPER
        compiled = capability is not None if config.model.compile is None else config.model.compile

    described = _described(config, model_config_of(config.model), capability, compiled=compiled)
    kernel, why = chosen(described)
    return replace(config, model=replace(config.model, attention=kernel)), why  # type: ignore[arg-type]


def _described(
    config: RunConfig, model: PretrainedConfig, capability: tuple[int, int] | None, *, compiled: bool
) -> Attention:
    """The attention of a run, as far as the rule looks at it."""
    text = model.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 0
    keys = getattr(text, "num_key_value_heads", None) or heads
    width = getattr(text, "hidden_size", None) or 0
    is_power = bool(heads) and heads & (heads - 1) == 0
    return Attention(
        capability=capability,
        tokens=config.data.sequence_length,
        head_size=getattr(text, "head_dim", None) or (width // heads if heads else 0),
        repeats_keys=keys != heads and not is_power,
        compiles=compiled,
        is_bf16=config.model.compute_dtype == "bf16",
        cuts_documents=config.data.is_apart and config.train.slices > 1,
        unsupported=_unsupported(model, text),
    )


def _unsupported(model: PretrainedConfig, text: PretrainedConfig) -> str | None:
    """Why a model cannot take flex attention, or was never measured with it; None: it can."""
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    others = sorted({kind for kind in kinds if kind not in ("full_attention", "attention")})
    windows = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    reasons = {
        f"transformers gives {model.model_type} no flex attention": not supports_flex(model),
        "the model has a vision tower": getattr(model, "vision_config", None) is not None,
        f"some layers have another kind of attention ({', '.join(others)})": bool(others),
        "attention has a sliding window": bool(windows) and not kinds,
        "attention goes by chunks of tokens": getattr(text, "attention_chunk_size", None) is not None,
        "keys are compressed, so that heads have several sizes": getattr(text, "kv_lora_rank", None) is not None,
        "scores are capped": getattr(text, "attn_logit_softcapping", None) is not None,
        "attention has dropout, which flex attention does not": any(getattr(text, n, 0.0) for n in DROPOUTS),
        "attention is not causal": not getattr(text, "is_causal", True),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
