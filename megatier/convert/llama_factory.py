"""Converts LLaMA-Factory's training YAML. Keys that it does not give take its defaults if those change numbers."""

from __future__ import annotations

from megatier.config.lora import ALL_LINEAR
from megatier.convert.conversion import COUNT_FROM_0, COUNT_FROM_2, Conversion, becomes
from megatier.errors import ConfigError
from megatier.optimizers import OPTIMIZER_NAMES, in_words

KEYS = {"finetuning_type", "stage", "cutoff_len", "template", "model_name_or_path", "dataset_dir", "max_samples"}
"""Keys of the first level that no other format has."""

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    # A warm-up is no part of a schedule here, but a setting of its own.
    "constant_with_warmup": "constant",
}
ATTENTION = {"sdpa": "sdpa", "disabled": "eager"}
FIGURES = "metrics.jsonl has every step; `megatier report` draws it"
ONE_PASS = "the text is tokenised once, before the first step"
ELSEWHERE = "only architectures of transformers itself are run"
EVALUATION = "data.holdout_fraction keeps a part of the text for evaluation, and data.holdout_split names a split"
VISION = "vision towers are not trained"

LORA_KEYS = (
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "lora_target",
    "use_rslora",
    "use_dora",
    "additional_target",
)
PLAIN_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "paged_adamw", "paged_adamw_32bit")
NARROW_ADAMW = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
LION = ("lion_32bit", "paged_lion_32bit", "lion_8bit", "paged_lion_8bit")
"""Values of optim that are AdamW with moments in 32 and in 8 bits, and Lion."""
ADAPTER = "model.lora.adapter goes on with an adapter, whose own settings then count"
QUANTISED = "the base stays in full precision"
FIRST_VALUES = "adapters begin as PEFT's do by default"


def _kind(made: Conversion, key: str) -> None:
    """Refuse what would be trained as something else: preferences, rewards, other kinds of adapters."""
    stage = made.text(key) or "sft"
    if stage not in ("sft", "pt"):
        raise ConfigError(
            f"{made.source}: stage is {stage}; `megatier train` does sft and pt. DPO runs with StreamedTrl "
            "(docs/trainers.md)."
        )
    # LLaMA-Factory trains adapters unless it is told otherwise.
    method = made.text("finetuning_type") or "lora"
    if method not in ("full", "lora"):
        raise ConfigError(f"{made.source}: finetuning_type is {method}; megatier trains full or lora.")
    made.carry(key, {}, "as dataset_info.json describes the records")
    if method == "lora":
        _adapters(made)
    # Adapters have carried this key by now, so what still waits is full training.
    made.agree("finetuning_type", "as here")


def _adapters(made: Conversion) -> None:
    """Convert the settings of LoRA. The numbers are LLaMA-Factory's defaults."""
    rank = made.count("lora_rank") or 8
    alpha = made.number("lora_alpha")

    # The same words as in PEFT, but for the one that stands for all linear layers.
    targets = _names(made, "lora_target") or ["all"]
    lora = {
        "rank": rank,
        "alpha": 2 * rank if alpha is None else alpha,
        "dropout": made.number("lora_dropout") or 0.0,
        "targets": [ALL_LINEAR] if targets == ["all"] else targets,
        "rslora": made.flag("use_rslora") or False,
        "dora": made.flag("use_dora") or False,
        "modules_to_save": _names(made, "additional_target"),
    }
    made.carry("finetuning_type", {"model.lora": lora}, "needs megatier[lora]")
    # One setting of ours has all of these, and each of them gets its finding.
    for key in LORA_KEYS:
        made.agree(key, "see finetuning_type")


def _names(made: Conversion, key: str) -> list[str]:
    """Return names that stand in a list, or in one text with commas."""
    value = made.raw(key)
    if not isinstance(value, list):
        value = (made.text(key) or "").split(",")
    words = [str(word).strip() for word in value]
    return [word for word in words if word]


def _computing(made: Conversion, key: str) -> None:
    # For its check alone.
    made.flag(key)

    # There fp16 is mixed precision as well, and bf16 is what stands for it here.
    dtype = "bf16" if any(map(made.raw, (key, "pure_bf16", "fp16"))) else "fp32"
    made.carry(key, {"model.compute_dtype": dtype}, "masters and moments are fp32")

    written = made.text("flash_attn") or ""
    attention = ATTENTION.get(written)
    if attention:
        made.carry("flash_attn", {"model.attention": attention})
    why = "model.attention stays sdpa, which keeps documents apart (docs/data.md)"
    made.leave("flash_attn", why, differs=True)


def _data(made: Conversion, key: str) -> None:
    # Datasets there are names in a table, which a run of megatier reads as well.
    folder = (made.text("dataset_dir") or "data").rstrip("/")
    names = made.raw(key)

    # A list, or one text with commas.
    if isinstance(names, list):
        names = ",".join(map(str, names))
    if names is not None:
        words = [name.strip() for name in str(names).split(",")]
        files = [f"{folder}/dataset_info.json#{name}" for name in words if name]
        made.carry(key, {"data.files": files})
        made.agree("dataset_dir", "see dataset")


def _holdout(made: Conversion, key: str) -> None:
    # Without the key nothing is held out there.
    share = made.number(key) if made.has(key) else 0.0

    # A val_size of 1 and more is a number of documents there.
    is_share = share is not None and 0 <= share < 1
    if is_share:
        made.carry(key, {"data.holdout_fraction": share})
    made.leave(key, "data.holdout_fraction is a share of the documents, below 1", differs=True)


def _steps(made: Conversion, key: str) -> None:
    """Convert batch and length. The numbers are LLaMA-Factory's defaults."""
    each = made.count(key) or 8
    groups = made.count("gradient_accumulation_steps") or 1
    made.carry(key, {"train.batch": each * groups}, "of one device; several have as many each", differs=True)
    made.carry("gradient_accumulation_steps", {"train.groups": groups})

    # LLaMA-Factory's default is -1, which means none.
    steps = made.number("max_steps")
    if steps is not None and steps > 0:
        made.carry("max_steps", {"train.steps": int(steps)})
        made.leave("num_train_epochs", "max_steps goes before it, as there")
    else:
        epochs = made.number("num_train_epochs")
        made.send("num_train_epochs", "train.epochs", epochs, default=3.0)
        made.agree("max_steps", "none, as there")


def _activations(made: Conversion, key: str) -> None:
    # LLaMA-Factory computes activations again unless this key tells it not to.
    made.carry(key, {"train.activations": "keep" if made.flag(key) else "recompute"})


def _optimizer(made: Conversion, key: str) -> None:
    """Convert what trains, by either of the two keys that say so."""
    if made.flag(key):
        remark = "AdamW trains all that is no matrix of a decoder layer, also in vision towers"
        made.carry(key, {"train.optimizer": "muon"}, remark, differs=True)
    elif made.has(key):
        made.carry(key, {"train.optimizer": "adamw"})

    optim = made.text("optim")
    if optim in PLAIN_ADAMW:
        made.carry("optim", {}, "AdamW, as train.optimizer says")
    elif optim in NARROW_ADAMW:
        remark = "train.moments: fp8 has 8 bits too, and has been tried less"
        made.carry("optim", {"train.moments": "bf16"}, remark, differs=True)
    elif optim in LION:
        remark = "its momentum is in fp32 here" if "8bit" in optim else ""
        made.carry("optim", {"train.optimizer": "lion"}, remark, differs=bool(remark))
    elif optim == "muon":
        made.carry("optim", {"train.optimizer": "muon"}, "in Moonshot's form", differs=True)


def _schedule(made: Conversion, key: str) -> None:
    name = made.text(key) or "linear"
    if name in SCHEDULES:
        made.carry(key, {"train.schedule": SCHEDULES[name]})
    made.leave(key, "train.schedule is constant, linear, cosine or wsd", differs=True)

    # A config has steps beside a ratio only if they are to overrule it.
    warmup = made.count("warmup_steps", 0)
    ratio = made.number("warmup_ratio")
    if not warmup and ratio:
        made.carry("warmup_ratio", {"train.warmup_ratio": ratio})
    elif made.has("warmup_steps"):
        made.carry("warmup_steps", {"train.warmup_steps": warmup or 0})


# The numbers are LLaMA-Factory's defaults.
RULES = {
    "stage": _kind,
    "model_name_or_path": becomes("model.path", Conversion.text),
    "bf16": _computing,
    "dataset": _data,
    "cutoff_len": becomes(
        "data.sequence_length",
        COUNT_FROM_2,
        2048,
        "sequences are packed, and longer documents are cut",
        differs=True,
    ),
    "val_size": _holdout,
    "per_device_train_batch_size": _steps,
    "seed": becomes("train.seed", COUNT_FROM_0, 42),
    "disable_gradient_checkpointing": _activations,
    "use_muon": _optimizer,
    "learning_rate": becomes("train.learning_rate", Conversion.number, 5e-5),
    "weight_decay": becomes("train.weight_decay", Conversion.number, 0.0),
    "adam_beta1": becomes("train.beta1", Conversion.number, 0.9),
    "adam_beta2": becomes("train.beta2", Conversion.number, 0.999),
    "adam_epsilon": becomes("train.eps", Conversion.number, 1e-8),
    "max_grad_norm": becomes("train.clip", Conversion.number, 1.0),
    "lr_scheduler_type": _schedule,
    "output_dir": becomes("output.directory", Conversion.text),
    "save_steps": becomes("output.checkpoint_every", Conversion.count),
    "save_total_limit": becomes("output.keep_checkpoints", Conversion.count),
    "eval_steps": becomes("train.evaluate_every", Conversion.count),
}
REASONS = {
    "do_train": "`megatier train` trains",
    "do_eval": EVALUATION,
    "do_predict": "there is nothing like it here",
    "eval_strategy": "train.evaluate_every says how often, and at the end it is always evaluated",
    "per_device_eval_batch_size": "evaluations have the batch of the training",
    "neat_packing": "conversations that share a sequence never see each other, unless data.cross_documents is true",
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
    "image_max_pixels": VISION,
    "video_max_pixels": VISION,
    "use_liger_kernel": "head and loss are one, chunk by chunk (model.fused_loss)",
    "enable_liger_kernel": "head and loss are one, chunk by chunk (model.fused_loss)",
}
DIFFERING = {
    "eval_dataset": EVALUATION,
    "template": "the tokenizer's own chat template is taken; data.chat_template names another one",
    "max_samples": "data.max_bytes bounds the text, in bytes",
    "packing": "sequences are always packed, and conversations in one do not see each other",
    "train_on_prompt": "of conversations only the assistant's turns are learnt",
    "mask_history": "all turns of the assistant are learnt",
    "fp16": "model.compute_dtype stays bf16, which needs no loss scaling",
    "pure_bf16": "masters are always fp32, and so are moments unless train.moments says bf16",
    "warmup_ratio": "train.warmup_steps overrules it, as there",
    "freeze_vision_tower": VISION,
    "freeze_multi_modal_projector": VISION,
    "optim": f"train.optimizer is {in_words(OPTIMIZER_NAMES)}",
    "data_seed": "data.seed sets the order of the text",
    "adapter_name_or_path": ADAPTER,
    "create_new_adapter": ADAPTER,
    "quantization_bit": QUANTISED,
    "quantization_method": QUANTISED,
    "pissa_init": FIRST_VALUES,
    "loraplus_lr_ratio": "all parameters of adapters have one learning rate",
}
TABLE = RULES, REASONS, DIFFERING
"""What becomes of LLaMA-Factory's keys; see `Conversion.convert`."""
