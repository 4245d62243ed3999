"""Guesses what somebody meant by the name of a setting that there is not. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

NAMES_ELSEWHERE: Mapping[str, str] = {
    "lr": "train.learning_rate",
    "lr_scheduler_type": "train.schedule",
    "batch_size": "train.batch",
    "train_batch_size": "train.batch",
    "per_device_train_batch_size": "train.batch",
    "gradient_accumulation_steps": "train.groups",
    "micro_batch": "train.batch",
    "micro_batch_size": "train.batch",
    "train_micro_batch_size_per_gpu": "train.batch",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "max_grad_norm": "train.clip",
    "gradient_checkpointing": "train.activations",
    "max_length": "data.sequence_length",
    "max_seq_length": "data.sequence_length",
    "cutoff_len": "data.sequence_length",
    "model_name_or_path": "model.path",
    "attn_implementation": "model.attention",
    "dtype": "model.compute_dtype",
    "bf16": "model.compute_dtype",
    "fp16": "model.compute_dtype",
    "template": "data.chat_template",
    "output_dir": "output.directory",
    "save_steps": "output.checkpoint_every",
    "save_total_limit": "output.keep_checkpoints",
    "eval_steps": "train.evaluate_every",
    "r": "model.lora.rank",
    "lora_rank": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "target_modules": "model.lora.targets",
    "lora_target": "model.lora.targets",
    "use_rslora": "model.lora.rslora",
    "use_dora": "model.lora.dora",
}
"""Settings by the names that other trainers give them."""


def suggest_names(
    name: str, known: Sequence[str], elsewhere: Mapping[str, str] = NAMES_ELSEWHERE, *, cutoff: float = 0.6
) -> str | None:
    """Return the name that was meant by an unknown one; None: none is like it.

    Args:
        name: the unknown name, which may be dotted.
        known: the names that there are.
        elsewhere: those of other programs, for each the name here.
        cutoff: how like a name has to be, from 0 to 1.
    """
    # A name of another trainer, or a key in the wrong section, is as common as a misspelt one.
    _, _, last = name.rpartition(".")
    if last in elsewhere:
        return elsewhere[last]
    for other in known:
        if other.rpartition(".")[2] == last:
            return other
    near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return near[0] if near else None
