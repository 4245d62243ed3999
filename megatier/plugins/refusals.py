"""Refuses settings of other programs that a streamed model does not support, by name and before any work."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from megatier.errors import ConfigError
from megatier.foreign import printable
from megatier.integrations.loop_settings import read_tiers, refuse_unknown_arguments
from megatier.optimizers import OPTIMIZER_NAMES, in_words
from megatier.trainer_guards.arguments import ADAMW_NAMES, check_stream_kwargs, refuse_any
from megatier.trainer_guards.fields import by_name

SECTION = "megatier"
"""The key in a program's config with the arguments of `megatier.stream`."""
FROM_THE_PROGRAM = ("compute_dtype", "attention", "activations", "frozen", "peft_config")
"""Arguments of `megatier.stream` that follow from the program's own settings."""
STAGES = ("sft", "pt")
"""LLaMA-Factory's supported stages."""

_PLACES = "places the weights, which megatier does here: leave it out."
QUANTISES = "quantises the base as it is loaded, and this one streams from its files: leave it out."
PACKS = "packs several texts into a row for kernels of attention that were not tried here: leave it out."
RATES = "gives parameters learning rates of their own, and a streamed model has one: leave it out."
_CHANGES = "changes the model that is loaded, and here the files of its folder are trained: leave it out."
LOGITS = "needs logits, and head and loss are one here: leave it out."
OBJECTIVE = "only supervised fine-tuning and pretraining are streamed. With TRL use StreamedTrl."
_SCALES = "scales the loss, and the norm with it; use bf16."
_COMPILES = f"does not know streamed weights: leave it out, and set {SECTION}.compile."
OPTIMISES = (
    "is an optimizer that a streamed model has not: leave it out. "
    f"{SECTION}.optimizer may be {in_words(OPTIMIZER_NAMES)}."
)
BEGINS = "adapters begin anew here, as PEFT's do by default. `megatier train` goes on with some (model.lora.adapter)."

AXOLOTL_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
"""Kernels for adapters, which Axolotl enables unless they are off."""


AXOLOTL = by_name(
    {
        _PLACES: """
            deepspeed fsdp fsdp_config gpu_memory_limit max_memory device_map layer_offloading activation_offloading
            ple_cpu_offload use_ray
        """,
        QUANTISES: "load_in_4bit load_in_8bit gptq model_quantization_config qat fp8",
        PACKS: "sample_packing eval_sample_packing batch_flattening",
        RATES: "loraplus_lr_ratio embedding_lr embedding_lr_scale lr_groups",
        OBJECTIVE: "rl reward_model process_reward_model use_eaft",
        _CHANGES: f"""
            overrides_of_model_kwargs reinit_weights revision_of_model trust_remote_code fix_untrained_tokens relora
            lisa_step_interval use_onebitllms flash_optimum tiled_mlp use_kernels trainer_cls
            {" ".join(AXOLOTL_KERNELS)}
        """,
        LOGITS: "do_causal_lm_eval do_bench_eval generate_samples",
        BEGINS: "lora_model_dir",
        _SCALES: "fp16",
        _COMPILES: "torch_compile",
    }
)
"""Axolotl's refused keys, with the reasons."""
LLAMA_FACTORY = by_name(
    {
        _PLACES: "deepspeed fsdp fsdp_config use_kt use_mca use_hyper_parallel use_ray",
        QUANTISES: "quantization_bit quantization_device_map fp8",
        OPTIMISES: "use_galore use_apollo use_badam use_adam_mini use_muon",
        _CHANGES: """
            use_unsloth enable_liger_kernel use_liger_kernel use_v1_kernels shift_attn mixture_of_depths use_llama_pro
            train_from_scratch resize_vocab trust_remote_code upcast_lmhead_output
        """,
        LOGITS: "compute_accuracy predict_with_generate do_predict use_dft_loss use_asft_loss use_eaft_loss",
        BEGINS: "adapter_name_or_path pissa_init",
        RATES: "loraplus_lr_ratio",
        PACKS: "neat_packing",
        _SCALES: "fp16",
        _COMPILES: "torch_compile",
    }
)
"""LLaMA-Factory's refused arguments, with the reasons."""


def check_axolotl(given: Mapping[str, Any]) -> None:
    """Refuse settings of Axolotl's.

    Args:
        given: its config, as the user wrote it.

    Raises:
        ConfigError: names the first one, and what to do instead.
    """
    _check_one_process()
    _refuse_given(given, AXOLOTL)

    # Axolotl's keys may have no value.
    optimizer = given.get("optimizer") or "adamw_torch"
    adapter = given.get("adapter")
    parallel = []
    for name in ("tensor_parallel_size", "context_parallel_size"):
        if (given.get(name) or 1) > 1:
            parallel.append(name)
    others = [name for name in given.get("plugins") or () if not name.startswith("megatier.")]
    refuse_any(
        (adapter not in (None, "lora"), f"adapter is {adapter}: use lora, or none."),
        (optimizer not in ADAMW_NAMES, f"optimizer: {optimizer} {OPTIMISES}"),
        (parallel, f"{''.join(parallel[:1])}: {_PLACES}"),
        (others, f"plugins: {''.join(others[:1])} may change the model or its trainer: leave it out."),
    )


def check_llama_factory(given: Mapping[str, Any]) -> None:
    """Refuse arguments of LLaMA-Factory's.

    Args:
        given: its arguments, as the user wrote them.

    Raises:
        ConfigError: names the first one, and what to do instead.
    """
    _check_one_process()
    _refuse_given(given, LLAMA_FACTORY)

    # Missing arguments take LLaMA-Factory's defaults.
    stage = given.get("stage", "sft")
    method = given.get("finetuning_type", "lora")
    optimizer = given.get("optim", "adamw_torch")
    refuse_any(
        (stage not in STAGES, f"stage is {stage}: {OBJECTIVE}"),
        (method not in ("full", "freeze", "lora"), f"finetuning_type is {method}: use full, freeze or lora."),
        (optimizer not in ADAMW_NAMES, f"optim: {optimizer} {OPTIMISES}"),
        (not given.get("do_train"), "do_train is not true, and only training is streamed."),
    )


def read_plugin_section(given: object) -> dict[str, Any]:
    """Return a program's section of arguments of `megatier.stream`.

    Raises:
        ConfigError: it is not a mapping, or has an unsupported key or budget.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{SECTION} is {printable(repr(given))}; it must be keys with values, such as tiers: {{ram: 96GiB}}."
        )
    section = {str(name): value for name, value in given.items()}
    for name in FROM_THE_PROGRAM:
        if name in section:
            raise ConfigError(f"{SECTION}.{name} follows from the program's own settings: leave it out.")

    # Checked before the program prepares its data, which takes long.
    refuse_unknown_arguments(section)
    others = dict(section)
    tiers = others.pop("tiers", None)
    check_stream_kwargs(others)
    read_tiers(tiers)
    return section


def _refuse_given(given: Mapping[str, Any], refused: Mapping[str, str]) -> None:
    """Refuse a program's settings that are given and not off, each with its reason.

    Raises:
        ConfigError: names the first one.
    """
    for name, why in refused.items():
        # Settings that are off may be written as false, 0 or null.
        if given.get(name):
            raise ConfigError(f"{name}: {why}")


def _check_one_process() -> None:
    """Refuse a launch of several processes.

    Raises:
        ConfigError: there are several.
    """
    # Launchers set it for each process. Without a launcher it is missing.
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count > 1:
        raise ConfigError(f"{count} processes were started, and one trains here: let the program see one GPU alone.")
