"""Converts keys that several trainers share, most of them Hugging Face's arguments.

LLaMA-Factory and Axolotl pass these to the Trainer, so they mean the same in both. Each has its own defaults.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial

from megatier.config.lora import ALL_LINEAR
from megatier.config.output_section import REPOSITORY, TRACKER_NAMES
from megatier.convert.conversion import COUNT_FROM_0, COUNT_FROM_2, Conversion, Rule, becomes
from megatier.errors import ConfigError
from megatier.optimizers import OPTIMIZER_NAMES, in_words


def _every(conversion: Conversion, key: str) -> int | None:
    """Return an interval in steps. Below 1 it is a share of all steps, as in the Trainer.

    Raises:
        ConfigError: the file does not say how many steps there are.
    """
    share = conversion.number(key)
    if share is None or not 0 < share < 1:
        return conversion.count(key)

    # If the rule for steps ran first, it has already converted the key.
    steps = conversion.settings.get("train.steps") or conversion.number("max_steps")
    if not isinstance(steps, int | float) or steps <= 0:
        raise ConfigError(
            f"{conversion.source}: {key} is {share}, a share of all steps, and how many there are is known only once "
            "the data are read. Set max_steps there, or a whole number of steps here."
        )

    # Rounded up, as in the Trainer.
    return math.ceil(steps * share)


_KEYS: Mapping[str, tuple[str, Callable[[Conversion, str], object]]] = {
    "seed": ("train.seed", COUNT_FROM_0),
    "learning_rate": ("train.learning_rate", Conversion.number),
    "weight_decay": ("train.weight_decay", Conversion.number),
    "adam_beta1": ("train.beta1", Conversion.number),
    "adam_beta2": ("train.beta2", Conversion.number),
    "adam_epsilon": ("train.eps", Conversion.number),
    "max_grad_norm": ("train.clip", Conversion.number),
    "output_dir": ("output.directory", Conversion.text),
    "save_steps": ("output.checkpoint_every", _every),
    "save_total_limit": ("output.keep_checkpoints", Conversion.count),
    "eval_steps": ("train.evaluate_every", _every),
}
"""Keys that correspond to one setting, and how their values are read."""
_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    # Warm-up is a separate setting here, not a part of a schedule.
    "constant_with_warmup": "constant",
}
PLAIN_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "paged_adamw", "paged_adamw_32bit")
NARROW_ADAMW = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
_LION = ("lion_32bit", "paged_lion_32bit", "lion_8bit", "paged_lion_8bit")
"""Values of optim that are AdamW with moments in 32 and in 8 bits, and Lion."""

FIGURES = "metrics.jsonl has every step; `megatier report` draws it"
ONE_PASS = "the text is tokenised once, before the first step"
_OWN_CODE = "only architectures of transformers itself are run"
EVALUATION = "data.holdout_fraction keeps a part of the text for evaluation, and data.holdout_split names a split"
QUANTISED = "the base stays in full precision"
ADAPTER_INIT = "adapters begin as PEFT's do by default"
STORED_ADAPTER = "model.lora.adapter goes on with an adapter, whose own settings then count"
ONE_LOSS = "head and loss are one, chunk by chunk (model.fused_loss)"
APART = "model.attention stays at its default, which keeps documents apart (docs/data.md)"
SHARED_STATE = "ranks share the state, and torchrun starts them (docs/scale_out.md)"
BUDGETS = "the budgets of the tiers say what lies where"

COMMON_REASONS = {
    "eval_strategy": "train.evaluate_every says how often, and at the end it is always evaluated",
    "save_strategy": "output.checkpoint_every says how often",
    "logging_steps": FIGURES,
    "run_name": "output.directory names the run",
    "resume_from_checkpoint": "`megatier resume` goes on with a run",
    "trust_remote_code": _OWN_CODE,
    "ddp_timeout": "train.stall_timeout says when a run that hangs ends",
    "deepspeed": f"{BUDGETS}; `megatier convert` reads that file too",
    "fsdp": BUDGETS,
    "fsdp_config": BUDGETS,
    "dataloader_num_workers": ONE_PASS,
    "metric_for_best_model": "the held-out loss decides",
    "greater_is_better": "the held-out loss decides, and a lower one is better",
    "push_to_hub": "output.push_to_hub names the repository, as owner/name",
    "hub_strategy": "the model is uploaded once, at the end",
    "hub_private_repo": "a new repository is private, unless output.hub_private_repo is false",
}
"""Why keys have no counterpart, if results stay the same without them."""
COMMON_DIFFERING = {
    "fp16": "model.compute_dtype stays bf16, which needs no loss scaling",
    "warmup_ratio": "train.warmup_steps overrules it, as there",
    "data_seed": "data.seed sets the order of the text",
    "loraplus_lr_ratio": "all parameters of adapters have one learning rate",
    "neftune_noise_alpha": "there is no noise on embeddings",
}
"""Why keys have no counterpart, if results may differ without them."""


def common(**defaults: object) -> dict[str, Rule]:
    """Return the rules of keys that correspond to one setting.

    Args:
        defaults: the trainer's defaults for missing keys.
    """
    return {key: becomes(setting, read, defaults.get(key)) for key, (setting, read) in _KEYS.items()}


def sequence_length(default: int) -> Rule:
    """Return the rule of the key for the sequence length."""
    remark = "sequences are packed, and longer documents are cut"
    return becomes("data.sequence_length", COUNT_FROM_2, default, remark, differs=True)


def if_on(table: Mapping[str, str]) -> dict[str, Rule]:
    """Return rules of keys without a counterpart, without which results may differ unless they are off or empty."""
    return {key: partial(_leave_if_on, why=why) for key, why in table.items()}


def _leave_if_on(conversion: Conversion, key: str, why: str) -> None:
    is_on = bool(conversion.raw(key))
    conversion.leave(key, why, differs=is_on)


def named(conversion: Conversion, key: str) -> list[str]:
    """Return names from a list, or from comma-separated text."""
    value = conversion.raw(key)
    if not isinstance(value, list):
        value = (conversion.text(key) or "").split(",")
    names = [str(word).strip() for word in value]
    return [word for word in names if word]


def lora_of(conversion: Conversion, keys: Mapping[str, str], rank: int, alpha: float | None) -> dict[str, object]:
    """Return the settings of adapters.

    Args:
        conversion: the settings and findings so far.
        keys: the trainer's keys by the names of the settings.
        rank: its default rank.
        alpha: its default alpha; None: twice the rank.
    """
    rank = conversion.count(keys["rank"]) or rank
    given = conversion.number(keys["alpha"])
    default = 2 * rank if alpha is None else alpha

    # PEFT's words, except the one for all linear layers.
    targets = named(conversion, keys["targets"]) or ["all"]
    return {
        "rank": rank,
        "alpha": default if given is None else given,
        "dropout": conversion.number(keys["dropout"]) or 0.0,
        "targets": [ALL_LINEAR] if targets in (["all"], [ALL_LINEAR]) else targets,
        "rslora": conversion.flag(keys["rslora"]) or False,
        "dora": conversion.flag(keys["dora"]) or False,
        "modules_to_save": named(conversion, keys["modules_to_save"]),
    }


def batches(conversion: Conversion, key: str, *, batch: int, epochs_key: str, epochs: float) -> None:
    """Convert the batch size and the number of steps.

    Args:
        conversion: the settings and findings so far.
        key: the trainer's key for sequences per device and micro-batch.
        batch: its default.
        epochs_key: the trainer's key for epochs.
        epochs: its default.
    """
    each = conversion.count(key) or batch
    groups = conversion.count("gradient_accumulation_steps") or 1

    # The file does not say how many devices were used.
    conversion.set(key, {"train.batch": each * groups}, "of one device; several have as many each", differs=True)
    conversion.set("gradient_accumulation_steps", {"train.groups": groups})
    _length(conversion, epochs_key, epochs)


def _length(conversion: Conversion, epochs_key: str, epochs: float) -> None:
    """Convert the length of the run. Steps take precedence over epochs, which have a default."""
    # The default of -1 steps means none.
    steps = conversion.number("max_steps")
    if steps is not None and steps > 0:
        conversion.set("max_steps", {"train.steps": conversion.count("max_steps")})
        conversion.leave(epochs_key, "max_steps goes before it, as there")
        return
    conversion.send(epochs_key, "train.epochs", conversion.number(epochs_key), default=epochs)
    conversion.agree("max_steps", "none, as there")


def optimizer(conversion: Conversion, key: str) -> None:
    """Convert the optimizer, by Hugging Face's name."""
    name = conversion.text(key)
    if name in PLAIN_ADAMW:
        conversion.set(key, {}, "AdamW, as train.optimizer says")
    elif name in NARROW_ADAMW:
        remark = "train.moments: fp8 has 8 bits too, and has been tried less"
        conversion.set(key, {"train.moments": "bf16"}, remark, differs=True)
    elif name in _LION:
        remark = "its momentum is in fp32 here" if "8bit" in name else ""
        conversion.set(key, {"train.optimizer": "lion"}, remark, differs=bool(remark))
    elif name == "muon":
        conversion.set(key, {"train.optimizer": "muon"}, "in Moonshot's form", differs=True)

    # This does nothing if the key was carried, since it is no longer pending then.
    conversion.leave(key, f"train.optimizer is {in_words(OPTIMIZER_NAMES)}", differs=True)


def schedule(conversion: Conversion, key: str, default: str) -> None:
    """Convert the schedule and its warm-up."""
    name = conversion.text(key) or default
    least = "lr_scheduler_kwargs.min_lr_rate"
    if name == "cosine_with_min_lr" and conversion.has(least):
        conversion.set(key, {"train.schedule": "cosine"})
        conversion.send(least, "train.min_learning_rate_ratio", conversion.number(least))
    elif name in _SCHEDULES:
        conversion.set(key, {"train.schedule": _SCHEDULES[name]})
    conversion.leave(key, "train.schedule is constant, linear, cosine or wsd", differs=True)

    # In a config, steps override a ratio.
    warmup = conversion.count("warmup_steps", 0)
    ratio = conversion.number("warmup_ratio")
    if not warmup and ratio:
        conversion.set("warmup_ratio", {"train.warmup_ratio": ratio})
    elif conversion.has("warmup_steps"):
        conversion.set("warmup_steps", {"train.warmup_steps": warmup or 0})


def holdout(conversion: Conversion, key: str) -> None:
    """Convert the share of held-out documents. Without the key none are."""
    share = conversion.number(key) if conversion.has(key) else 0.0

    # A size of 1 or more is a number of documents there.
    is_share = share is not None and 0 <= share < 1
    if is_share:
        conversion.set(key, {"data.holdout_fraction": share})
    conversion.leave(key, "data.holdout_fraction is a share of the documents, below 1", differs=True)


def best_model(conversion: Conversion, key: str, patience: str) -> None:
    """Convert the request for the best model, and early stopping.

    Both depend on evaluations during training, which `eval_steps` has set by now.
    """
    is_evaluated = "train.evaluate_every" in conversion.settings
    why = "set it with train.evaluate_every, which counts steps"
    if conversion.flag(key):
        if is_evaluated:
            conversion.set(key, {"output.load_best_model_at_end": True})
        conversion.leave(key, f"output.load_best_model_at_end: {why}", differs=True)
    conversion.leave(key, "as here")

    count = conversion.count(patience)
    if count is not None and is_evaluated:
        conversion.set(patience, {"train.early_stopping_patience": count})
    conversion.leave(patience, f"train.early_stopping_patience: {why}", differs=count is not None)


def trackers(conversion: Conversion, key: str) -> None:
    """Convert the trackers that a run reports to."""
    names = named(conversion, key)
    known = [name for name in names if name in TRACKER_NAMES]
    others = [name for name in names if name not in TRACKER_NAMES and name != "none"]
    left = f"{', '.join(others)}: there is none of these here; {FIGURES}" if others else ""
    if known:
        conversion.set(key, {"output.report_to": list(dict.fromkeys(known))}, left)
    conversion.leave(key, left or FIGURES)


def hub(conversion: Conversion, key: str) -> None:
    """Convert the repository for the model, and whether it is private."""
    repository = conversion.text(key)
    if repository is not None and re.fullmatch(REPOSITORY, repository):
        conversion.set(key, {"output.push_to_hub": repository})
        if conversion.flag("hub_private_repo") is not None:
            conversion.set("hub_private_repo", {"output.hub_private_repo": conversion.flag("hub_private_repo")})
    conversion.leave(key, "output.push_to_hub is owner/name")
