"""Arguments of Hugging Face's Trainer, and of TRL's, that a streamed model cannot follow: each is refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from transformers import TrainingArguments

from megatier.errors import ConfigError
from megatier.guards.unbound import Unbound

Refusals = Iterable[tuple[object, str]]
"""Pairs of a condition and the message with which it is refused."""


FROM_THE_TRAINER = {
    "tiers": "give tiers to the trainer.",
    "fused_loss": "open the model by megatier.stream to choose it, and give the trainer what it returns.",
    **dict.fromkeys(
        ("accumulation_steps", "lr", "betas", "eps", "weight_decay", "clip"),
        "the trainer takes it from TrainingArguments.",
    ),
}
"""Arguments of `megatier.stream` that a trainer gives itself if it opens a model, and where they are given."""
ADAMW = ("adamw_torch", "adamw_torch_fused")
"""Names that the Trainer has for AdamW with moments in fp32, which a streamed model has in the place of torch's."""


def refuse_any(refusals: Refusals) -> None:
    """Refuse the first thing that holds.

    Raises:
        ConfigError: one of them holds.
    """
    for holds, message in refusals:
        if holds:
            raise ConfigError(message)


def check_given(given: Mapping[str, Any]) -> None:
    """Refuse arguments of a trainer's constructor before it begins, since it would fail at them in its own words.

    Args:
        given: the arguments by name.

    Raises:
        ConfigError: names the first one, and what to do instead.
    """
    model = given.get("model")
    rows = given.get("train_dataset")
    args = given.get("args")
    refuse_any(
        (
            (hasattr(rows, "__len__") and not len(rows), "train_dataset has no rows."),  # type: ignore[arg-type]
            (
                isinstance(model, nn.Module) and any(isinstance(p, Unbound) for p in model.parameters()),
                "this is the .model of a streamed model: give the Streamed itself.",
            ),
            (
                getattr(args, "fsdp", None) or getattr(args, "deepspeed", None),
                "fsdp and deepspeed place the weights, which megatier does here: leave them out. Under torchrun the "
                "processes share the state by themselves.",
            ),
        )
    )


def check_stream_kwargs(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return arguments of `megatier.stream`, and refuse those that a trainer gives itself.

    Raises:
        ConfigError: names the first one.
    """
    refuse_any((name in given, f"stream_kwargs has {name}; {source}") for name, source in FROM_THE_TRAINER.items())
    return given


def check_training_arguments(args: TrainingArguments, accumulation_steps: int, ranks: int) -> None:
    """Refuse training arguments.

    Args:
        args: the arguments.
        accumulation_steps: backwards for each step that the streamed model was told of.
        ranks: its number of ranks.

    Raises:
        ConfigError: names the first one, and what to set instead.
    """
    given = args.gradient_accumulation_steps
    optimizer = getattr(args.optim, "value", args.optim)
    refuse_any(
        (
            (
                args.world_size != ranks,
                f"the Trainer has {args.world_size} processes, and megatier.stream {ranks}: start both by torchrun.",
            ),
            (
                ranks > 1 and getattr(args.accelerator_config, "split_batches", False),
                "split_batches cuts a batch over the ranks, which are groups of a step here; leave it out, and set "
                "per_device_train_batch_size to the rows of one rank.",
            ),
            (
                ranks > 1 and args.save_on_each_node,
                "save_on_each_node: all ranks write one folder; leave it out.",
            ),
            (
                given != accumulation_steps,
                f"gradient_accumulation_steps is {given}, and megatier.stream was told "
                f"accumulation_steps={accumulation_steps}; name the same number in both.",
            ),
            (args.fp16, "fp16 scales the loss, and the norm with it; train in bf16 (compute_dtype) instead."),
            (
                args.torch_compile,
                "torch_compile does not know streamed weights: leave it out, and pass compile=True to megatier.stream.",
            ),
            (
                optimizer not in ADAMW,
                f"optim is {optimizer}; a streamed model has AdamW, or what megatier.stream was given as optimizer and "
                "moments: leave optim out.",
            ),
            (
                args.load_best_model_at_end and args.save_only_model,
                "load_best_model_at_end needs the state that save_only_model leaves out.",
            ),
        )
    )
