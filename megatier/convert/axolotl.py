"""Converts Axolotl's YAML. Missing keys take Axolotl's defaults if those change results."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import PurePath
from typing import Any

from megatier.config.lora import ALL_LINEAR
from megatier.convert import common
from megatier.convert.common import EVALUATION, FIGURES, ONE_LOSS, ONE_PASS, QUANTISED, SHARED_STATE, STORED_ADAPTER
from megatier.convert.conversion import Conversion, Rule, Table, becomes, turns_on
from megatier.data.formats import RECORD_FORMATS
from megatier.errors import ConfigError

AXOLOTL_KEY = "base_model"
"""The key that all of these files have, and no other format."""

_LORA_KEYS = {
    "rank": "lora_r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "targets": "lora_target_modules",
    "rslora": "peft_use_rslora",
    "dora": "peft_use_dora",
    "modules_to_save": "lora_modules_to_save",
}
"""Axolotl's keys, by our names of the adapter settings."""
CHATS = {"chat_template": "messages", "alpaca": "alpaca", "sharegpt": "sharegpt", "completion": None}
"""`data.chat` by the type of a dataset; None for plain text."""
OF_FILES = {"path", "type", "field", "ds_type", "data_files"}
OF_HUB = {"path", "type", "field", "name", "split"}
"""The supported keys of datasets that are files, and of those on the hub."""
USUAL = {
    "split": "train",
    "field_messages": "messages",
    "roles_to_train": ["assistant"],
    "train_on_eos": "turn",
    "message_field_role": "role",
    "message_field_content": "content",
    "chat_template": "tokenizer_default",
}
"""Other keys of a dataset, with the values that match what happens here anyway."""
OBJECTIVES = ("rl", "reward_model", "process_reward_model")
"""Keys of training objectives other than language modelling."""
_ATTENTION = {"sdp_attention": "sdpa", "eager_attention": "eager", "flex_attention": "flex_attention"}


def _model(conversion: Conversion, key: str) -> None:
    """Refuse other objectives, and convert model and adapters."""
    for name in OBJECTIVES:
        if conversion.raw(name):
            raise ConfigError(
                f"{conversion.source}: {name} is set; `megatier train` does supervised training alone. Preferences run "
                "with StreamedTrl (docs/trainers.md)."
            )
        conversion.leave(name, "off, as here")
    conversion.send(key, "model.path", conversion.text(key))

    kind = conversion.text("adapter")
    if kind not in (None, "lora", "qlora"):
        raise ConfigError(f"{conversion.source}: adapter is {kind}; megatier trains lora, or the whole model.")
    if kind is not None:
        # One setting of ours covers all of these keys, and each gets a finding. Alpha's default is PEFT's.
        lora = common.lora_of(conversion, _LORA_KEYS, rank=8, alpha=8.0)
        # Axolotl adds all linear layers to those that are named.
        if conversion.flag("lora_target_linear"):
            lora["targets"] = [ALL_LINEAR]
        remark = f"needs megatier[lora]; {QUANTISED}" if kind == "qlora" else "needs megatier[lora]"
        conversion.set("adapter", {"model.lora": lora}, remark, differs=kind == "qlora")
    for name in (*_LORA_KEYS.values(), "lora_target_linear"):
        conversion.agree(name, "see adapter" if kind else "there is no adapter")


def _computing(conversion: Conversion, key: str) -> None:
    # `auto` is Axolotl's default and means bf16 where supported. `full` also makes weights and moments bf16.
    is_full = conversion.raw(key) == "full"
    is_off = not is_full and conversion.flag(key) is False
    is_fp16 = bool(conversion.raw("fp16"))

    # fp16 is mixed precision there too, for which bf16 is used here.
    dtype = "fp32" if is_off and not is_fp16 else "bf16"
    conversion.set(key, {"model.compute_dtype": dtype}, "masters and moments are fp32", differs=is_full)

    asked = [name for name in _ATTENTION if conversion.flag(name)]
    if len(asked) == 1:
        given: str | None = _ATTENTION[asked[0]]
    else:
        given = conversion.text("attn_implementation")

    is_known = given in _ATTENTION.values()
    for name in (*_ATTENTION, "attn_implementation"):
        is_set = bool(conversion.raw(name))
        if is_known and is_set:
            conversion.set(name, {"model.attention": given})
        conversion.leave(name, common.APART, differs=is_set)


def _warmup(conversion: Conversion, key: str) -> None:
    is_given = conversion.has("warmup_steps") or conversion.has("warmup_ratio")
    common.schedule(conversion, key, default="cosine")
    if not is_given:
        why = "Axolotl warms up for 3 % of the steps, and at most 100: set train.warmup_steps or train.warmup_ratio"
        conversion.leave("warmup_steps", why, differs=True, is_implied=True)


def _activations(conversion: Conversion, key: str) -> None:
    value = conversion.raw(key)

    # Besides true and false, Axolotl has the values offload and offload_disk.
    policy = "recompute" if value else "keep"
    if isinstance(value, str) and value.startswith("offload"):
        policy = "offload"
    conversion.set(key, {"train.activations": policy})


def _data(conversion: Conversion, key: str) -> None:
    """Convert the datasets if they are files of one format, or one dataset of the hub."""
    datasets = conversion.raw(key)
    if not isinstance(datasets, list) or not datasets or not all(isinstance(each, dict) for each in datasets):
        conversion.leave(key, "set data.files or data.dataset", differs=True)
        return

    shapes = [_shape(each) for each in datasets]
    are_files = [_is_file(each) for each in datasets]
    is_one = len(datasets) == 1 and not any(are_files)

    # One `data.chat` applies to all files of a run.
    if None in shapes or any(shape != shapes[0] for shape in shapes) or not (is_one or all(are_files)):
        why = "set data.files and data.chat by hand: datasets are files of one shape here, or one dataset of the hub"
        conversion.leave(key, why, differs=True)
        return

    settings: dict[str, object] = dict(shapes[0] or {})
    if is_one:
        settings |= _on_hub(datasets[0])
    else:
        settings["data.files"] = [file for each in datasets for file in _files(each)]
    read = OF_HUB if is_one else OF_FILES
    left = {name for each in datasets for name, value in each.items() if not _is_taken(name, value, read)}
    remarks = [f"not taken: {', '.join(sorted(left))}"] if left else []
    if settings.get("data.chat") == "alpaca":
        remarks.append("turns are written by the chat template, and not by Alpaca's own prompt")
    conversion.set(key, settings, "; ".join(remarks), differs=bool(remarks))


def _shape(dataset: Mapping[str, Any]) -> dict[str, object] | None:
    """Return the settings of a dataset's format; None: it is not supported here."""
    kind = str(dataset.get("type") or "")
    if kind not in CHATS or not (dataset.get("path") or dataset.get("data_files")):
        return None
    chat = CHATS[kind]
    return {"data.chat": chat} if chat else {"data.text_field": str(dataset.get("field") or "text")}


def _is_file(dataset: Mapping[str, Any]) -> bool:
    """Return whether a dataset is files on this machine, rather than a name on the hub."""
    if "data_files" in dataset:
        return True
    path = str(dataset.get("path") or "")
    if path.startswith(("/", ".", "~")):
        return True

    # A name on the hub may contain a dot too, so only known file suffixes identify a file.
    suffixes = PurePath(path).suffixes
    return any(suffix in RECORD_FORMATS for suffix in suffixes)


def _files(dataset: Mapping[str, Any]) -> list[str]:
    """Return the files of a dataset."""
    named = dataset.get("data_files") or dataset.get("path")
    return [str(name) for name in (named if isinstance(named, list) else [named])]


def _on_hub(dataset: Mapping[str, Any]) -> dict[str, object]:
    """Return the settings of a dataset on the hub."""
    settings: dict[str, object] = {"data.dataset": str(dataset.get("path"))}
    for name, setting in (("name", "data.subset"), ("split", "data.split")):
        if dataset.get(name):
            settings[setting] = str(dataset[name])
    return settings


def _is_taken(name: str, value: object, read: set[str]) -> bool:
    """Return whether a key of a dataset was used, or changes nothing."""
    return name in read or value is None or USUAL.get(name) == value


def _trackers(conversion: Conversion, key: str) -> None:
    """Convert Axolotl's keys for trackers."""
    asked = {
        "wandb": ("wandb_project", "use_wandb"),
        "mlflow": ("mlflow_experiment_name", "mlflow_tracking_uri", "use_mlflow"),
        "trackio": ("trackio_project_name", "use_trackio"),
        "tensorboard": ("use_tensorboard",),
    }
    names = [tracker for tracker, keys in asked.items() if any(map(conversion.raw, keys))]
    variables = {
        "wandb_project": "WANDB_PROJECT",
        "wandb_entity": "WANDB_ENTITY",
        "wandb_mode": "WANDB_MODE",
        "mlflow_experiment_name": "MLFLOW_EXPERIMENT_NAME",
        "mlflow_tracking_uri": "MLFLOW_TRACKING_URI",
        "trackio_project_name": "TRACKIO_PROJECT",
    }
    for tracker, keys in asked.items():
        for name in keys:
            if conversion.raw(name):
                # Each key sets all names, since a later one overrides an earlier one.
                remark = f"and set {variables[name]} in the environment" if name in variables else ""
                conversion.set(name, {"output.report_to": names}, remark)
            conversion.leave(name, f"nothing is sent to {tracker} unless output.report_to says so")

    # These do not enable a tracker, but configure it.
    for name in ("wandb_entity", "wandb_mode"):
        conversion.leave(name, f"set {variables[name]} in the environment")


_RULES: Mapping[str, Rule] = {
    AXOLOTL_KEY: _model,
    "datasets": _data,
    "val_set_size": common.holdout,
    "sequence_len": common.sequence_length(512),
    "bf16": _computing,
    "micro_batch_size": partial(common.batches, batch=1, epochs_key="num_epochs", epochs=1.0),
    "gradient_checkpointing": _activations,
    "torch_compile": turns_on({"model.compile": True}),
    "optimizer": common.optimizer,
    "lr_scheduler": _warmup,
    "cosine_min_lr_ratio": becomes("train.min_learning_rate_ratio", Conversion.number),
    **common.common(
        seed=42,
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        max_grad_norm=1.0,
    ),
    "load_best_model_at_end": partial(common.best_model, patience="early_stopping_patience"),
    "hub_model_id": common.hub,
    "use_wandb": _trackers,
}
NO_TEMPLATE = "the tokenizer's own chat template is taken; data.chat_template names another one"
AS_IT_IS = "layers run as transformers has them"
BY_EPOCHS = "set output.checkpoint_every, which counts steps"
_REASONS = {
    **common.COMMON_REASONS,
    **dict.fromkeys(
        ("model_type", "tokenizer_type", "base_model_config", "is_llama_derived_model", "strict"),
        "the model's folder says what it is",
    ),
    **dict.fromkeys(("dataset_prepared_path", "dataset_processes", "shuffle_merged_datasets"), ONE_PASS),
    **dict.fromkeys(("sample_packing", "eval_sample_packing", "pad_to_sequence_len"), "sequences are always packed"),
    **dict.fromkeys(("saves_per_epoch", "save_first_step"), BY_EPOCHS),
    **dict.fromkeys(("wandb_watch", "wandb_name", "wandb_run_id", "wandb_log_model"), FIGURES),
    **dict.fromkeys(("hf_mlflow_log_artifacts", "mlflow_run_name"), FIGURES),
    **dict.fromkeys(("liger_fused_linear_cross_entropy", "liger_cross_entropy", "cut_cross_entropy"), ONE_LOSS),
    **dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), AS_IT_IS),
    **dict.fromkeys(("liger_rope", "liger_rms_norm", "liger_layer_norm", "liger_glu_activation"), AS_IT_IS),
    **dict.fromkeys(("xformers_attention", "flash_attention"), common.APART),
    **dict.fromkeys(("ddp", "ddp_find_unused_parameters", "local_rank", "device_map", "max_memory"), SHARED_STATE),
    "evals_per_epoch": "set train.evaluate_every, which counts steps",
    "eval_batch_size": "evaluations have the batch of the training",
    "eval_max_new_tokens": "evaluations measure the loss alone",
    "eval_table_size": "evaluations measure the loss alone",
    "auto_resume_from_checkpoints": "`megatier resume` goes on with a run",
    "gradient_checkpointing_kwargs": "train.activations has no settings",
    "tf32": "products in fp32 are as torch has them",
    "special_tokens": "the tokenizer's own tokens are taken",
    "group_by_length": "sequences are always full",
    "torch_compile": "model.compile decides",
    "debug": FIGURES,
}
_DIFFERING = {
    **common.COMMON_DIFFERING,
    **dict.fromkeys(("load_in_8bit", "load_in_4bit"), QUANTISED),
    **dict.fromkeys(("test_datasets", "eval_datasets"), EVALUATION),
    "pretraining_dataset": "data.dataset names it, and data.streaming reads it while the run goes on",
    "train_on_inputs": "of conversations only the assistant's turns are learnt",
    "chat_template": NO_TEMPLATE,
    "chat_template_jinja": NO_TEMPLATE,
    "tokenizer_config": "data.tokenizer names another tokenizer than the model's",
    "tokens": "add them to the tokenizer, and name it by data.tokenizer",
    "unfrozen_parameters": "model.frozen names what is not trained",
    "lora_model_dir": STORED_ADAPTER,
    "lora_fan_in_fan_out": "weights lie as the model has them",
    "plugins": "plugins of Axolotl run in Axolotl alone",
}
# Axolotl's files often name keys that are off.
AXOLOTL_TABLE: Table = ({**_RULES, **common.if_on(_DIFFERING)}, _REASONS, {})
"""The conversion of Axolotl's keys; see `Conversion.convert`."""
