"""Converts MegaTrain's YAML. Missing keys take MegaTrain's defaults if those change results."""

from __future__ import annotations

from megatier.convert.conversion import COUNT_FROM_0, COUNT_FROM_2, Conversion, becomes
from megatier.optimizers import OPTIMIZER_NAMES, in_words

MEGATRAIN_SECTIONS = {"model", "dataset", "vlm", "training", "optimizer", "memory", "logging"}
_ATTENTION = ("flash_attention_2", "sdpa", "eager")
ONE_DEVICE = "CUDA_VISIBLE_DEVICES chooses the GPU"


def _dtype(conversion: Conversion, key: str) -> None:
    dtype = conversion.text(key, "bfloat16", "float16", "float32")
    if dtype == "float16":
        conversion.leave(key, "model.compute_dtype stays bf16, which needs no loss scaling", differs=True)
    else:
        compute = "fp32" if dtype == "float32" else "bf16"
        remark = "masters and moments are fp32, which MegaTrain's are not"
        conversion.send(key, "model.compute_dtype", compute, remark, differs=True)


def _devices(conversion: Conversion, key: str) -> None:
    devices = conversion.raw(key)
    # With several devices, each takes a part of the batch.
    are_several = isinstance(devices, list) and len(devices) > 1
    if are_several:
        conversion.leave(key, "torchrun starts a rank for each GPU; the batch is that of all of them together")
    elif devices is not None:
        conversion.leave(key, ONE_DEVICE)


def _attention(conversion: Conversion, key: str) -> None:
    attention = conversion.text(key, *_ATTENTION)
    if attention == "flash_attention_2":
        why = "it does not stop at the borders of documents; model.attention stays sdpa (docs/data.md)"
        conversion.leave(key, why, differs=True)
    else:
        conversion.send(key, "model.attention", attention)


def _dataset(conversion: Conversion, key: str) -> None:
    """Convert a dataset of a dataset_info.json, which MegaTrain prefers to one given by path."""
    path = conversion.text("dataset.path")
    name = conversion.text(key)
    if name is None:
        if path is not None:
            _conversations(conversion, path)
        return

    directory = conversion.text("dataset.dataset_dir") or "data"
    files = {"data.files": [f"{directory}/dataset_info.json#{name}"]}
    conversion.set(key, files)
    if conversion.has("dataset.dataset_dir"):
        conversion.set("dataset.dataset_dir", files)
    for other in ("dataset.path", "dataset.query_field", "dataset.response_field"):
        conversion.leave(other, "dataset.name goes before it, as in MegaTrain")


def _conversations(conversion: Conversion, path: str) -> None:
    """Convert a folder of Arrow files, with columns named in the config, or `query` and `response`."""
    query = conversion.text("dataset.query_field") or "query"
    response = conversion.text("dataset.response_field") or "response"
    conversion.set("dataset.path", {"data.files": [path], "data.chat": "alpaca"})

    # The names that data.chat: alpaca reads. Others need a dataset_info.json.
    if (query, response) == ("instruction", "output"):
        conversion.set("dataset.query_field", {"data.chat": "alpaca"})
        conversion.set("dataset.response_field", {"data.chat": "alpaca"})
        return

    columns = f'{{"prompt": "{query}", "response": "{response}"}}'
    why = f"data.chat: alpaca reads instruction and output; a dataset_info.json with columns {columns} names others"
    conversion.leave("dataset.query_field", why, differs=True, is_implied=True)
    conversion.leave("dataset.response_field", "see dataset.query_field", is_implied=True)


def _system_prompt(conversion: Conversion, key: str) -> None:
    if conversion.raw(key):
        conversion.leave(key, "write it into the records (their system key), or into data.chat_template", differs=True)
    conversion.agree(key, "none, as here")


def _train_on_prompt(conversion: Conversion, key: str) -> None:
    if conversion.flag(key):
        conversion.leave(key, "of conversations only the assistant's turns are learnt", differs=True)
    conversion.agree(key, "as here, where all turns of the assistant are learnt, not the last", differs=True)


def _batch(conversion: Conversion, key: str) -> None:
    """Convert batch and steps. MegaTrain counts micro-batches as steps, and adds up their mean losses."""
    batch = conversion.count(key) or 96
    steps = conversion.count("training.num_steps") or 100
    groups = conversion.count("training.gradient_accumulation_steps") or 1

    # If a step is one micro-batch, both agree.
    of_batch = of_groups = of_steps = ""
    if groups > 1:
        of_batch = f"{groups} micro-batches of {batch}"
        of_groups = "their gradients are averaged; MegaTrain's are added up, so its norms are larger"
        of_steps = f"MegaTrain counts micro-batches, {groups} a step"
    conversion.set(key, {"train.batch": batch * groups}, of_batch)
    if conversion.has("training.gradient_accumulation_steps"):
        conversion.set("training.gradient_accumulation_steps", {"train.groups": groups}, of_groups, differs=groups > 1)

    # A run shorter than one of our steps still makes one.
    conversion.set("training.num_steps", {"train.steps": max(1, steps // groups)}, of_steps)


def _activations(conversion: Conversion, key: str) -> None:
    conversion.set(key, {"train.activations": "recompute"}, "every layer's input is kept, not each n-th")


def _rate(conversion: Conversion, key: str) -> None:
    rate = conversion.number(key)
    # MegaTrain has no schedule, while our default has one.
    settings = {
        "train.learning_rate": 1e-5 if rate is None else rate,
        "train.schedule": "constant",
    }
    conversion.set(key, settings)


def _optimizer(conversion: Conversion, key: str) -> None:
    kind = conversion.text(key)
    if kind in ("deepspeed_adam", "adamw"):
        conversion.agree(key, "AdamW, as train.optimizer says")
    elif kind is not None:
        names = in_words(OPTIMIZER_NAMES)
        conversion.leave(key, f"train.optimizer is {names}", differs=True)


# The numbers are MegaTrain's defaults, which apply even if its file does not name them.
_RULES = {
    "model.name": becomes("model.path", Conversion.text),
    "model.dtype": _dtype,
    "model.devices": _devices,
    "model.attn_implementation": _attention,
    "dataset.name": _dataset,
    "dataset.max_seq_len": becomes(
        "data.sequence_length", COUNT_FROM_2, remark="sequences are packed, not filled up", differs=True
    ),
    "dataset.system_prompt": _system_prompt,
    "dataset.train_on_prompt": _train_on_prompt,
    "training.batch_size": _batch,
    "training.seed": becomes("train.seed", COUNT_FROM_0, 42),
    "memory.checkpoint_interval": _activations,
    "training.learning_rate": _rate,
    "training.weight_decay": becomes(
        "train.weight_decay",
        Conversion.number,
        0.01,
        "not of biases and norms, which MegaTrain decays too",
        differs=True,
    ),
    "training.max_grad_norm": becomes("train.clip", Conversion.number, 1.0),
    "optimizer.beta1": becomes("train.beta1", Conversion.number, 0.9),
    "optimizer.beta2": becomes("train.beta2", Conversion.number, 0.999),
    "optimizer.eps": becomes("train.eps", Conversion.number, 1e-8),
    "optimizer.type": _optimizer,
}
_REASONS = {
    "model.device": ONE_DEVICE,
    "model.trust_remote_code": "only architectures of transformers itself are run",
    "memory.num_grad_slabs": "slots of gradients are sized when the run begins",
    "logging": "metrics.jsonl has loss, times and memory of every step",
    "dataset.num_workers": "the text is tokenised once, before the first step",
}
_DIFFERING = {"vlm": "data.images reads images, and model.frozen names the parts of the model that stay as they are"}
MEGATRAIN_TABLE = _RULES, _REASONS, _DIFFERING
"""The conversion of MegaTrain's keys; see `Conversion.convert`."""
