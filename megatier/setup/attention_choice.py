"""Chooses attention's kernels for a run, by the model's config, the GPU and the settings."""

from __future__ import annotations

from transformers import PretrainedConfig

from megatier.config.schema import RunConfig
from megatier.models.model_class import supports_flex
from megatier.setup.attention_rule import Attention, Capability, choose_attention
from megatier.setup.machine import Machine, should_compile

DROPOUTS = ("attention_dropout", "attn_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"""Names of the dropout of attention in configs."""


def choose_kernel(config: RunConfig, model: PretrainedConfig, machine: Machine) -> tuple[RunConfig, str]:
    """Return the config with `model.attention` as it will be, and why `auto` did not become flex attention.

    The reason is empty if it did, if there was nothing to choose, or on a CPU. The choice depends on `model.compile`,
    which is decided with it.

    Args:
        config: the run.
        model: Hugging Face's config of its model (`skeleton.model_config_of`).
        machine: the one that runs.
    """
    if config.model.attention != "auto":
        return config, ""
    # Flex attention without a compiler makes the whole matrix of scores, so the rule has to know whether layers are
    # compiled.
    config = config.changed({"model.compile": should_compile(config.model, machine)})
    kernel, why = choose_attention(_describe_choice(config, model, machine.capability))
    return config.changed({"model.attention": kernel}), why


def _describe_choice(config: RunConfig, model: PretrainedConfig, capability: Capability | None) -> Attention:
    """Return the attention of a run, as far as the rule looks at it."""
    text = model.get_text_config()

    # A config that lacks these gets heads of 0 elements, which were never measured, so the rule chooses `sdpa`.
    heads = getattr(text, "num_attention_heads", None) or 0
    keys = getattr(text, "num_key_value_heads", None) or heads
    width = getattr(text, "hidden_size", None) or 0

    # Hugging Face repeats keys for flex attention unless the number of query heads is a power of two.
    is_power = bool(heads) and heads & (heads - 1) == 0
    return Attention(
        capability=capability,
        tokens=config.data.sequence_length,
        head_size=getattr(text, "head_dim", None) or (width // heads if heads else 0),
        repeats_keys=keys != heads and not is_power,
        compiles=bool(config.model.compile),
        is_bf16=config.model.compute_dtype == "bf16",
        cuts_documents=config.data.is_apart and config.train.slices > 1,
        unsupported=_find_unsupported(model, text),
    )


def _find_unsupported(model: PretrainedConfig, text: PretrainedConfig) -> str | None:
    """Return why a model cannot take flex attention, or was never measured with it; None: it can."""
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    others = sorted({kind for kind in kinds if kind not in ("full_attention", "attention")})

    # Where a config says what each layer has, a window of the whole model is only that of some layers.
    windows = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)

    # Each of these is a case that flex attention, or transformers' way to it, does otherwise than `sdpa`. The first one
    # that holds is what a user is told.
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
