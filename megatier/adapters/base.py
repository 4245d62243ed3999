"""The identity of a base: what its files of weights are, found without reading all of them."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedModel

from megatier.adapters.stored import noted_base, read_config
from megatier.config.lora import ADAPTER_FILE
from megatier.errors import ConfigError, UnsupportedModelError
from megatier.foreign import opened, shown
from megatier.models.folder import read_headers
from megatier.models.shards import StoredTensor

ON_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")
"""Names of models on the hub. A relative path may look so as well, and then names nothing else."""
NOTED = "identity_of_base"
"""The attribute of a skeleton that has the identity of its base."""
PLACES = 256
"""Places of a file that are looked at, the first and the last bytes among them."""
PLACE_BYTES = 64 << 10
"""Bytes of each. So all of a file of 16 MiB is looked at, and 16 MiB of a larger one."""


def identity_of(folder: Path, stored: Mapping[str, StoredTensor] | None = None) -> dict[str, str]:
    """Return the size and a checksum of each file of weights in a model's folder, by its name.

    The checksum is over bytes at even distances, so it finds another model, or one that was trained further, in a file
    of any size. Other values of a few weights alone may be missed.

    Args:
        folder: the folder.
        stored: the tensors that are read from it, of whose files the identity has to be; None: those that it has now.

    Raises:
        UnsupportedModelError: a file is missing or damaged.
        FileChangedError: a file is another one now than that whose header was read, or was written since.
    """
    tensors = (read_headers(folder) if stored is None else stored).values()
    return {path.name: _described(tensor) for path, tensor in sorted({t.path: t for t in tensors}.items())}


def check_beside(folder: Path, adapter: str | None) -> None:
    """Refuse a model's folder that holds adapters too, unless a run goes on with these.

    Other programs put them into the model when they load it.

    Args:
        folder: the model's folder.
        adapter: the folder of the adapter that a run goes on with, if it does.

    Raises:
        ConfigError: it does.
    """
    if not (folder / ADAPTER_FILE).exists() or (adapter and Path(adapter).expanduser().resolve() == folder.resolve()):
        return
    raise ConfigError(
        f"{folder} holds adapters beside the model ({ADAPTER_FILE}), which from_pretrained would put into it. Set "
        "model.lora.adapter to this folder to go on with them, merge them with PEFT, or move that file away for the "
        "model alone."
    )


def check_base(adapter: Path, folder: Path, identity: Mapping[str, str], base: str) -> None:
    """Refuse an adapter that says that it is for another base, and warn if that cannot be told.

    Args:
        adapter: the folder of the adapter.
        folder: the folder of the base.
        identity: of the base, as `identity_of` gives it.
        base: the base's folder or its name on the hub.

    Raises:
        ConfigError: names what differs.
    """
    before = noted_base(adapter) or {}
    if before and before != identity:
        name = next(name for name in (*before, *identity) if before.get(name) != identity.get(name))
        raise ConfigError(
            f"model.lora.adapter: {adapter} was trained over another base than {base}: {name} was "
            f"{before.get(name, 'missing')} and is {identity.get(name, 'missing')}. Give it its own base."
        )

    # A folder may have been moved, and a name on the hub says little of it. Two names are of two models.
    other = read_config(adapter).get("base_model_name_or_path")
    if isinstance(other, str) and ON_HUB.fullmatch(other) and ON_HUB.fullmatch(base) and other != base:
        raise ConfigError(
            f"model.lora.adapter: {adapter} is for {shown(other)}, and model.path is {base}. Set model.path to it, or "
            f"write {base} into its {ADAPTER_FILE} if both are the same."
        )
    if not before and isinstance(other, str) and other:
        _check_named(adapter, Path(other).expanduser(), folder, identity)


def _numbers_of(folder: Path) -> set[tuple[str, str, tuple[int, ...]]]:
    """Return the name, dtype and shape of each tensor that a model's folder stores."""
    return {(tensor.name, tensor.dtype, tensor.shape) for tensor in read_headers(folder).values()}


def _check_named(adapter: Path, other: Path, folder: Path, identity: Mapping[str, str]) -> None:
    """Compare the base that an adapter of another program names with the one that it is given.

    Raises:
        ConfigError: they are others.
    """
    if any(other.glob("*.safetensors")):
        if identity_of(other) == identity:
            return
        if _numbers_of(other) == _numbers_of(folder):
            raise ConfigError(
                f"model.lora.adapter: {adapter} is for {shown(str(other))}, whose weights are others than those of "
                f"{folder}. Set model.path to its own base."
            )

        # A quantised copy, or one in another dtype, may well be of the same model.
        warnings.warn(
            f"the adapter {adapter} is for {shown(str(other))}, which stores its weights in other numbers than "
            f"{folder} does. So they cannot be compared; whether both are the same model nobody can tell.",
            stacklevel=2,
        )
        return

    # The folder of a snapshot has the name of the hub in the one above.
    parts = (*folder.parts, *folder.resolve().parts)
    names = {name for part in parts for name in (part, *part.split("--"))}
    if other.name not in names:
        warnings.warn(
            f"the adapter {adapter} names {shown(str(other))} as its base, which is not here to be compared with "
            f"{folder}. Their shapes fit; whether it is the same model nobody can tell.",
            stacklevel=2,
        )


def note(model: PreTrainedModel, identity: dict[str, str]) -> None:
    """Note the identity of a model's base with the model, for the folder of its adapters."""
    setattr(model, NOTED, identity)


def noted(model: PreTrainedModel) -> dict[str, str]:
    """Return the identity that was noted; empty: there is none."""
    found: dict[str, str] = getattr(model, NOTED, {})
    return found


def _described(tensor: StoredTensor) -> str:
    """Return size and checksum of a tensor's file, in words."""
    digest = hashlib.blake2b(digest_size=8)
    with opened(tensor.path, UnsupportedModelError) as file:
        size = os.fstat(file.fileno()).st_size
        for place in range(PLACES):
            file.seek(max(0, size - PLACE_BYTES) * place // (PLACES - 1))
            digest.update(file.read(PLACE_BYTES))
        tensor.check(file.fileno())
    return f"{size:,} bytes, checksum {digest.hexdigest()}"
