"""Says which overridden methods of Hugging Face's Trainer are called over a streamed model, and how."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Iterator

from transformers import Trainer

from megatier.errors import ConfigError

CALLED_ALIKE = """
__init__ _build_accelerator_args _defer_fsdp_gradient_reduction _determine_best_metric _evaluate _finalize_training
_finish_current_push _get_collator_with_removed_columns _get_dataloader _get_eval_sampler _get_learning_rate
_get_num_items_in_batch _get_output_dir _get_train_sampler _hp_search_setup _init_training_state _inner_training_loop
_load_callback_state _load_optimizer_and_scheduler _load_rng_state _load_scaler _maybe_log_save_evaluate
_prepare_context_parallel_inputs _prepare_for_training _prepare_input _prepare_inputs _push_from_checkpoint
_remove_unused_columns _report_to_hp_search _run_epoch _save_checkpoint _save_rng_state _save_scaler
_set_signature_columns_if_needed _sync_replicated_trainable_parameters _track_num_input_tokens _tune_save_checkpoint
_update_auto_batch_size _validate_args add_callback autocast_smart_context_manager call_model_init compute_loss
compute_loss_context_manager create_accelerator_and_postprocess create_model_card create_optimizer_and_scheduler
create_scheduler end evaluate evaluation_loop floating_point_ops get_batch_samples get_cp_size get_eval_dataloader
get_learning_rates get_num_trainable_parameters get_optimizer_group get_sp_size get_test_dataloader
get_total_train_batch_size get_tp_size get_train_dataloader init_hf_repo is_local_process_zero
is_world_process_zero log log_metrics metrics_format num_examples pop_callback predict prediction_step push_to_hub
remove_callback save_metrics save_state set_initial_training_values store_flos train
"""
FOLLOWED_METHODS = frozenset(CALLED_ALIKE.split())
"""Those that are called as by the plain Trainer, wherever the class stands."""
REPLACED_METHODS = frozenset(
    (
        "_clip_grad_norm",
        "_get_grad_norm",
        "_load_best_model",
        "_load_from_checkpoint",
        "_move_model_to_device",
        "_save",
        "create_optimizer",
        "hyperparameter_search",
    )
)
"""Those in whose place the mixin has its own: an override comes before the mixin, and calls the mixin's."""
EXTENDED = frozenset(("_save_optimizer_and_scheduler", "_wrap_model"))
"""Those that the mixin adds to: an override that comes before the mixin calls the mixin's."""
EXTENDED_BY_RANKS = frozenset(("save_model", "training_step"))
"""The same, if there are several ranks."""
COMPARED = frozenset(("get_decay_parameter_names",))
"""Those whose results are compared with what the streamed model was opened with."""
UNCALLED = frozenset(
    ("_has_mixed_mesh_grads", "_issue_warnings_after_load", "_mixed_mesh_grad_norm", "get_optimizer_cls_and_kwargs")
)
"""Those that nobody calls over a streamed model, which has its own optimizer, norm and files: none is overridden."""
KNOWN_METHODS = FOLLOWED_METHODS | REPLACED_METHODS | EXTENDED | EXTENDED_BY_RANKS | COMPARED | UNCALLED


def check_overrides(kind: type, mixin: type, num_ranks: int) -> None:
    """Refuse overrides of the Trainer's methods that would not be called, or not call what a streamed model needs.

    Args:
        kind: the class of the trainer.
        mixin: the last of megatier's classes in it, in whose place the Trainer's own methods are not called.
        num_ranks: number of ranks.

    Raises:
        ConfigError: names the first one, and what to do instead.
    """
    # The methods in whose place the mixin has its own work only if an override of them calls super's.
    needed = REPLACED_METHODS | EXTENDED | (EXTENDED_BY_RANKS if num_ranks > 1 else frozenset())
    for owner, name, is_before in _overrides(kind, mixin):
        place = f"{owner.__name__}.{name}"
        if name not in KNOWN_METHODS:
            warnings.warn(
                f"{place} overrides a method of the Trainer that megatier does not know, so it may not be called over "
                "a streamed model, or not do there what it does over another one.",
                stacklevel=4,
            )
        elif name in UNCALLED or (name in REPLACED_METHODS and not is_before):
            way = "" if name in UNCALLED else f", or override it in a class before {mixin.__name__}, and call super's"
            raise ConfigError(
                f"{place} would not be called: a streamed model has its own optimizer, norm and files. Leave it out"
                f"{way}."
            )
        elif name in needed and is_before and not _calls(owner, name):
            raise ConfigError(
                f"{place} does not call super().{name}(...), which a streamed model needs: its optimizer, weights and "
                "files are on megatier's tiers. Call it, or leave the override out."
            )


def overriding(kind: type, mixin: type, names: Collection[str]) -> list[str]:
    """Return which of some methods a class overrides."""
    return [name for _, name, _ in _overrides(kind, mixin) if name in names]


def _overrides(kind: type, mixin: type) -> Iterator[tuple[type, str, bool]]:
    """Yield each class with a method of the Trainer that it overrides, and whether it comes before the mixin."""
    # Methods alone: attributes of the Trainer are for subclasses to set.
    methods = {name for name, value in vars(Trainer).items() if callable(getattr(Trainer, name, value))}

    order = kind.__mro__
    below_trainer = order[: order.index(Trainer)]
    for place, owner in enumerate(below_trainer):
        # megatier's own classes override what they must.
        if owner.__module__.partition(".")[0] == "megatier":
            continue

        # Looked for in `vars`, since a class that only inherits a method overrides nothing.
        for name in vars(owner).keys() & methods:
            is_before = place < order.index(mixin)
            yield owner, name, is_before


def _calls(owner: type, name: str) -> bool:
    """Return whether a method names itself, as a call of super's does. What is no Python function is not known."""
    # super().name has the name among those that its code asks for; whether it is reached nobody can tell beforehand.
    code = getattr(inspect.unwrap(getattr(owner, name)), "__code__", None)
    return code is None or name in code.co_names
