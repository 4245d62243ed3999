"""Exports what a run has trained: the whole model, or adapters in a folder in PEFT's format.

Adapters are always written in fp32, since they are small and a run may continue from them.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from megatier.adapters.base import noted_identity
from megatier.adapters.lora import ADAPTER, adapter_config, load_peft, stored_names
from megatier.adapters.stored_adapters import BASE, WEIGHTS_FILE
from megatier.config.lora import ADAPTER_FILE
from megatier.errors import UnsupportedModelError
from megatier.layout import TensorSlice
from megatier.models import export as models
from megatier.models.decoder import Unit
from megatier.models.export import ReadElements, Tokens
from megatier.models.safetensors_format import write_header
from megatier.models.weights import chunks


def export_trained(
    folder: Path,
    model: PreTrainedModel,
    units: Sequence[Unit],
    read: ReadElements,
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
    settings = json.dumps(_settings(model), indent=2, sort_keys=True)
    with models.new_folder(folder, _num_bytes(places)) as partial:
        _write_weights(partial / WEIGHTS_FILE, places, read, noted_identity(model))
        (partial / ADAPTER_FILE).write_text(f"{settings}\n")
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)


def export_trained_bytes(model: PreTrainedModel, units: Sequence[Unit], dtype: torch.dtype) -> int:
    """Return the bytes of the weights that `export_trained` writes.

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
    """Return where each tensor of an adapter folder lies in the units, by its name in the folder."""
    places = {tensor.name: (unit, tensor) for unit in units for tensor in unit.layout.tensors}
    return {stored: places[name] for stored, name in stored_names(model).items()}


def _write_weights(
    path: Path, places: Mapping[str, tuple[Unit, TensorSlice]], read: ReadElements, base: Mapping[str, str]
) -> None:
    """Write the tensors of an adapter folder, piece by piece. They are on disk when this returns.

    Args:
        path: the file.
        places: where each tensor lies.
        read: reads elements of a unit.
        base: the identity of the base, to store.
    """
    shapes = ((name, torch.float32, tensor.shape) for name, (_, tensor) in places.items())

    # PEFT's config has only a path, where another model may lie later.
    metadata = {BASE: json.dumps(base)} if base else {}
    header = write_header(shapes, metadata)

    with path.open("wb") as file:
        file.write(header)
        for unit, tensor in places.values():
            for start, stop in chunks(tensor.num_elements):
                values = read(unit, tensor.start + start, tensor.start + stop)
                in_bytes = values.contiguous().view(torch.uint8)
                file.write(in_bytes.numpy().data)

        # The folder is renamed next, and that must not survive a power loss without these bytes.
        file.flush()
        os.fsync(file.fileno())


def _settings(model: PreTrainedModel) -> dict[str, Any]:
    """Return PEFT's config of the adapters for the folder. As when PEFT saves them, they load as not trained."""
    config = adapter_config(model)
    assert config is not None
    ranks, alphas = _ranks_and_alphas(model, config)
    settings = {
        **config.to_dict(),
        "inference_mode": True,
        "rank_pattern": _pattern(config.rank_pattern, config.r, ranks, "ranks"),
        "alpha_pattern": _pattern(config.alpha_pattern, config.lora_alpha, alphas, "scales"),
    }
    for key, value in settings.items():
        # Sorted, so that the same run writes the same bytes.
        if isinstance(value, set):
            settings[key] = sorted(value)

    return settings


def _ranks_and_alphas(model: PreTrainedModel, config: Any) -> tuple[dict[str, int], dict[str, float]]:  # noqa: ANN401
    """Return the present rank and alpha of each PEFT layer, by its name in PEFT's config."""
    layer_class = load_peft().tuners.lora.LoraLayer
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for name, module in model.named_modules():
        if not isinstance(module, layer_class):
            continue

        # Adapters of several parameters of a module are nested, and are named after the parameters.
        layer: Any = module
        key = name.replace(".base_layer", "")
        if hasattr(layer, "parameter_name"):
            key = f"{key}.{layer.parameter_name}"

        rank = ranks[key] = layer.r[ADAPTER]
        divisor = math.sqrt(rank) if config.use_rslora else rank
        alpha, scale = layer.lora_alpha[ADAPTER], layer.scaling[ADAPTER]

        # The layer's alpha is exact. A scale that was changed since is converted back.
        alphas[key] = alpha if alpha / divisor == scale else scale * divisor
    return ranks, alphas


def _pattern(given: Mapping[str, Any], default: float, values: Mapping[str, float], setting: str) -> dict[str, Any]:
    """Return a pattern for PEFT's config that gives each layer its value when it is loaded.

    Args:
        given: the pattern in the config.
        default: the value of layers that no pattern matches.
        values: the value of each layer, by its name.
        setting: what the values are, for the message.

    Raises:
        UnsupportedModelError: no such pattern exists.
    """
    by_name = {name: value for name, value in values.items() if value != default}
    for pattern in (given, by_name, values):
        # They are written in the order of their keys, and the first match counts.
        ordered = sorted(pattern.items())
        if all(_value_of(name, ordered, default) == value for name, value in values.items()):
            return dict(pattern)

    raise UnsupportedModelError(
        f"PEFT's config has no way to say the {setting} that the layers of this adapter have now, since the name of "
        "one layer is the end of another's. Give both the same, or export the merged model (megatier export --merge)."
    )


def _value_of(name: str, pattern: Sequence[tuple[str, float]], default: float) -> float:
    """Return the value that PEFT reads for a layer from a pattern."""
    for key, value in pattern:
        if re.match(rf"(.*\.)?({key})$", name):
            return value
    return default
