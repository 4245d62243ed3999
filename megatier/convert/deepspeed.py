"""Converts DeepSpeed's JSON, including Hugging Face's `auto` values. Missing keys keep our defaults."""

from __future__ import annotations

from typing import Any

from megatier.convert.conversion import AUTO, COUNT_FROM_0, Conversion, becomes, below, is_number, turns_on
from megatier.errors import ConfigError
from megatier.optimizers import OPTIMIZER_NAMES, in_words

DEEPSPEED_KEYS = {
    "zero_optimization",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "bf16",
    "bfloat16",
    "fp16",
    "scheduler",
    "aio",
    "steps_per_print",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
    "activation_checkpointing",
}
"""Top-level keys that no other format has."""

_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
ZERO = "zero_optimization"
OFFLOADS = (f"{ZERO}.offload_param", f"{ZERO}.offload_optimizer")

ONE_GPU = "there is nothing to set for several GPUs: torchrun starts them, and they share the state by themselves"
RECORDED = "the first step records the order of the layers, and from then on all is fetched ahead by it"
_BUDGETS = "tiers.gpu and tiers.ram say what lies where; the GPU is filled first, then RAM, then NVMe"
IN_RAM = f"RAM, as here unless tiers.nvme is set; {_BUDGETS}"
PLANNED = "slots are sized when the run begins, from the budgets"
_FIGURES = "metrics.jsonl has times, bytes and memory of every step; `megatier report` shows them"
_ELSEWHERE = "figures go to metrics.jsonl, and to the trackers of output.report_to"
_NOT_THERE = "there is nothing like it here"
NO_SCALING = "bf16 needs no loss scaling; numerics.guard leaves steps out that are not finite"
FP32_STATE = "masters are always fp32, and so are moments unless train.moments says bf16"


def _batch(conversion: Conversion, key: str) -> None:
    """Convert the three batch sizes.

    A group has as many sequences as one GPU's micro-batch. DeepSpeed's rule is train_batch_size =
    train_micro_batch_size_per_gpu * gradient_accumulation_steps * GPUs, of which two are enough. Any of them may be
    `auto`.
    """
    of_micro = "train_micro_batch_size_per_gpu"
    of_passes = "gradient_accumulation_steps"
    whole = conversion.count(key)
    micro = conversion.count(of_micro)
    passes = conversion.count(of_passes)
    # The file does not say how many GPUs were used, so any whole number is accepted.
    if whole and whole % ((micro or 1) * (passes or 1)):
        raise ConfigError(
            f"{conversion.source}: train_batch_size is {whole}, no multiple of "
            f"train_micro_batch_size_per_gpu ({micro or 1}) times "
            f"gradient_accumulation_steps ({passes or 1}). Change one of them."
        )

    # Without the whole batch, one GPU is assumed.
    batch = whole or (micro and micro * (passes or 1))

    # A micro-batch of one GPU fits its memory, so groups keep its size.
    groups = batch // micro if batch and micro else passes
    if batch and conversion.has(key):
        conversion.set(key, {"train.batch": batch}, "" if whole else "from the other two")
    if batch and micro:
        remark = f"passes of {micro} sequences, together {batch}"
        conversion.set(of_micro, {"train.batch": batch, "train.groups": groups}, remark)
    if batch and passes:
        remark = "for all GPUs" if micro and batch != micro * passes else ""
        conversion.set(of_passes, {"train.groups": groups}, remark)
    elif passes:
        conversion.leave(of_passes, "the batch is not given: set train.batch, and train.groups to this", differs=True)

    # Keys that are still pending say `auto`.
    conversion.send(key, "train.batch", None)
    conversion.send(of_micro, "train.groups" if batch else "train.batch", None)
    conversion.send(of_passes, "train.groups", None)


def _precision(conversion: Conversion, key: str) -> None:
    """Convert bf16 and fp16. With `auto` it is open which of them is on, so nothing follows."""
    # The name in older versions, which DeepSpeed still reads.
    bf16 = "bfloat16.enabled" if conversion.has("bfloat16.enabled") else key
    fp16 = "fp16.enabled"
    given = {name: conversion.flag(name) for name in (bf16, fp16) if conversion.has(name)}
    if all(given.get(name) for name in (bf16, fp16)):
        raise ConfigError(f"{conversion.source}: bf16 and fp16 are both enabled. Disable one of them.")

    if given.get(bf16):
        conversion.set(bf16, {"model.compute_dtype": "bf16"})
    elif given.get(fp16):
        conversion.leave(
            fp16, "model.compute_dtype stays bf16, which has the range of fp32: no loss scaling", differs=True
        )
    elif given and None not in given.values():
        # Both are off, so DeepSpeed computes in fp32.
        conversion.set(next(iter(given)), {"model.compute_dtype": "fp32"}, "neither is on")

    # Keys that are still pending say `auto`, or are off.
    for name, remark in ((bf16, "model.compute_dtype stays bf16"), (fp16, "there is no fp16 here")):
        if given.get(name) is None:
            conversion.default(name, "model.compute_dtype")
        conversion.leave(name, remark)


def _optimizer(conversion: Conversion, key: str) -> None:
    """Convert the optimizer if it is Muon, Lion, or an Adam with decoupled decay, which is AdamW."""
    kind = (conversion.text(key) or "adamw").lower()

    # DeepSpeed's Adam has decoupled decay by default.
    decays_apart = conversion.raw("optimizer.params.adam_w_mode") is not False
    if kind == "muon":
        remark = "in Moonshot's form, whose learning rate is that of AdamW: set train.learning_rate"
        conversion.set(key, {"train.optimizer": "muon"}, remark, differs=True)
        momentum = conversion.number("optimizer.params.momentum")
        conversion.send("optimizer.params.momentum", "train.momentum", momentum)
        conversion.leave_below("optimizer", "a setting of another form of Muon")
    elif kind == "lion":
        # DeepSpeed's default beta2 for Lion. Betas in the file are converted later, and override it.
        conversion.set(key, {"train.optimizer": "lion", "train.beta2": 0.99})
    elif conversion.raw(key) is not None and (kind not in ("adam", "adamw") or not decays_apart):
        conversion.leave(key, "AdamW trains instead: set train.learning_rate", differs=True)
        conversion.leave_below("optimizer", "a setting of another optimizer than AdamW")
    elif conversion.raw(key) is not None:
        conversion.agree(key, "AdamW, as train.optimizer says")


def _as_torch(conversion: Conversion, key: str) -> None:
    conversion.agree(key, "AdamW as torch has it")


def _betas(conversion: Conversion, key: str) -> None:
    betas = conversion.checked(key, conversion.raw(key), "a list of 2 numbers", _is_pair)
    if betas is None:
        conversion.default(key, "train.beta1", "train.beta2")
        return
    beta1, beta2 = betas
    conversion.set(key, {"train.beta1": beta1, "train.beta2": beta2})


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_number, value))


def _schedule(conversion: Conversion, key: str) -> None:
    """Convert the learning rate schedule. It comes after the optimizer, as its peak overrides the rate there."""
    kind = conversion.text(key)
    if kind is None:
        return
    if kind not in _SCHEDULES:
        conversion.leave(key, f"only {', '.join(_SCHEDULES)} have a counterpart: set train.schedule", differs=True)
        conversion.leave_below("scheduler", "a setting of that schedule")
        return

    conversion.set(key, {"train.schedule": _SCHEDULES[kind]})
    params = "scheduler.params."
    becomes("train.steps", Conversion.count)(conversion, f"{params}total_num_steps")
    # DeepSpeed's default is a logarithmic warm-up.
    is_linear = conversion.text(f"{params}warmup_type", "linear", "log", AUTO) == "linear"
    remark = "" if is_linear else "rising in a straight line, not logarithmically"
    becomes("train.warmup_steps", COUNT_FROM_0, None, remark, differs=not is_linear)(
        conversion, f"{params}warmup_num_steps"
    )
    if is_linear:
        conversion.set(f"{params}warmup_type", {}, "as here")
    # A carried key is no longer pending, so this only applies to other warm-ups.
    conversion.leave(f"{params}warmup_type", "the learning rate rises in a straight line", differs=True)

    remark = "goes before optimizer.params.lr, as in DeepSpeed" if "train.learning_rate" in conversion.settings else ""
    becomes("train.learning_rate", Conversion.number, None, remark)(conversion, f"{params}warmup_max_lr")
    for least in (f"{params}warmup_min_lr", f"{params}warmup_min_ratio"):
        if conversion.number(least) == 0:
            conversion.set(least, {}, "as here")
        conversion.leave(least, "the learning rate rises from 0", differs=True)

    if kind == "WarmupCosineLR":
        becomes("train.min_learning_rate_ratio", Conversion.number)(conversion, f"{params}cos_min_ratio")


def _tiers(conversion: Conversion, key: str) -> None:
    """Convert where state lies: mounts and `cpu`. Budgets decide the rest here."""
    # With `cpu` a mount may be named too, which DeepSpeed ignores.
    device = conversion.text(f"{key}.device", "none", "cpu", "nvme", AUTO)
    path = conversion.text(f"{key}.nvme_path")
    if device != "nvme":
        conversion.leave(f"{key}.nvme_path", f"device is {device or AUTO}, so nothing lies there")
        if device == "cpu":
            conversion.set(f"{key}.device", {}, IN_RAM)
        return

    if path is None:
        raise ConfigError(f"{conversion.source}: {key}.device is nvme; give {key}.nvme_path, a directory, too.")
    # Both kinds of state may name the same directory, which is one mount.
    before: Any = conversion.settings.get("tiers.nvme", ())
    mounts = list(dict.fromkeys([*before, path]))
    conversion.set(f"{key}.nvme_path", {"tiers.nvme": mounts}, "what is free there; DIR:SIZE takes less")
    conversion.set(f"{key}.device", {"tiers.nvme": mounts}, "for what GPU and RAM do not hold")


def _clip(conversion: Conversion, key: str) -> None:
    """Convert clipping. In DeepSpeed 0 means no clipping."""
    clip = conversion.number(key)
    conversion.send(key, "train.clip", clip or None, "" if clip else "off")


def _export(conversion: Conversion, key: str) -> None:
    if conversion.flag(key):
        conversion.set(key, {"output.export": True, "output.export_dtype": "bf16"})
    conversion.leave(key, "output.export, on by default, writes the model at the end, layer by layer")


_RULES = {
    "train_batch_size": _batch,
    "bf16.enabled": _precision,
    "optimizer.type": _optimizer,
    "optimizer.params.adam_w_mode": _as_torch,
    "optimizer.params.torch_adam": _as_torch,
    "optimizer.params.betas": _betas,
    "optimizer.params.lr": becomes("train.learning_rate", Conversion.number),
    "optimizer.params.eps": becomes("train.eps", Conversion.number),
    "optimizer.params.weight_decay": becomes(
        "train.weight_decay",
        Conversion.number,
        remark="not of biases and norms, as Hugging Face does it",
        differs=True,
    ),
    "scheduler.type": _schedule,
    # These are sections. Their rule reads the keys below them.
    **dict.fromkeys(OFFLOADS, _tiers),
    # The keys of older versions, before there were sections.
    f"{ZERO}.cpu_offload": turns_on({}, IN_RAM),
    f"{ZERO}.cpu_offload_param": turns_on({}, IN_RAM),
    "aio.use_gds": turns_on({"tiers.gpu_direct": True}, "needs a GPU and the extra megatier[gds]"),
    "activation_checkpointing.cpu_checkpointing": turns_on({"train.activations": "offload"}),
    "gradient_clipping": _clip,
    "tensorboard.enabled": turns_on({"output.tensorboard": True}, "needs the extra megatier[tensorboard]"),
    "wandb.enabled": turns_on({"output.report_to": ["wandb"]}, "needs the extra megatier[wandb]"),
    # The second one is the name in older versions.
    f"{ZERO}.stage3_gather_16bit_weights_on_model_save": _export,
    f"{ZERO}.stage3_gather_fp16_weights_on_model_save": _export,
}
OFFLOAD_REASONS = {
    "device": _BUDGETS,
    "pin_memory": "RAM of the tiers is always pinned if there is a GPU",
    "buffer_count": PLANNED,
    "buffer_size": PLANNED,
    "max_in_cpu": "tiers.ram says how much stays in RAM, in bytes",
    "pipeline": "reading, updating and writing always overlap",
    "pipeline_read": "reading, updating and writing always overlap",
    "pipeline_write": "reading, updating and writing always overlap",
    "fast_init": "files are always filled once, before the first step",
    "super_offload": "tiers.streamed_share updates state of RAM on the GPU",
    "cpuadam_cores_perc": "tiers.update_threads says how many cores run AdamW, in all",
}
_REASONS = {
    "steps_per_print": "metrics.jsonl has every step",
    "wall_clock_breakdown": _FIGURES,
    "memory_breakdown": _FIGURES,
    "flops_profiler": _FIGURES,
    "comms_logger": ONE_GPU,
    "dump_state": "config.yaml in the run's directory has all settings",
    "tensorboard": "TensorBoard's files lie in the run's directory",
    "wandb": _ELSEWHERE,
    "csv_monitor": _ELSEWHERE,
    "comet": _ELSEWHERE,
    "seq_parallel_comm_data_type": ONE_GPU,
    "prescale_gradients": ONE_GPU,
    "gradient_predivide_factor": ONE_GPU,
    "disable_allgather": ONE_GPU,
    "zero_allow_untested_optimizer": f"train.optimizer is {in_words(OPTIMIZER_NAMES)}",
    "zero_force_ds_cpu_optimizer": "AdamW runs where the state lies",
    "dataloader_drop_last": "steps are always full",
    "checkpoint": "output.checkpoint_every writes checkpoints, in another format",
    "bf16": FP32_STATE,
    "bfloat16": FP32_STATE,
    "fp16": NO_SCALING,
    "aio": "tiers.io_threads, 4 unless set, read and write requests of 8 MiB; `megatier bench` shows what they reach",
    "activation_checkpointing": "train.activations says what happens to activations of every layer",
    "elasticity": ONE_GPU,
    "autotuning": "`megatier plan --search` chooses the settings",
    "pipeline": ONE_GPU,
    "tensor_parallel": ONE_GPU,
    "eigenvalue": _NOT_THERE,
    "hybrid_engine": _NOT_THERE,
    "expert_parallel": ONE_GPU,
    "nebula": _NOT_THERE,
    "compile": "model.compile says whether layers are compiled: by default on a GPU",
    ZERO: ONE_GPU,
    **below(
        ZERO,
        {
            "stage": "all state lies on the tiers, whatever the stage",
            "sub_group_size": "tiers.chunk is chosen",
            "contiguous_gradients": "always so here",
            "ignore_unused_parameters": "a unit that no backward uses is not updated; others get gradients of zeros",
            "stage3_prefetch_bucket_size": RECORDED,
            "stage3_max_live_parameters": RECORDED,
            "stage3_max_reuse_distance": RECORDED,
            "stage3_param_persistence_threshold": _BUDGETS,
            "stage3_model_persistence_threshold": _BUDGETS,
            "memory_efficient_linear": _NOT_THERE,
            "leaf_module": "a decoder layer is always fetched whole",
            "load_from_fp32_weights": FP32_STATE,
        },
    ),
    **{name: why for offload in OFFLOADS for name, why in below(offload, OFFLOAD_REASONS).items()},
    # For all other keys of these sections, since the longest known name gives the reason.
    **dict.fromkeys(OFFLOADS, _BUDGETS),
}
_DIFFERING = {
    "communication_data_type": ONE_GPU,
    "sparse_gradients": "gradients are dense",
    "data_types": "gradients are added up in fp32",
    "amp": "model.compute_dtype is bf16 or fp32, for all layers",
    "torch_autocast": "model.compute_dtype is bf16 or fp32, for all layers",
    "optimizer": "AdamW has no such setting here",
    "scheduler": "train.schedule is constant, linear, cosine or wsd, and has no such setting",
    "curriculum_learning": _NOT_THERE,
    "data_efficiency": _NOT_THERE,
    "progressive_layer_drop": _NOT_THERE,
    "compression_training": _NOT_THERE,
    "sparse_attention": _NOT_THERE,
    "quantize_training": _NOT_THERE,
    f"{ZERO}.zenflow": "updates are never late or in part",
}
DEEPSPEED_TABLE = _RULES, _REASONS, _DIFFERING
"""The conversion of DeepSpeed's keys; see `Conversion.convert`."""
