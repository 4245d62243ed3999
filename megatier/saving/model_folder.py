"""A folder with a trained model, as Hugging Face reads it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedModel

from megatier.adapters.adapter_folder import export_trained
from megatier.adapters.lora import adapter_config
from megatier.byte_counts import format_bytes
from megatier.models.decoder import Unit
from megatier.models.export import Tokens
from megatier.report.console import say
from megatier.session.rank_shards import Read
from megatier.setup.workload import COMPUTE_DTYPES

SHARD_BYTES = 4 << 30
"""Bytes of a file of weights at most."""


def write_model(
    console: Console,
    folder: Path,
    model: PreTrainedModel,
    units: Sequence[Unit],
    read: Read,
    tokenizer: Tokens,
    dtype: str,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write master weights with `adapters.adapter_folder.export`, and say where they are.

    Args:
        console: what a person sees.
        folder: a new or empty folder.
        model: the skeleton.
        units: the model's units.
        read: reads elements of a unit's masters.
        tokenizer: the tokenizer or processor, which is written into the folder too.
        dtype: `bf16` or `fp32`, of a whole model.
        shard_bytes: see `models.export.export`.
    """
    export_trained(folder, model, units, read, COMPUTE_DTYPES[dtype], shard_bytes, tokenizer)
    num_bytes = sum(file.stat().st_size for file in folder.iterdir())
    artifact = "model"
    # `dtype` is of whole models: an adapter is written as its masters are.
    if adapter_config(model) is not None:
        artifact = "adapter"
        dtype = "fp32"
    say(console, f"{artifact} written to {folder} ({format_bytes(num_bytes)}, {dtype})")
