"""Converts MegaTrain's YAML. Keys that it does not give take MegaTrain's defaults if those change numbers."""

from __future__ import annotations

from megatier.convert.conversion import Conversion
from megatier.optimizers import OPTIMIZER_NAMES, in_words

SECTIONS = {"model", "dataset", "vlm", "training", "optimizer", "memory", "logging"}
ATTENTION = ("flash_attention_2", "sdpa", "eager")

REASONS = {
    "model.device": "CUDA_VISIBLE_DEVICES chooses the GPU",
    "model.trust_remote_code": "only architectures of transformers itself are run",
    "vlm": "megatier train reads text alone; megatier.stream trains on images",
    "memory.num_grad_slabs": "slots of gradients are sized when the run begins",
    "logging": "metrics.jsonl has loss, times and memory of every step",
    "dataset.num_workers": "the text is tokenised once, before the first step",
}
DIFFERING = {"vlm"}
"""Those without which a run's numbers may differ."""


def convert(made: Conversion) -> None:
    """Carry what has a counterpart, and say of the rest why it has none.

    Raises:
        ConfigError: a value makes no sense.
    """
    _model(made)
    _data(made)
    _steps(made)
    _optimizer(made)
    made.leave_rest(REASONS, DIFFERING)


def _model(made: Conversion) -> None:
    made.send("model.name", "model.path", made.text("model.name"))
    dtype = made.text("model.dtype", "bfloat16", "float16", "float32")
    if dtype == "float16":
        made.leave("model.dtype", "model.compute_dtype stays bf16, which needs no loss scaling", differs=True)
    else:
        compute = "fp32" if dtype == "float32" else "bf16"
        words = "masters and moments are fp32, which MegaTrain's are not"
        made.send("model.dtype", "model.compute_dtype", compute, words, differs=True)

    devices = made.raw("model.devices")
    # A list of several means that each takes its part of the batch.
    if isinstance(devices, list) and len(devices) > 1:
        made.leave("model.devices", "torchrun starts a rank for each GPU; the batch is that of all of them together")
    elif devices is not None:
        made.leave("model.devices", REASONS["model.device"])

    attention = made.text("model.attn_implementation", *ATTENTION)
    if attention == "flash_attention_2":
        why = "it does not stop at the borders of documents; model.attention stays sdpa (docs/data.md)"
        made.leave("model.attn_implementation", why, differs=True)
    else:
        made.send("model.attn_implementation", "model.attention", attention)


def _data(made: Conversion) -> None:
    path = made.text("dataset.path")
    name = made.text("dataset.name")
    if name is not None:
        _registered(made, name)
    elif path is not None:
        _conversations(made, path)

    length = made.count("dataset.max_seq_len", 2)
    words = "sequences are packed, not filled up"
    made.send("dataset.max_seq_len", "data.sequence_length", length, words, differs=True)
    if made.raw("dataset.system_prompt"):
        why = "write it into the records (their system key), or into data.chat_template"
        made.leave("dataset.system_prompt", why, differs=True)
    elif made.has("dataset.system_prompt"):
        made.carry("dataset.system_prompt", {}, "none, as here")

    if made.flag("dataset.train_on_prompt"):
        made.leave("dataset.train_on_prompt", "of conversations only the assistant's turns are learnt", differs=True)
    elif made.has("dataset.train_on_prompt"):
        words = "as here, where all turns of the assistant are learnt, not the last"
        made.carry("dataset.train_on_prompt", {}, words, differs=True)


def _registered(made: Conversion, name: str) -> None:
    """Convert a dataset of a dataset_info.json. MegaTrain prefers it to one that is given by its path."""
    directory = made.text("dataset.dataset_dir") or "data"
    files = [f"{directory}/dataset_info.json#{name}"]
    made.carry("dataset.name", {"data.files": files})
    if made.has("dataset.dataset_dir"):
        made.carry("dataset.dataset_dir", {"data.files": files})

    for key in ("dataset.path", "dataset.query_field", "dataset.response_field"):
        if made.has(key):
            made.leave(key, "dataset.name goes before it, as in MegaTrain")


def _conversations(made: Conversion, path: str) -> None:
    """Convert a folder of Arrow files, whose columns are named in the config or are `query` and `response`."""
    query = made.text("dataset.query_field") or "query"
    response = made.text("dataset.response_field") or "response"
    made.carry("dataset.path", {"data.files": [path], "data.chat": "alpaca"})

    # The names that data.chat: alpaca reads. Others have to be told by a dataset_info.json.
    if (query, response) == ("instruction", "output"):
        made.carry("dataset.query_field", {"data.chat": "alpaca"})
        made.carry("dataset.response_field", {"data.chat": "alpaca"})
        return

    columns = f'{{"prompt": "{query}", "response": "{response}"}}'
    why = f"data.chat: alpaca reads instruction and output; a dataset_info.json with columns {columns} names others"
    made.leave("dataset.query_field", why, differs=True)
    made.leave("dataset.response_field", "see dataset.query_field")


def _steps(made: Conversion) -> None:
    """Convert batch, steps and seed. MegaTrain counts micro-batches as steps, and adds up their mean losses."""
    # The numbers in these functions are MegaTrain's defaults: a run there had them even if its file does not say so.
    batch = made.count("training.batch_size") or 96
    steps = made.count("training.num_steps") or 100
    groups = made.count("training.gradient_accumulation_steps") or 1
    seed = made.count("training.seed", 0)

    # Where a step is one micro-batch the two agree, and there is nothing to say.
    of_batch = of_groups = of_steps = ""
    if groups > 1:
        of_batch = f"{groups} micro-batches of {batch}"
        of_groups = "their gradients are averaged; MegaTrain's are added up, so its norms are larger"
        of_steps = f"MegaTrain counts micro-batches, {groups} a step"
    made.carry("training.batch_size", {"train.batch": batch * groups}, of_batch)
    if made.has("training.gradient_accumulation_steps"):
        made.carry("training.gradient_accumulation_steps", {"train.groups": groups}, of_groups, differs=groups > 1)

    # A run shorter than one step of ours still makes one.
    made.carry("training.num_steps", {"train.steps": max(1, steps // groups)}, of_steps)
    made.carry("training.seed", {"train.seed": 42 if seed is None else seed})
    words = "every layer's input is kept, not each n-th"
    made.carry("memory.checkpoint_interval", {"train.activations": "recompute"}, words)


def _optimizer(made: Conversion) -> None:
    rate = made.number("training.learning_rate")
    settings = {"train.learning_rate": 1e-5 if rate is None else rate, "train.schedule": "constant"}
    made.carry("training.learning_rate", settings)

    for key, setting, default in (
        ("training.weight_decay", "train.weight_decay", 0.01),
        ("training.max_grad_norm", "train.clip", 1.0),
        ("optimizer.beta1", "train.beta1", 0.9),
        ("optimizer.beta2", "train.beta2", 0.999),
        ("optimizer.eps", "train.eps", 1e-8),
    ):
        value = made.number(key)
        decays = key == "training.weight_decay"
        remark = "not of biases and norms, which MegaTrain decays too" if decays else ""
        made.carry(key, {setting: default if value is None else value}, remark, differs=decays)

    kind = made.text("optimizer.type")
    if kind in ("deepspeed_adam", "adamw"):
        made.carry("optimizer.type", {}, "AdamW, as train.optimizer says")
    elif kind is not None:
        made.leave("optimizer.type", f"train.optimizer is {in_words(OPTIMIZER_NAMES)}", differs=True)
