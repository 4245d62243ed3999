"""Converts DeepSpeed's JSON, with the `auto` values of Hugging Face. Keys that it does not give keep our defaults."""

from __future__ import annotations

from megatier.convert.conversion import AUTO, Conversion
from megatier.errors import ConfigError
from megatier.optimizers import OPTIMIZER_NAMES, in_words

KEYS = {
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
"""Keys of the first level that no other format has."""

SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
ZERO = "zero_optimization"
OFFLOADS = (f"{ZERO}.offload_param", f"{ZERO}.offload_optimizer")

ONE_GPU = "there is nothing to set for several GPUs: torchrun starts them, and they share the state by themselves"
RECORDED = "the first step records the order of the layers, and from then on all is fetched ahead by it"
BUDGETS = "tiers.gpu and tiers.ram say what lies where; the GPU is filled first, then RAM, then NVMe"
PLANNED = "slots are sized when the run begins, from the budgets"
FIGURES = "metrics.jsonl has times, bytes and memory of every step; `megatier report` shows them"
ELSEWHERE = "figures go to metrics.jsonl, and to TensorBoard with output.tensorboard"
NOT_THERE = "there is nothing like it here"
NO_SCALING = "bf16 needs no loss scaling; numerics.guard leaves steps out that are not finite"
FP32_STATE = "masters are always fp32, and so are moments unless train.moments says bf16"

REASONS = {
    "steps_per_print": "metrics.jsonl has every step",
    "wall_clock_breakdown": FIGURES,
    "memory_breakdown": FIGURES,
    "flops_profiler": FIGURES,
    "comms_logger": ONE_GPU,
    "dump_state": "config.yaml in the run's directory has all settings",
    "tensorboard": "TensorBoard's files lie in the run's directory",
    "wandb": ELSEWHERE,
    "csv_monitor": ELSEWHERE,
    "comet": ELSEWHERE,
    "communication_data_type": ONE_GPU,
    "seq_parallel_comm_data_type": ONE_GPU,
    "prescale_gradients": ONE_GPU,
    "gradient_predivide_factor": ONE_GPU,
    "disable_allgather": ONE_GPU,
    "sparse_gradients": "gradients are dense",
    "zero_allow_untested_optimizer": f"train.optimizer is {in_words(OPTIMIZER_NAMES)}",
    "zero_force_ds_cpu_optimizer": "AdamW runs where the state lies",
    "dataloader_drop_last": "steps are always full",
    "data_types": "gradients are added up in fp32",
    "checkpoint": "output.checkpoint_every writes checkpoints, in another format",
    "bf16": FP32_STATE,
    "bfloat16": FP32_STATE,
    "fp16": NO_SCALING,
    "amp": "model.compute_dtype is bf16 or fp32, for all layers",
    "torch_autocast": "model.compute_dtype is bf16 or fp32, for all layers",
    "optimizer": "AdamW has no such setting here",
    "scheduler": "train.schedule is constant, linear or cosine, and has no such setting",
    "aio": "tiers.io_threads, 4 unless set, read and write requests of 8 MiB; `megatier bench` shows what they reach",
    "activation_checkpointing": "train.activations says what happens to activations of every layer",
    "elasticity": ONE_GPU,
    "autotuning": "`megatier plan --search` chooses the settings",
    "pipeline": ONE_GPU,
    "tensor_parallel": ONE_GPU,
    "curriculum_learning": NOT_THERE,
    "data_efficiency": NOT_THERE,
    "progressive_layer_drop": NOT_THERE,
    "compression_training": NOT_THERE,
    "sparse_attention": NOT_THERE,
    "eigenvalue": NOT_THERE,
    "quantize_training": NOT_THERE,
    "hybrid_engine": NOT_THERE,
    "expert_parallel": ONE_GPU,
    "nebula": NOT_THERE,
    "compile": "model.compile says whether layers are compiled: by default on a GPU",
    ZERO: ONE_GPU,
    f"{ZERO}.stage": "all state lies on the tiers, whatever the stage",
    f"{ZERO}.sub_group_size": "tiers.chunk is chosen",
    f"{ZERO}.contiguous_gradients": "always so here",
    f"{ZERO}.ignore_unused_parameters": "a unit that no backward uses is not updated; others get gradients of zeros",
    f"{ZERO}.stage3_prefetch_bucket_size": RECORDED,
    f"{ZERO}.stage3_max_live_parameters": RECORDED,
    f"{ZERO}.stage3_max_reuse_distance": RECORDED,
    f"{ZERO}.stage3_param_persistence_threshold": BUDGETS,
    f"{ZERO}.stage3_model_persistence_threshold": BUDGETS,
    f"{ZERO}.memory_efficient_linear": NOT_THERE,
    f"{ZERO}.zenflow": "updates are never late or in part",
    f"{ZERO}.leaf_module": "a decoder layer is always fetched whole",
    f"{ZERO}.load_from_fp32_weights": FP32_STATE,
}
DIFFERING = {
    "sparse_gradients",
    "communication_data_type",
    "data_types",
    "amp",
    "torch_autocast",
    "optimizer",
    "scheduler",
    "curriculum_learning",
    "data_efficiency",
    "progressive_layer_drop",
    "compression_training",
    "sparse_attention",
    "quantize_training",
    f"{ZERO}.zenflow",
}
"""Those without which a run's numbers may differ."""
for _offload in OFFLOADS:
    REASONS |= {
        _offload: BUDGETS,
        f"{_offload}.device": BUDGETS,
        f"{_offload}.pin_memory": "RAM of the tiers is always pinned if there is a GPU",
        f"{_offload}.buffer_count": PLANNED,
        f"{_offload}.buffer_size": PLANNED,
        f"{_offload}.max_in_cpu": "tiers.ram says how much stays in RAM, in bytes",
        f"{_offload}.pipeline": "reading, updating and writing always overlap",
        f"{_offload}.pipeline_read": "reading, updating and writing always overlap",
        f"{_offload}.pipeline_write": "reading, updating and writing always overlap",
        f"{_offload}.fast_init": "files are always filled once, before the first step",
        f"{_offload}.super_offload": "tiers.streamed_share updates state of RAM on the GPU",
        f"{_offload}.cpuadam_cores_perc": "tiers.update_threads says how many cores run AdamW, in all",
    }


def convert(made: Conversion) -> None:
    """Carry what has a counterpart, and say of the rest why it has none.

    Raises:
        ConfigError: a value makes no sense, or contradicts another.
    """
    _batch(made)
    _precision(made)
    _optimizer(made)
    _schedule(made)
    _tiers(made)
    _output(made)
    made.leave_rest(REASONS, DIFFERING)


def _batch(made: Conversion) -> None:
    """Convert the three counts of the batch.

    A group is as many sequences as one GPU took at once. DeepSpeed's rule is
    train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * GPUs, and two of the three are
    enough. Any of them may be `auto`.
    """
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, micro, passes = (made.count(name) for name in names)
    if whole and whole % ((micro or 1) * (passes or 1)):
        raise ConfigError(
            f"{made.source}: train_batch_size is {whole}, no multiple of train_micro_batch_size_per_gpu ({micro or 1}) "
            f"times gradient_accumulation_steps ({passes or 1}). Change one of them."
        )

    # Without the whole batch one GPU is assumed.
    batch = whole
    if batch is None and micro:
        batch = micro * (passes or 1)
    if made.has(names[0]) and batch is not None:
        made.carry(names[0], {"train.batch": batch}, "" if whole else "from the other two")
    if batch is None:
        if passes:
            made.leave(names[2], "the batch is not given: set train.batch, and train.groups to this", differs=True)
    elif micro:
        words = f"passes of {micro} sequences, together {batch}"
        made.carry(names[1], {"train.batch": batch, "train.groups": batch // micro}, words)
        if passes:
            made.carry(names[2], {"train.groups": batch // micro}, "" if batch == micro * passes else "for all GPUs")
    elif passes:
        made.carry(names[2], {"train.groups": passes})

    # What is still waiting says `auto`: nothing above took it.
    made.send(names[0], "train.batch", None)
    made.send(names[1], "train.batch" if batch is None else "train.groups", None)
    made.send(names[2], "train.groups", None)


def _precision(made: Conversion) -> None:
    """Convert bf16 and fp16. A key that says `auto` leaves open which of them is on, so nothing follows from it."""
    # The first one is the name of older versions.
    name = "bfloat16.enabled" if made.has("bfloat16.enabled") else "bf16.enabled"
    other = "fp16.enabled"
    bf16 = made.flag(name)
    fp16 = made.flag(other)
    is_open = any(made.has(key) and value is None for key, value in ((name, bf16), (other, fp16)))
    if bf16 and fp16:
        raise ConfigError(f"{made.source}: bf16 and fp16 are both enabled. Disable one of them.")

    if bf16:
        made.carry(name, {"model.compute_dtype": "bf16"})
    elif fp16:
        why = "model.compute_dtype stays bf16, which has the range of fp32: no loss scaling"
        made.leave(other, why, differs=True)
    elif not is_open and (bf16, fp16) != (None, None):
        # Neither is on, and neither is left open: DeepSpeed computes in fp32 then.
        said = other if bf16 is None else name
        made.carry(said, {"model.compute_dtype": "fp32"}, "neither is on")

    for key, words in ((name, "model.compute_dtype stays bf16"), (other, "there is no fp16 here")):
        if made.has(key) and made.raw(key) is None:
            made.default(key, "model.compute_dtype")
        elif made.has(key):
            made.leave(key, words)


def _optimizer(made: Conversion) -> None:
    """Convert the optimizer if it is Muon, Lion, or an Adam whose decay is apart from the gradient, which is AdamW."""
    kind = made.text("optimizer.type")
    if kind is not None and kind.lower() == "muon":
        remark = "in Moonshot's form, whose learning rate is that of AdamW: set train.learning_rate"
        made.carry("optimizer.type", {"train.optimizer": "muon"}, remark, differs=True)
        made.send("optimizer.params.momentum", "train.momentum", made.number("optimizer.params.momentum"))
        made.leave_below("optimizer", "a setting of another form of Muon")
        return

    # DeepSpeed's Adam decays apart from the gradient unless it is told not to.
    decays_apart = made.raw("optimizer.params.adam_w_mode") is not False
    is_lion = kind is not None and kind.lower() == "lion"
    if kind is not None and not is_lion and (kind.lower() not in ("adam", "adamw") or not decays_apart):
        made.leave("optimizer.type", "AdamW trains instead: set train.learning_rate", differs=True)
        made.leave_below("optimizer", "a setting of another optimizer than AdamW")
        return

    if is_lion:
        made.carry("optimizer.type", {"train.optimizer": "lion", "train.beta2": 0.99})
    elif kind is not None:
        made.carry("optimizer.type", {}, "AdamW, as train.optimizer says")
    for name in ("adam_w_mode", "torch_adam"):
        if made.has(f"optimizer.params.{name}"):
            made.carry(f"optimizer.params.{name}", {}, "AdamW as torch has it")

    key = "optimizer.params.betas"
    betas = made.numbers(key, 2)
    if betas is not None:
        made.carry(key, {"train.beta1": betas[0], "train.beta2": betas[1]})
    elif made.has(key):
        made.default(key, "train.beta1", "train.beta2")

    for name, setting in (("lr", "learning_rate"), ("eps", "eps"), ("weight_decay", "weight_decay")):
        key = f"optimizer.params.{name}"
        decays = name == "weight_decay"
        remark = "not of biases and norms, as Hugging Face does it" if decays else ""
        made.send(key, f"train.{setting}", made.number(key), remark, differs=decays)


def _schedule(made: Conversion) -> None:
    """Convert the learning rate's schedule. It comes after the optimizer, since its peak overrides the rate there."""
    kind = made.text("scheduler.type")
    if kind is None:
        return
    if kind not in SCHEDULES:
        why = f"only {', '.join(SCHEDULES)} have a counterpart: set train.schedule"
        made.leave("scheduler.type", why, differs=True)
        made.leave_below("scheduler", "a setting of that schedule")
        return

    made.carry("scheduler.type", {"train.schedule": SCHEDULES[kind]})
    params = "scheduler.params"
    made.send(f"{params}.total_num_steps", "train.steps", made.count(f"{params}.total_num_steps"))
    # DeepSpeed's own default is a logarithmic warm-up, so a file that does not name one has that.
    is_linear = made.text(f"{params}.warmup_type", "linear", "log", AUTO) == "linear"
    words = "" if is_linear else "rising in a straight line, not logarithmically"
    steps = made.count(f"{params}.warmup_num_steps", 0)
    made.send(f"{params}.warmup_num_steps", "train.warmup_steps", steps, words, differs=not is_linear)

    if is_linear:
        made.carry(f"{params}.warmup_type", {}, "as here")
    elif made.has(f"{params}.warmup_type"):
        made.leave(f"{params}.warmup_type", "the learning rate rises in a straight line", differs=True)

    peak = made.number(f"{params}.warmup_max_lr")
    words = "goes before optimizer.params.lr, as in DeepSpeed" if "train.learning_rate" in made.settings else ""
    made.send(f"{params}.warmup_max_lr", "train.learning_rate", peak, words)

    for key in (f"{params}.warmup_min_lr", f"{params}.warmup_min_ratio"):
        if made.number(key) == 0:
            made.carry(key, {}, "as here")
        elif made.has(key):
            made.leave(key, "the learning rate rises from 0", differs=True)

    if kind == "WarmupCosineLR":
        key = f"{params}.cos_min_ratio"
        made.send(key, "train.min_learning_rate_ratio", made.number(key))


def _tiers(made: Conversion) -> None:
    """Convert what says where state lies: the mounts, `cpu` and activations. Budgets decide the rest here."""
    mounts: list[str] = []
    for offload in OFFLOADS:
        device = made.text(f"{offload}.device", "none", "cpu", "nvme", AUTO)
        path = made.text(f"{offload}.nvme_path")
        if device != "nvme":
            if made.has(f"{offload}.nvme_path"):
                made.leave(f"{offload}.nvme_path", f"device is {device or AUTO}, so nothing lies there")
            if device == "cpu":
                made.carry(f"{offload}.device", {}, f"RAM, as here unless tiers.nvme is set; {BUDGETS}")
            continue

        if path is None:
            raise ConfigError(f"{made.source}: {offload}.device is nvme; give {offload}.nvme_path, a directory, too.")
        # Both kinds of state may name one directory, which is one mount.
        mounts = list(dict.fromkeys([*mounts, path]))
        made.carry(f"{offload}.nvme_path", {"tiers.nvme": mounts}, "what is free there; DIR:SIZE takes less")
        made.carry(f"{offload}.device", {"tiers.nvme": mounts}, "for what GPU and RAM do not hold")

    for name in ("cpu_offload", "cpu_offload_param"):
        if made.flag(f"{ZERO}.{name}"):
            made.carry(f"{ZERO}.{name}", {}, f"RAM, as here unless tiers.nvme is set; {BUDGETS}")

    if made.flag("aio.use_gds"):
        made.carry("aio.use_gds", {"tiers.gpu_direct": True}, "needs a GPU and the extra megatier[gds]")
    if made.flag("activation_checkpointing.cpu_checkpointing"):
        made.carry("activation_checkpointing.cpu_checkpointing", {"train.activations": "offload"})


def _output(made: Conversion) -> None:
    """Convert clipping, TensorBoard and the export. DeepSpeed clips by 0 if it does not clip at all."""
    clip = made.number("gradient_clipping")
    made.send("gradient_clipping", "train.clip", clip or None, "" if clip else "off")
    if made.flag("tensorboard.enabled"):
        made.carry("tensorboard.enabled", {"output.tensorboard": True}, "needs the extra megatier[tensorboard]")

    # The second one is the name of older versions.
    for name in ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"):
        key = f"{ZERO}.{name}"
        if made.flag(key):
            made.carry(key, {"output.export": True, "output.export_dtype": "bf16"})
        elif made.has(key):
            made.leave(key, "output.export, on by default, writes the model at the end, layer by layer")
