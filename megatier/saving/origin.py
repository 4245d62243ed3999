"""The origin of a run: what identifies its model and tokenizer, apart from the weights.

A checkpoint has the weights. Config, buffers, tokenizer and the base of adapters are read from their own folders each
time. If one of them has changed, every number of the run changes, although all files of the run are whole. So a run
saves its origin, and a resume or an export compares it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from megatier.adapters.base import noted_identity
from megatier.adapters.stored_adapters import read_settings
from megatier.config.schema import RunConfig
from megatier.data.tokenizer import tokenizer_files
from megatier.errors import ConfigError, DataError, UnsupportedModelError
from megatier.foreign import SETTINGS_BYTES_MAX, TABLE_BYTES_MAX, read_input, read_object
from megatier.models.location import MODEL_CONFIG_FILE, resolve

COMPUTED = "computed buffer"
"""Prefix for a buffer that is in no file, because a constructor computes it with the kernels of this machine."""
LIBRARY = "library of images"
"""Prefix for a library that makes pixels, since another version may make other pixels of the same image."""
UNKNOWN_ORIGIN = (
    "{} was written by an older version: changes of config.json, buffers or tokenizer since then are not found"
)
"""The warning if a checkpoint has no origin."""
TEXT_CHARACTERS_MAX = 100
"""Longer values are replaced by their checksums."""
UNREAD_SETTINGS = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")
"""Settings of a model's config that no run reads: its name, and the classes and types for other programs."""

Origin = dict[str, str]
"""Values as JSON or checksums, under names such as "tokenizer.json of the tokenizer"."""


def read_origin(config: RunConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Origin:
    """Return the origin of a run's model and tokenizer.

    Args:
        config: the run.
        model: the skeleton from `open_model`, before the first step.
        tokenizer: the tokenizer from `load_tokenizer`.

    Raises:
        ConfigError, UnsupportedModelError, DataError: a file cannot be read.
    """
    return {
        **_read_settings(config),
        **_read_base(config, model),
        **_hash_buffers(model),
        **_hash_tokenizer(config, tokenizer),
        **_list_versions(config),
    }


def find_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a line for each part that differs, with both values.

    Args:
        before: the saved origin; if it is empty, nothing is compared.
        now: the origin now.
    """
    if not before:
        return []
    changes: list[str] = []
    # A set of strings has another order in each process.
    for name in sorted({*before, *now}):
        was = before.get(name, "missing")
        is_now = now.get(name, "missing")
        if was != is_now:
            changes.append(f"{name} was {was} and is {is_now}")
    return changes


def keep_exported(origin: Mapping[str, str]) -> Origin:
    """Return the part of an origin that an export writes. Computed buffers and libraries are in no file."""
    return {name: value for name, value in origin.items() if not name.startswith((COMPUTED, LIBRARY))}


def check_origin(changes: Sequence[str], config: RunConfig, accepted: Container[str] = (), remedy: str = "") -> None:
    """Refuse a model or tokenizer that has changed.

    Args:
        changes: the changes from `find_changes`.
        config: names the folders of model and tokenizer.
        accepted: changes that are allowed.
        remedy: a second remedy, beside bringing the old files back.

    Raises:
        ConfigError: names each change that is not accepted.
    """
    if refused := [change for change in changes if change not in accepted]:
        folders = ", ".join(filter(None, (config.model.path, config.data.tokenizer))) or "model.config"
        raise ConfigError(
            f"the run began with another model or tokenizer than {folders} gives now: {'; '.join(refused)}. Bring the "
            f"old files back{remedy}."
        )


def _read_settings(config: RunConfig) -> Origin:
    """Return the settings of `config.json` that a model is built from."""
    if config.model.path is None:
        return {}
    path = resolve(config.model.path, weights=False) / MODEL_CONFIG_FILE
    settings = read_object(path, SETTINGS_BYTES_MAX, UnsupportedModelError)

    # Each setting has an entry, so that a message can name what has changed.
    return {f"{MODEL_CONFIG_FILE} of the model: {name}": _format_value(value) for name, value in _flatten(settings)}


def _read_base(config: RunConfig, model: PreTrainedModel) -> Origin:
    """Return the files of the base of adapters, and the settings of a given adapter, which no checkpoint has."""
    base = {f"{name} of the base": file for name, file in noted_identity(model).items()}
    adapters = config.model.adapters
    if adapters is None or adapters.adapter is None:
        return base

    # A given adapter has its rank, scale and targets in its own file, and not in the settings of the run.
    settings = read_settings(Path(adapters.adapter).expanduser())
    for name, value in settings.items():
        base[f"{name} of the adapter"] = _format_value(value)
    return base


def _flatten(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting under its dotted name."""
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{above}{key}.")
        elif key not in UNREAD_SETTINGS:
            yield f"{above}{key}", value


def _format_value(value: object) -> str:
    """Return a value as JSON, or its checksum if it is long."""
    # Keys are sorted, because their order in the file changes no number.
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= TEXT_CHARACTERS_MAX else _hash(text.encode())


def _hash_buffers(model: PreTrainedModel) -> Origin:
    """Return the buffers of a model, each under a name that says whether a file holds it."""
    stored = model.state_dict()
    checksums = {}
    for name, buffer in model.named_buffers():
        kind = "buffer" if name in stored else COMPUTED
        # numpy has no bf16, so the bytes are taken.
        flat = buffer.detach().cpu().contiguous().reshape(-1)
        content = flat.view(torch.uint8).numpy().tobytes()
        checksums[f"{kind} {name} of the model"] = _hash(content)
    return checksums


def _hash_tokenizer(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Origin:
    """Return the checksums of the tokenizer's files, and that of a chat template that the user gave."""
    checksums = {}
    for path in tokenizer_files(config, tokenizer):
        # The model's own config is compared by its settings. One in another folder may choose the tokenizer's class.
        if path.name == MODEL_CONFIG_FILE and config.data.tokenizer is None:
            continue

        # No tokenizer has all of these files. A file that appears or disappears is a change too.
        with contextlib.suppress(FileNotFoundError):
            content = read_input(path, TABLE_BYTES_MAX, DataError)
            checksums[f"{path.name} of the tokenizer"] = _hash(content)

    # The template is taken from the tokenizer, because it may have come through a pipe, which is read once.
    if config.data.chat_template is not None:
        checksums["data.chat_template"] = _hash(json.dumps(tokenizer.chat_template).encode())
    return checksums


def _list_versions(config: RunConfig) -> Origin:
    """Return the versions of the libraries that make pixels, if images are read."""
    versions = {}
    for name in ("pillow", "torchvision") if config.data.images else ():
        # Processors use torchvision where it is installed.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[f"{LIBRARY} {name}"] = importlib.metadata.version(name)
    return versions


def _hash(content: bytes) -> str:
    return f"checksum {hashlib.blake2b(content, digest_size=8).hexdigest()}"
