"""Converts the YAML of `accelerate config`, which describes how a script is launched, and little of the training."""

from __future__ import annotations

from megatier.convert.common import BUDGETS, SHARED_STATE
from megatier.convert.conversion import Conversion, becomes, below, turns_on

ACCELERATE_KEYS = {"compute_environment", "distributed_type"}
"""Keys that all of these files have, and no other format."""

_DEEPSPEED = "deepspeed_config"
_FSDP = "fsdp_config"
_NOT_THERE = "there is nothing like it here"


def _precision(conversion: Conversion, key: str) -> None:
    # YAML reads an unquoted `no` as false.
    kind = "no" if conversion.raw(key) is False else conversion.text(key, "no", "bf16", "fp16", "fp8")
    if kind == "fp16":
        conversion.leave(
            key, "model.compute_dtype stays bf16, which has the range of fp32: no loss scaling", differs=True
        )
    elif kind == "fp8":
        settings = {"model.compute_dtype": "bf16", "numerics.products": "fp8"}
        conversion.set(key, settings, "scales are taken from the numbers themselves", differs=True)
    elif kind is not None:
        conversion.set(key, {"model.compute_dtype": "bf16" if kind == "bf16" else "fp32"})


def _compilation(conversion: Conversion, key: str) -> None:
    backend = (conversion.text(key) or "").lower()
    if backend in ("no", "inductor"):
        conversion.set(key, {"model.compile": backend == "inductor"})
    conversion.leave(key, "model.compile takes torch.compile with inductor alone")


def _mounts(conversion: Conversion, key: str) -> None:
    # Optimizer and parameters may lie on different drives, and `none` means no path.
    keys = (key, f"{_DEEPSPEED}.offload_param_nvme_path")
    paths = {name: conversion.text(name) for name in keys if conversion.raw(name) not in (None, "none", "None")}
    for name in paths:
        mounts = list(dict.fromkeys(paths.values()))
        conversion.set(name, {"tiers.nvme": mounts}, "a mount takes all that is free there unless it has a size")
    for name in keys:
        conversion.leave(name, "no drive, as here")


_RULES = {
    "mixed_precision": _precision,
    "use_cpu": turns_on({"tiers.device": "cpu"}),
    "dynamo_config.dynamo_backend": _compilation,
    f"{_DEEPSPEED}.gradient_clipping": becomes("train.clip", Conversion.number),
    f"{_DEEPSPEED}.offload_optimizer_nvme_path": _mounts,
    f"{_DEEPSPEED}.zero3_save_16bit_model": turns_on({"output.export": True, "output.export_dtype": "bf16"}),
    f"{_FSDP}.fsdp_activation_checkpointing": turns_on({"train.activations": "recompute"}),
}
_REASONS = {
    **dict.fromkeys(
        (
            *("compute_environment", "distributed_type", "num_processes", "num_machines", "machine_rank", "gpu_ids"),
            *("main_process_ip", "main_process_port", "same_network", "rdzv_backend", "main_training_function"),
            *("deepspeed_hostfile", "deepspeed_multinode_launcher", "enable_cpu_affinity", "parallelism_config"),
        ),
        SHARED_STATE,
    ),
    **dict.fromkeys(("debug", "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "mpirun_config"), _NOT_THERE),
    "use_cpu": "the GPU computes, as here",
    "downcast_bf16": "for TPUs alone",
    "dynamo_config": "torch.compile has its own defaults",
    _DEEPSPEED: BUDGETS,
    f"{_DEEPSPEED}.zero3_save_16bit_model": "the model is exported at the end, unless output.export is false",
    f"{_DEEPSPEED}.deepspeed_config_file": "`megatier convert` reads that file too",
    _FSDP: BUDGETS,
}
_DIFFERING = {
    "gradient_accumulation_steps": "the batch is not given: set train.batch, and train.groups to this",
    "fp8_config": "FP8 products have one recipe here (numerics.products)",
    **below(_DEEPSPEED, {"gradient_accumulation_steps": "set train.batch, and train.groups to this"}),
}
ACCELERATE_TABLE = _RULES, _REASONS, _DIFFERING
"""The conversion of accelerate's keys; see `Conversion.convert`."""
