"""Converts LLaMA-Factory's training YAML. Missing keys take its defaults if those change results."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from megatier.convert import common
from megatier.convert.common import ADAPTER_INIT, EVALUATION, FIGURES, ONE_LOSS, ONE_PASS, QUANTISED, STORED_ADAPTER
from megatier.convert.conversion import Conversion, Rule, becomes
from megatier.errors import ConfigError

LLAMA_FACTORY_KEYS = {
    "finetuning_type",
    "stage",
    "cutoff_len",
    "template",
    "model_name_or_path",
    "dataset_dir",
    "max_samples",
}
"""Top-level keys that no other format has."""

_ATTENTION = {"sdpa": "sdpa", "disabled": "eager"}
VISION = "data.images reads images, and model.frozen names the parts of the model that stay as they are"

_LORA_KEYS = {
    "rank": "lora_rank",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "targets": "lora_target",
    "rslora": "use_rslora",
    "dora": "use_dora",
    "modules_to_save": "additional_target",
}
"""LLaMA-Factory's keys, by our names of the adapter settings."""


def _kind(conversion: Conversion, key: str) -> None:
    """Refuse other objectives: preferences, rewards, other kinds of adapters."""
    stage = conversion.text(key) or "sft"
    if stage not in ("sft", "pt"):
        raise ConfigError(
            f"{conversion.source}: stage is {stage}; `megatier train` does sft and pt. DPO runs with StreamedTrl "
            "(docs/trainers.md)."
        )
    # LLaMA-Factory trains adapters by default.
    method = conversion.text("finetuning_type") or "lora"
    if method not in ("full", "lora"):
        raise ConfigError(f"{conversion.source}: finetuning_type is {method}; megatier trains full or lora.")
    conversion.set(key, {}, "as dataset_info.json describes the records")
    if method == "lora":
        _adapters(conversion)
    # If the key is still pending, there are no adapters, so training is full.
    conversion.agree("finetuning_type", "as here")


def _adapters(conversion: Conversion) -> None:
    """Convert the settings of LoRA."""
    lora = common.lora_of(conversion, _LORA_KEYS, rank=8, alpha=None)
    conversion.set("finetuning_type", {"model.lora": lora}, "needs megatier[lora]")
    # One setting of ours covers all of these keys, and each gets a finding.
    for key in _LORA_KEYS.values():
        conversion.agree(key, "see finetuning_type")


def _computing(conversion: Conversion, key: str) -> None:
    # Only to check its value.
    conversion.flag(key)

    # fp16 is mixed precision there too, for which bf16 is used here.
    dtype = "bf16" if any(map(conversion.raw, (key, "pure_bf16", "fp16"))) else "fp32"
    conversion.set(key, {"model.compute_dtype": dtype}, "masters and moments are fp32")

    written = conversion.text("flash_attn") or ""
    attention = _ATTENTION.get(written)
    if attention:
        conversion.set("flash_attn", {"model.attention": attention})
    why = common.APART
    conversion.leave("flash_attn", why, differs=True)


def _data(conversion: Conversion, key: str) -> None:
    # Datasets are names in a table there, which megatier reads too.
    folder = (conversion.text("dataset_dir") or "data").rstrip("/")
    files = [f"{folder}/dataset_info.json#{name}" for name in common.named(conversion, key)]
    if files:
        conversion.set(key, {"data.files": files})
        conversion.agree("dataset_dir", "see dataset")

    # There it limits each dataset.
    count = conversion.count("max_samples")
    if count is not None and len(files) < 2:
        conversion.set("max_samples", {"data.max_samples": count})
    conversion.leave("max_samples", "data.max_samples bounds all datasets together", differs=True)


def _activations(conversion: Conversion, key: str) -> None:
    # LLaMA-Factory recomputes activations unless this key is true.
    conversion.set(key, {"train.activations": "keep" if conversion.flag(key) else "recompute"})


def _optimizer(conversion: Conversion, key: str) -> None:
    """Convert the optimizer, which either of two keys names."""
    if conversion.flag(key):
        remark = "AdamW trains all that is no matrix of a decoder layer, also in vision towers"
        conversion.set(key, {"train.optimizer": "muon"}, remark, differs=True)
    elif conversion.has(key):
        conversion.set(key, {"train.optimizer": "adamw"})

    common.optimizer(conversion, "optim")


def _hub(conversion: Conversion, key: str) -> None:
    # There the repository's name alone uploads nothing.
    if conversion.flag("push_to_hub"):
        common.hub(conversion, key)
    conversion.leave(key, "nothing is uploaded unless push_to_hub is true")


# The numbers are LLaMA-Factory's defaults.
_RULES: Mapping[str, Rule] = {
    "stage": _kind,
    "model_name_or_path": becomes("model.path", Conversion.text),
    "bf16": _computing,
    "dataset": _data,
    "cutoff_len": common.sequence_length(2048),
    "val_size": common.holdout,
    "per_device_train_batch_size": partial(common.batches, batch=8, epochs_key="num_train_epochs", epochs=3.0),
    "disable_gradient_checkpointing": _activations,
    "use_muon": _optimizer,
    **common.common(
        seed=42,
        learning_rate=5e-5,
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        max_grad_norm=1.0,
    ),
    "lr_scheduler_type": partial(common.schedule, default="linear"),
    "load_best_model_at_end": partial(common.best_model, patience="early_stopping_steps"),
    "report_to": common.trackers,
    "hub_model_id": _hub,
}
_REASONS = {
    **common.COMMON_REASONS,
    "do_train": "`megatier train` trains",
    "do_eval": EVALUATION,
    "do_predict": "there is nothing like it here",
    "per_device_eval_batch_size": "evaluations have the batch of the training",
    "neat_packing": "conversations that share a sequence never see each other, unless data.cross_documents is true",
    "overwrite_cache": ONE_PASS,
    "preprocessing_num_workers": ONE_PASS,
    "streaming": "data.streaming reads a dataset of the hub while the run goes on",
    "plot_loss": FIGURES,
    "overwrite_output_dir": "a run never overwrites another one",
    "save_only_model": "checkpoints hold masters and moments, so that a run goes on bit for bit",
    "image_max_pixels": "the model's own processor says how large images are (data.images)",
    "video_max_pixels": "videos are not read",
    "use_liger_kernel": ONE_LOSS,
    "enable_liger_kernel": ONE_LOSS,
}
_DIFFERING = {
    **common.COMMON_DIFFERING,
    "eval_dataset": EVALUATION,
    "template": "the tokenizer's own chat template is taken; data.chat_template names another one",
    "packing": "sequences are always packed, and conversations in one do not see each other",
    "train_on_prompt": "of conversations only the assistant's turns are learnt",
    "mask_history": "all turns of the assistant are learnt",
    "pure_bf16": "masters are always fp32, and so are moments unless train.moments says bf16",
    "freeze_vision_tower": VISION,
    "freeze_multi_modal_projector": VISION,
    "adapter_name_or_path": STORED_ADAPTER,
    "create_new_adapter": STORED_ADAPTER,
    "quantization_bit": QUANTISED,
    "quantization_method": QUANTISED,
    "pissa_init": ADAPTER_INIT,
}
LLAMA_FACTORY_TABLE = _RULES, _REASONS, _DIFFERING
"""The conversion of LLaMA-Factory's keys; see `Conversion.convert`."""
