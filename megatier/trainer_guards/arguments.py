"""Refuses by name arguments of Hugging Face's Trainer, and of TRL's, that a streamed model cannot follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from megatier.errors import ConfigError
from megatier.guards.unbound_weights import Unbound
from megatier.trainer_guards.fields import PLACEMENT_REMEDY, REFUSED_FIELDS, TORCH_COMPILE_REMEDY, check_fields

FROM_THE_TRAINER = {
    "tiers": "give tiers to the trainer.",
    "train": "TrainingArguments say how long and how fast it learns; give the rest one by one, such as optimizer.",
    **dict.fromkeys(
        ("accumulation_steps", "lr", "betas", "eps", "weight_decay", "clip"),
        "the trainer takes it from TrainingArguments.",
    ),
}
"""Arguments of `megatier.stream` that a trainer gives itself if it opens a model, and where they are given."""
ADAMW_NAMES = ("adamw_torch", "adamw_torch_fused")
"""Names that the Trainer has for AdamW with moments in fp32, which a streamed model has in the place of torch's."""


def refuse_any(*refusals: tuple[object, str]) -> None:
    """Refuse the first thing that holds.

    Args:
        *refusals: a condition each, and the message with which it is refused.

    Raises:
        ConfigError: one of them holds.
    """
    for holds, message in refusals:
        if holds:
            raise ConfigError(message)


def other_accumulation(name: str, given: int, declared: int) -> tuple[bool, str]:
    """Return the refusal of a trainer that makes more or fewer backwards for each step than its streamed model takes.

    Args:
        name: the trainer's argument.
        given: its value.
        declared: the backwards that the streamed model was told of.
    """
    return given != declared, (
        f"{name} is {given}, and megatier.stream was told accumulation_steps={declared}; name the same number in both."
    )


def check_given(given: Mapping[str, Any], *, feeds_vllm: bool) -> None:
    """Refuse arguments of a trainer's constructor before it begins, since it would fail at them in its own words.

    Args:
        given: the arguments by name.
        feeds_vllm: whether vLLM gets the weights of a streamed model under this trainer.

    Raises:
        ConfigError: names the first one, and what to do instead.
    """
    model = given.get("model")
    rows = given.get("train_dataset")
    args = given.get("args")
    check_fields(args)

    # Rows that are streamed have no length.
    refuse_any(
        (hasattr(rows, "__len__") and not len(rows), "train_dataset has no rows."),  # type: ignore[arg-type]
        (
            # Outside of a forward its parameters have no numbers, so a trainer would fail far from the cause.
            isinstance(model, nn.Module) and any(isinstance(p, Unbound) for p in model.parameters()),
            "this is the .model of a streamed model: give the Streamed itself.",
        ),
        (
            given.get("model_init") is not None,
            "model_init would make another model in each train(): leave it out, and open the streamed model before "
            "the trainer, anew for each run.",
        ),
        (
            getattr(args, "use_vllm", False) and not feeds_vllm,
            "use_vllm: vLLM gets the weights of a streamed model under StreamedTrl with GRPOTrainer and RLOOTrainer "
            "alone. Leave it out, and let generate make completions.",
        ),
    )


def accumulation_of(args: Any) -> int:  # noqa: ANN401 - TrainingArguments, or None
    """Return the number of backwards for each step that a trainer will make, which accelerate's settings may say."""
    accumulation_steps = int(getattr(args, "gradient_accumulation_steps", 1))

    # A trainer refuses to be told in both ways, so accelerate's settings count where its own say nothing.
    if accumulation_steps != 1:
        return accumulation_steps
    accelerator = getattr(args, "accelerator_config", None)
    settings = getattr(accelerator, "gradient_accumulation_kwargs", None) or {}
    return int(settings.get("num_steps", accumulation_steps))


def needs_logits(given: Mapping[str, Any]) -> bool:
    """Return whether an argument of a trainer's constructor asks for logits, which a fused loss does not make."""
    if getattr(given.get("args"), "label_smoothing_factor", 0):
        return True
    # Each of these functions of a user is given logits.
    functions = ("compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics")
    return any(given.get(name) is not None for name in functions)


def check_stream_kwargs(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return arguments of `megatier.stream`, and refuse those that a trainer gives itself.

    Raises:
        ConfigError: names the first one.
    """
    refuse_any(*((name in given, f"stream_kwargs has {name}; {source}") for name, source in FROM_THE_TRAINER.items()))
    return given


def check_training_arguments(
    args: TrainingArguments, *, accumulation_steps: int, ranks: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Refuse training arguments that do not fit a streamed model.

    Args:
        args: the arguments.
        accumulation_steps: backwards for each step that the streamed model was told of.
        ranks: its number of ranks.
        device: where it computes.
        dtype: in which dtype.

    Raises:
        ConfigError: names the first one, and what to set instead.
    """
    check_fields(args)

    # A GPU without a number is whichever is the current one, so it may be the other one.
    there = args.device
    is_there = there.type == device.type and (None in (there.index, device.index) or there.index == device.index)
    refuse_any(
        (
            args.world_size != ranks,
            f"the Trainer has {args.world_size} processes, and megatier.stream {ranks}: start both by torchrun.",
        ),
        (
            not is_there,
            f"the Trainer computes on {there}, and the streamed model on {device}: set use_cpu of the "
            "arguments, or tiers.device of megatier.stream, so that both are one.",
        ),
    )
    if ranks > 1:
        _check_for_ranks(args)

    # A member of the Trainer's enumeration, or the text that names it.
    optimizer = getattr(args.optim, "value", args.optim)
    refuse_any(
        other_accumulation("gradient_accumulation_steps", args.gradient_accumulation_steps, accumulation_steps),
        (
            optimizer not in ADAMW_NAMES,
            f"optim is {optimizer}; a streamed model has AdamW, or what megatier.stream was given as optimizer and "
            "moments: leave optim out.",
        ),
        (
            args.bf16_full_eval and dtype != torch.bfloat16,
            f"bf16_full_eval casts the weights, and the streamed model computes in {dtype}: leave it out, or pass "
            'compute_dtype="bf16" to megatier.stream.',
        ),
        (
            args.load_best_model_at_end and args.save_only_model,
            "load_best_model_at_end needs the state that save_only_model leaves out.",
        ),
    )


def _check_for_ranks(args: TrainingArguments) -> None:
    """Refuse training arguments that several ranks cannot follow.

    Raises:
        ConfigError: names the first one, and what to set instead.
    """
    refuse_any(
        (
            getattr(args.accelerator_config, "split_batches", False),
            "split_batches cuts a batch over the ranks, which are groups of a step here; leave it out, and set "
            "per_device_train_batch_size to the rows of one rank.",
        ),
        (
            args.save_on_each_node,
            "save_on_each_node: all ranks write one folder; leave it out.",
        ),
        (
            args.auto_find_batch_size,
            "auto_find_batch_size: memory may run out on one rank alone, whose batches would then be smaller than "
            "those of the others. Leave it out, and choose per_device_train_batch_size.",
        ),
    )


def check_accelerator(accelerator: Any) -> None:  # noqa: ANN401 - accelerate's
    """Refuse what `accelerate launch`, or its variables of the environment, ask for without the arguments.

    Args:
        accelerator: the `Accelerator` that the Trainer has made.

    Raises:
        ConfigError: names the first thing, and what to set instead.
    """
    # `accelerate launch` speaks by the environment, past all arguments of the Trainer.
    state = accelerator.state
    refuse_any(
        (
            getattr(state, "deepspeed_plugin", None) is not None or getattr(state, "fsdp_plugin", None) is not None,
            f"accelerate was configured for it: {PLACEMENT_REMEDY}",
        ),
        (
            getattr(accelerator, "parallelism_config", None) is not None,
            f"accelerate was configured for it: {REFUSED_FIELDS['parallelism_config']}",
        ),
        (
            accelerator.mixed_precision not in ("no", "bf16"),
            f"accelerate was configured for mixed_precision {accelerator.mixed_precision}: train in bf16 "
            "(compute_dtype) instead.",
        ),
        (
            str(getattr(state.dynamo_plugin.backend, "value", "NO")).upper() != "NO",
            f"accelerate was configured to compile: {TORCH_COMPILE_REMEDY}",
        ),
    )
