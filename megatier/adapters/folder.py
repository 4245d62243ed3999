"""The export of what a run has trained: the whole model, or adapters in a folder as PEFT reads and writes them.

Adapters are written in fp32, whatever the type of an exported model is: they are small, and a run may go on from them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatier.adapters.lora import ADAPTER, adapter_config, load_peft
from megatier.layout import TensorSlice
from megatier.models import export as models
from megatier.models.decoder import Unit
from megatier.models.shards import write_header
from megatier.models.weights import chunks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Begins the names of all parameters in a folder of adapters."""

Read = Callable[[Unit, int, int], Tensor]
"""Reads elements [start, stop) of a unit's layout as a flat fp32 CPU tensor."""


def export(
    folder: Path,
    model: PreTrainedModel,
    units: Sequence[Unit],
    read: Read,
    dtype: torch.dtype,
    shard_bytes: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Write a model as `models.export` does, or its adapters if it has some. See there for arguments and errors."""
    if adapter_config(model) is None:
        models.export(folder, model, units, read, dtype, shard_bytes, tokenizer)
        return

    models.check_new(folder)
    with models.new_folder(folder, export_bytes(model, units, dtype)) as partial:
        _write_weights(partial / WEIGHTS_FILE, stored_names(model, units), read)
        (partial / CONFIG_FILE).write_text(json.dumps(_settings(model), indent=2, sort_keys=True) + "\n")
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)


def export_bytes(model: PreTrainedModel, units: Sequence[Unit], dtype: torch.dtype) -> int:
    """Return the bytes of the weights that `export` writes.

    Raises:
        UnsupportedModelError: no layout of the weights is known that loads back.
    """
    if adapter_config(model) is None:
        return models.export_bytes(model, units, dtype)
    return 4 * sum(math.prod(tensor.shape) for _, tensor in stored_names(model, units).values())


def stored_names(model: PreTrainedModel, units: Sequence[Unit]) -> dict[str, tuple[Unit, TensorSlice]]:
    """Return where each tensor of a folder of adapters lies in the units, by the name that PEFT gives it there.

    Args:
        model: the skeleton with its adapters.
        units: all of its units, whole.
    """
    # PEFT picks and renames tensors by their names alone, so stand-ins without bytes will do.
    places = {tensor.name: (unit, tensor) for unit in units for tensor in unit.layout.tensors}
    standing = {name: torch.empty(tensor.shape, device="meta") for name, (_, tensor) in places.items()}
    name_of = {id(tensor): name for name, tensor in standing.items()}
    stored = load_peft().get_peft_model_state_dict(
        model, state_dict=standing, adapter_name=ADAPTER, save_embedding_layers=False
    )
    return {f"{PREFIX}{key}": places[name_of[id(tensor)]] for key, tensor in stored.items()}


def _write_weights(path: Path, stored: dict[str, tuple[Unit, TensorSlice]], read: Read) -> None:
    """Write the tensors of a folder of adapters, piece by piece. They are on disk when this returns."""
    with path.open("wb") as file:
        file.write(write_header((name, torch.float32, tensor.shape) for name, (_, tensor) in stored.items()))
        for unit, tensor in stored.values():
            for start, stop in chunks(tensor.num_elements):
                values = read(unit, tensor.start + start, tensor.start + stop)
                file.write(values.contiguous().view(torch.uint8).numpy().data)

        file.flush()
        os.fsync(file.fileno())


def _settings(model: PreTrainedModel) -> dict[str, Any]:
    """Return PEFT's config of the adapters, as it is written. Loaded so, they are not trained, as PEFT saves them."""
    config = adapter_config(model)
    assert config is not None
    settings = {**config.to_dict(), "inference_mode": True}

    # In an order of their own, so that the same run writes the same bytes.
    return {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
