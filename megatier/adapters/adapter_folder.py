"""Exports what a run has trained: the whole model, or adapters in a folder as PEFT reads and writes them.

Adapters are written in fp32, whatever the type of an exported model is: they are small, and a run may go on from them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from megatier.adapters.base import noted_identity
from megatier.adapters.lora import adapter_config, stored_names
from megatier.adapters.stored_adapters import BASE, WEIGHTS_FILE
from megatier.config.lora import ADAPTER_FILE
from megatier.layout import TensorSlice
from megatier.models import export as models
from megatier.models.decoder import Unit
from megatier.models.export import Read, Tokens
from megatier.models.safetensors_format import write_header
from megatier.models.weights import chunks


def export(
    folder: Path,
    model: PreTrainedModel,
    units: Sequence[Unit],
    read: Read,
    dtype: torch.dtype,
    shard_bytes: int,
    tokenizer: Tokens | None = None,
) -> None:
    """Write a model as `models.export` does, or its adapters if it has some. See there for arguments and errors."""
    if adapter_config(model) is None:
        models.export(folder, model, units, read, dtype, shard_bytes, tokenizer)
        return

    # Before anything is read, which may take long.
    models.check_new(folder)
    places = _places(model, units)
    with models.new_folder(folder, _num_bytes(places)) as partial:
        _write_weights(partial / WEIGHTS_FILE, places, read, noted_identity(model))
        settings = json.dumps(_settings(model), indent=2, sort_keys=True)
        (partial / ADAPTER_FILE).write_text(f"{settings}\n")
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)


def export_bytes(model: PreTrainedModel, units: Sequence[Unit], dtype: torch.dtype) -> int:
    """Return the bytes of the weights that `export` writes.

    Raises:
        UnsupportedModelError: no layout of the weights is known that loads back.
    """
    if adapter_config(model) is None:
        return models.export_bytes(model, units, dtype)
    return _num_bytes(_places(model, units))


def _num_bytes(places: Mapping[str, tuple[Unit, TensorSlice]]) -> int:
    """Return the bytes of the weights of adapters, which are written in fp32."""
    return sum(math.prod(tensor.shape) * torch.float32.itemsize for _, tensor in places.values())


def _places(model: PreTrainedModel, units: Sequence[Unit]) -> dict[str, tuple[Unit, TensorSlice]]:
    """Return where each tensor of a folder of adapters lies in the units, which are whole, by its name there."""
    places = {tensor.name: (unit, tensor) for unit in units for tensor in unit.layout.tensors}
    return {stored: places[name] for stored, name in stored_names(model).items()}


def _write_weights(
    path: Path, places: Mapping[str, tuple[Unit, TensorSlice]], read: Read, base: Mapping[str, str]
) -> None:
    """Write the tensors of a folder of adapters, piece by piece. They are on disk when this returns.

    Args:
        path: the file.
        places: where each tensor lies.
        read: reads elements of a unit.
        base: the identity of the base, which is noted.
    """
    shapes = ((name, torch.float32, tensor.shape) for name, (_, tensor) in places.items())

    # PEFT's config has a path alone, and what lies there may be another model later.
    metadata = {BASE: json.dumps(base)} if base else {}
    header = write_header(shapes, metadata)

    with path.open("wb") as file:
        file.write(header)
        for unit, tensor in places.values():
            for start, stop in chunks(tensor.num_elements):
                values = read(unit, tensor.start + start, tensor.start + stop)
                in_bytes = values.contiguous().view(torch.uint8)
                file.write(in_bytes.numpy().data)

        # The folder gets its name next, which must not outlive bytes that power loss takes.
        file.flush()
        os.fsync(file.fileno())


def _settings(model: PreTrainedModel) -> dict[str, Any]:
    """Return PEFT's config of the adapters, as it is written. Loaded so, they are not trained, as PEFT saves them."""
    config = adapter_config(model)
    assert config is not None
    settings = {**config.to_dict(), "inference_mode": True}
    for key, value in settings.items():
        # In an order of their own, so that the same run writes the same bytes.
        if isinstance(value, set):
            settings[key] = sorted(value)

    return settings
