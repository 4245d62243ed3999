"""Converts LLaMA-Factory's training YAML. Keys that it does not give take its defaults if those change numbers."""

from __future__ import annotations

from megatier.convert.conversion import Conversion
from megatier.errors import ConfigError

KEYS = {"finetuning_type", "stage", "cutoff_len", "template", "model_name_or_path", "dataset_dir", "max_samples"}
"""Keys of the first level that no other format has."""

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
ATTENTION = {"sdpa": "sdpa", "disabled": "eager"}
FIGURES = "metrics.jsonl has every step; `megatier report` draws it"
ONE_PASS = "the text is tokenised once, before the first step"
ELSEWHERE = "only architectures of transformers itself are run"
NO_LORA = "all parameters are trained, and there are no adapters here"
EVALUATION = "data.holdout_fraction keeps a part of the text for evaluation, and data.holdout_split names a split"
VISION = "vision towers are not trained"

REASONS = {
    "do_train": "`megatier train` trains",
    "do_eval": EVALUATION,
    "do_predict": "there is nothing like it here",
    "eval_dataset": EVALUATION,
    "eval_strategy": "train.evaluate_every says how often, and at the end it is always evaluated",
    "per_device_eval_batch_size": "evaluations have the batch of the training",
    "template": "the tokenizer's own chat template is taken; data.chat_template names another one",
    "max_samples": "data.max_bytes bounds the text, in bytes",
    "packing": "sequences are always packed, and conversations in one do not see each other",
    "neat_packing": "conversations that share a sequence never see each other, unless data.cross_documents is true",
    "train_on_prompt": "of conversations only the assistant's turns are learnt",
    "mask_history": "all turns of the assistant are learnt",
    "overwrite_cache": ONE_PASS,
    "preprocessing_num_workers": ONE_PASS,
    "dataloader_num_workers": ONE_PASS,
    "streaming": "data.streaming reads a dataset of the hub while the run goes on",
    "logging_steps": FIGURES,
    "plot_loss": FIGURES,
    "report_to": "figures go to metrics.jsonl, and to TensorBoard with output.tensorboard",
    "run_name": "output.directory names the run",
    "overwrite_output_dir": "a run never overwrites another one",
    "save_only_model": "checkpoints hold masters and moments, so that a run goes on bit for bit",
    "resume_from_checkpoint": "`megatier resume` goes on with a run",
    "trust_remote_code": ELSEWHERE,
    "ddp_timeout": "train.stall_timeout says when a run that hangs ends",
    "deepspeed": "the budgets of the tiers say what lies where; `megatier convert` reads that file too",
    "fsdp": "the budgets of the tiers say what lies where",
    "fp16": "model.compute_dtype stays bf16, which needs no loss scaling",
    "pure_bf16": "masters are always fp32, and so are moments unless train.moments says bf16",
    "warmup_ratio": "train.warmup_steps counts steps",
    "freeze_vision_tower": VISION,
    "freeze_multi_modal_projector": VISION,
    "image_max_pixels": VISION,
    "video_max_pixels": VISION,
    "optim": "AdamW is the one optimizer here",
    "use_liger_kernel": "head and loss are one, chunk by chunk (model.fused_loss)",
    "enable_liger_kernel": "head and loss are one, chunk by chunk (model.fused_loss)",
    "data_seed": "data.seed sets the order of the text",
}
DIFFERING = {
    "eval_dataset",
    "template",
    "max_samples",
    "packing",
    "train_on_prompt",
    "mask_history",
    "fp16",
    "pure_bf16",
    "warmup_ratio",
    "freeze_vision_tower",
    "freeze_multi_modal_projector",
    "optim",
    "data_seed",
}
"""Those without which a run's numbers may differ."""


def convert(made: Conversion) -> None:
    """Carry what has a counterpart, and say of the rest why it has none.

    Raises:
        ConfigError: a value makes no sense, or the run is of a kind that megatier does not train.
    """
    _kind(made)
    _model(made)
    _data(made)
    _steps(made)
    _optimizer(made)
    _output(made)
    made.leave_rest(REASONS, DIFFERING)


def _kind(made: Conversion) -> None:
    """Refuse what would be trained as something else: adapters, preferences, rewards."""
    stage = made.text("stage") or "sft"
    if stage not in ("sft", "pt"):
        raise ConfigError(
            f"{made.source}: stage is {stage}; `megatier train` does sft and pt. DPO runs with StreamedTrl "
            "(docs/trainers.md)."
        )
    method = made.text("finetuning_type")
    if method not in (None, "full"):
        raise ConfigError(f"{made.source}: finetuning_type is {method}; it must be full: {NO_LORA}.")
    made.carry("stage", {}, "as dataset_info.json describes the records")
    made.carry("finetuning_type", {}, NO_LORA if method is None else "as here")


def _model(made: Conversion) -> None:
    made.send("model_name_or_path", "model.path", made.text("model_name_or_path"))
    made.flag("bf16")
    dtype = "bf16" if made.raw("bf16") or made.raw("pure_bf16") or made.raw("fp16") else "fp32"
    made.carry("bf16", {"model.compute_dtype": dtype}, "masters and moments are fp32")

    attention = made.text("flash_attn")
    if attention in ATTENTION:
        made.carry("flash_attn", {"model.attention": ATTENTION[attention]})
    elif made.has("flash_attn"):
        why = "model.attention stays sdpa, which keeps documents apart (docs/data.md)"
        made.leave("flash_attn", why, differs=True)


def _data(made: Conversion) -> None:
    folder = (made.text("dataset_dir") or "data").rstrip("/")
    names = made.raw("dataset")
    if isinstance(names, list):
        names = ",".join(map(str, names))
    if names is not None:
        files = [f"{folder}/dataset_info.json#{name.strip()}" for name in str(names).split(",") if name.strip()]
        made.carry("dataset", {"data.files": files})
        if made.has("dataset_dir"):
            made.carry("dataset_dir", {}, "see dataset")

    length = made.count("cutoff_len", 2) or 2048
    words = "sequences are packed, and longer documents are cut"
    made.carry("cutoff_len", {"data.sequence_length": length}, words, differs=True)
    share = made.number("val_size")
    if share is not None and 0 <= share < 1:
        made.carry("val_size", {"data.holdout_fraction": share})
    elif made.has("val_size"):
        made.leave("val_size", "data.holdout_fraction is a share of the documents, below 1", differs=True)
    else:
        made.carry("val_size", {"data.holdout_fraction": 0.0})


def _steps(made: Conversion) -> None:
    """Convert batch and length. The numbers in these functions are LLaMA-Factory's defaults."""
    each = made.count("per_device_train_batch_size") or 8
    groups = made.count("gradient_accumulation_steps") or 1
    words = "of one device; several have as many each"
    made.carry("per_device_train_batch_size", {"train.batch": each * groups}, words, differs=True)
    made.carry("gradient_accumulation_steps", {"train.groups": groups})

    steps = made.number("max_steps")
    if steps is not None and steps > 0:
        made.carry("max_steps", {"train.steps": int(steps)})
        if made.has("num_train_epochs"):
            made.leave("num_train_epochs", "max_steps goes before it, as there")
    else:
        epochs = made.number("num_train_epochs")
        made.carry("num_train_epochs", {"train.epochs": 3.0 if epochs is None else epochs})
        if made.has("max_steps"):
            made.carry("max_steps", {}, "none, as there")

    seed = made.count("seed", 0)
    made.carry("seed", {"train.seed": 42 if seed is None else seed})
    off = made.flag("disable_gradient_checkpointing")
    made.carry("disable_gradient_checkpointing", {"train.activations": "keep" if off else "recompute"})


def _optimizer(made: Conversion) -> None:
    for key, setting, default in (
        ("learning_rate", "train.learning_rate", 5e-5),
        ("weight_decay", "train.weight_decay", 0.0),
        ("adam_beta1", "train.beta1", 0.9),
        ("adam_beta2", "train.beta2", 0.999),
        ("adam_epsilon", "train.eps", 1e-8),
        ("max_grad_norm", "train.clip", 1.0),
    ):
        value = made.number(key)
        made.carry(key, {setting: default if value is None else value})

    name = made.text("lr_scheduler_type") or "linear"
    if name in SCHEDULES:
        made.carry("lr_scheduler_type", {"train.schedule": SCHEDULES[name]})
    else:
        made.leave("lr_scheduler_type", "train.schedule is constant, linear or cosine", differs=True)

    # Both are given only if the ratio is to be overruled.
    warmup = made.count("warmup_steps", 0)
    ratio = made.number("warmup_ratio")
    steps = made.settings.get("train.steps")
    if warmup:
        made.carry("warmup_steps", {"train.warmup_steps": warmup})
    elif ratio and isinstance(steps, int):
        made.carry("warmup_ratio", {"train.warmup_steps": min(steps - 1, round(ratio * steps))})
    elif made.has("warmup_steps"):
        made.carry("warmup_steps", {"train.warmup_steps": 0})


def _output(made: Conversion) -> None:
    made.send("output_dir", "output.directory", made.text("output_dir"))
    if (every := made.count("save_steps")) is not None:
        made.carry("save_steps", {"output.checkpoint_every": every})
    if (kept := made.count("save_total_limit")) is not None:
        made.carry("save_total_limit", {"output.keep_checkpoints": kept})
    if (every := made.count("eval_steps")) is not None:
        made.carry("eval_steps", {"train.evaluate_every": every})
