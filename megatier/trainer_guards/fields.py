"""Says how a streamed model takes each field of Hugging Face's TrainingArguments, and of TRL's configs."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from megatier.errors import ConfigError
from megatier.trainer_guards.trl_fields import TRL_FOLLOWED, TRL_REFUSED, TRL_WITHOUT_EFFECT

FOLLOWED_FIELDS: Mapping[str, str] = {
    "given to the streamed model's optimizer, or to the schedule over it": """
        learning_rate adam_beta1 adam_beta2 adam_epsilon weight_decay max_grad_norm
        lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio
    """,
    "read by the Trainer's loop, which is above the model": """
        num_train_epochs max_steps average_tokens_across_devices logging_nan_inf_filter
        include_num_input_tokens_seen torch_empty_cache_steps skip_memory_metrics ignore_data_skip seed data_seed
        restore_callback_states_from_checkpoint full_determinism tf32
    """,
    "read by the loaders of rows": """
        per_device_train_batch_size per_device_eval_batch_size dataloader_drop_last dataloader_num_workers
        dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor dataloader_in_order
        dataloader_multiprocessing_context remove_unused_columns label_names train_sampling_strategy length_column_name
    """,
    "read by the evaluation, whose forwards are the streamed model's": """
        eval_strategy eval_steps eval_delay eval_on_start eval_do_concat_batches eval_use_gather_object
        eval_accumulation_steps include_for_metrics batch_eval_metrics prediction_loss_only
    """,
    "decides when and where what the mixin writes is saved, pushed and loaded": """
        output_dir save_strategy save_steps save_total_limit enable_jit_checkpoint metric_for_best_model
        greater_is_better push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
    """,
    "read by loggers": """
        logging_strategy logging_steps logging_first_step logging_dir log_on_each_node log_level log_level_replica
        disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id
    """,
    "a hook or a flag that the streamed model's own forward obeys": "bf16 neftune_noise_alpha use_cache",
    "of the processes that the Trainer starts itself": "ddp_backend ddp_timeout",
}
"""Fields that mean what they mean to the plain Trainer, by the reason why."""
WITHOUT_EFFECT: Mapping[str, str] = {
    "activations of megatier.stream decides, and no number depends on it": """
        activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs
    """,
    "nothing is wrapped around a streamed model": """
        ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph
    """,
    "read by optimizers and placements that are refused themselves": """
        optim_args optim_target_modules liger_kernel_config fsdp_config
    """,
    "for scripts, which the Trainer does not read": "do_train do_eval do_predict resume_from_checkpoint local_rank",
}
"""Fields that change nothing over a streamed model, by the reason why."""
CHECKED_FIELDS = frozenset(
    (
        "accelerator_config",
        "auto_find_batch_size",
        "bf16_full_eval",
        "gradient_accumulation_steps",
        "label_smoothing_factor",
        "load_best_model_at_end",
        "optim",
        "save_on_each_node",
        "save_only_model",
        "use_cpu",
    )
)
"""Fields of which some values are refused (`check_training_arguments`), and all others followed."""
PLACEMENT_REMEDY = (
    "fsdp and deepspeed place the weights, which megatier does here: leave them out. Under torchrun the "
    "processes share the state by themselves."
)
TORCH_COMPILE_REMEDY = (
    "torch_compile does not know streamed weights: leave it out, and pass compile=True to megatier.stream."
)
REFUSED_FIELDS: Mapping[str, str] = {
    "fsdp": PLACEMENT_REMEDY,
    "deepspeed": PLACEMENT_REMEDY,
    "parallelism_config": (
        "parallelism_config cuts the model over processes, and those of a streamed model share its state by "
        "themselves: leave it out, and start them by torchrun."
    ),
    "fp16": "fp16 scales the loss, and the norm with it; train in bf16 (compute_dtype) instead.",
    "fp16_full_eval": "fp16_full_eval casts the weights, which stay on megatier's tiers: leave it out.",
    "torch_compile": TORCH_COMPILE_REMEDY,
    "torch_compile_backend": TORCH_COMPILE_REMEDY,
    "torch_compile_mode": TORCH_COMPILE_REMEDY,
    "use_liger_kernel": (
        "use_liger_kernel puts other forwards into the model, which use weights outside of their modules: leave it "
        "out; megatier.stream has head and loss in one by itself (fused_loss)."
    ),
    "debug": (
        "debug looks into all weights by hooks, and they are on megatier's tiers: leave it out. A step that is not "
        "finite changes no weight."
    ),
}
"""Fields that are refused unless they ask for nothing (None, False or empty), and the message."""


def by_name(table: Mapping[str, str]) -> dict[str, str]:
    """Return the reason of each name, of a table that has names by reason."""
    return {name: why for why, names in table.items() for name in names.split()}


KNOWN_FIELDS = (
    frozenset().union(*map(by_name, (FOLLOWED_FIELDS, WITHOUT_EFFECT, TRL_FOLLOWED, TRL_WITHOUT_EFFECT)))
    | CHECKED_FIELDS
    | REFUSED_FIELDS.keys()
    | TRL_REFUSED.keys()
)
"""All fields whose effect on a streamed model is known."""
WATCHED = tuple(sorted(CHECKED_FIELDS | REFUSED_FIELDS.keys()))
"""Those that are looked at again when they change."""


def check_fields(args: Any) -> None:  # noqa: ANN401 - TrainingArguments, or those of another trainer
    """Refuse fields that a streamed model cannot follow, and warn of those that it does not know.

    Args:
        args: the arguments of a trainer, or None.

    Raises:
        ConfigError: names the first one, and what to set instead.
    """
    for name, message in (*REFUSED_FIELDS.items(), *TRL_REFUSED.items()):
        # No class has all of these fields, and None asks for nothing.
        if getattr(args, name, None):
            raise ConfigError(message)
    # Whatever else somebody gives has no defaults to compare with.
    if dataclasses.is_dataclass(args):
        for name in _unknown(args):
            warnings.warn(
                f"{name}={getattr(args, name)!r} of {type(args).__name__} is an argument that megatier does not know, "
                "so a streamed model may not follow it.",
                stacklevel=4,
            )


def _unknown(args: Any) -> Iterable[str]:  # noqa: ANN401
    """Return the fields that are not known, and differ from their defaults."""
    for field in dataclasses.fields(args):
        # Names are compared with a table, so that a new release of transformers is noticed field by field.
        if field.name in KNOWN_FIELDS:
            continue

        # A script's own class of arguments may have more fields, which no trainer reads.
        owner = next(kind for kind in type(args).__mro__ if field.name in inspect.get_annotations(kind))
        package = owner.__module__.partition(".")[0]
        if package not in ("transformers", "trl"):
            continue
        default = field.default_factory() if callable(field.default_factory) else field.default
        value = getattr(args, field.name)
        if value != default and (value or default):  # None becomes an empty list, say
            yield field.name
