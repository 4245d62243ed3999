"""What a run reads of its model and tokenizer whenever it goes on: from their folders, not from its checkpoint.

A checkpoint has the weights. The config, the buffers and the tokenizer come from outside each time, and another one of
them changes every number from there on, though every file of the run is whole. So the run notes what they were, and
whoever goes on compares.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from megatier.config.schema import RunConfig
from megatier.data.tokenizer import tokenizer_files
from megatier.errors import ConfigError, DataError, UnsupportedModelError
from megatier.foreign import SETTINGS_BYTES_MAX, TABLE_BYTES_MAX, read_input, read_object
from megatier.models.weights import resolve
from megatier.session.skeleton import CONFIG_FILE

COMPUTED = "computed buffer"
"""Begins the name of a buffer that no file holds: a constructor computes it, with the kernels of this machine."""
UNKNOWN = "{} was written by an older version: changes of config.json, buffers or tokenizer since then are not found"
"""What is said where a run or an export goes on from one that has no such note."""
TEXT_CHARACTERS_MAX = 100
"""A longer value is noted by its checksum."""
FREE = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")
"""Settings of a model's config that no run reads: its name, and the classes and types that others load it with."""

Origin = dict[str, str]
"""By name, such as "tokenizer.json of the tokenizer": a value as JSON, or a checksum."""


def origin_of(config: RunConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Origin:
    """What a run's model and tokenizer are made of, but for the weights.

    Args:
        config: the run.
        model: as `open_model` gives it, before a step.
        tokenizer: as `load_tokenizer` gives it.

    Raises:
        ConfigError, UnsupportedModelError, DataError: a file cannot be read.
    """
    return {
        **_settings(config),
        **{name: _checksum(_content(buffer)) for name, buffer in _buffers(model)},
        **_tokenizer(config, tokenizer),
    }


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What is another now, each with both values; nothing, if nothing was noted before."""
    if not before:
        return []
    names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    return [f"{name} was {before.get(name, 'missing')} and is {now.get(name, 'missing')}" for name in names]


def exported(origin: Mapping[str, str]) -> Origin:
    """The part that an export writes: a buffer that is computed is in no file."""
    return {name: value for name, value in origin.items() if not name.startswith(COMPUTED)}


def check_origin(changes: Sequence[str], config: RunConfig, accepted: Container[str] = (), remedy: str = "") -> None:
    """Refuse another model or tokenizer.

    Args:
        changes: `differences`.
        config: says where model and tokenizer come from.
        accepted: changes that are no reason to refuse.
        remedy: besides bringing the old files back.

    Raises:
        ConfigError: names each change that is not accepted.
    """
    if refused := [change for change in changes if change not in accepted]:
        folders = ", ".join(filter(None, (config.model.path, config.data.tokenizer))) or "model.config"
        raise ConfigError(
            f"the run began with another model or tokenizer than {folders} gives now: {'; '.join(refused)}. Bring the "
            f"old files back{remedy}."
        )


def _settings(config: RunConfig) -> Origin:
    """What `config.json` says, as far as a model is built from it. Without a folder the run's own config has it."""
    if config.model.path is None:
        return {}
    settings = read_object(resolve(config.model.path) / CONFIG_FILE, SETTINGS_BYTES_MAX, UnsupportedModelError)
    return {f"{CONFIG_FILE} of the model: {name}": _shown(value) for name, value in _flat(settings)}


def _flat(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Each setting under its dotted name."""
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{key}.")
        elif key not in FREE:
            yield f"{above}{key}", value


def _shown(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= TEXT_CHARACTERS_MAX else _checksum(text.encode())


def _buffers(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    stored = model.state_dict()
    for name, buffer in model.named_buffers():
        yield f"{'buffer' if name in stored else COMPUTED} {name} of the model", buffer


def _content(buffer: Tensor) -> bytes:
    return buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _tokenizer(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Origin:
    """The tokenizer's files, and the chat template that the user gave, which may have come through a pipe."""
    found = {}
    for path in tokenizer_files(config, tokenizer):
        # The model's own config is noted by its settings. One in another folder may choose the tokenizer's class.
        if path.name == CONFIG_FILE and config.data.tokenizer is None:
            continue
        with contextlib.suppress(FileNotFoundError):
            found[f"{path.name} of the tokenizer"] = _checksum(read_input(path, TABLE_BYTES_MAX, DataError))

    if config.data.chat_template is not None:
        found["data.chat_template"] = _checksum(json.dumps(tokenizer.chat_template).encode())
    return found


def _checksum(content: bytes) -> str:
    return f"checksum {hashlib.blake2b(content, digest_size=8).hexdigest()}"
