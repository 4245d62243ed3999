"""Identifies a base by its files of weights, without reading all of them."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedModel

from megatier.adapters.stored_adapters import noted_base, read_config
from megatier.config.lora import ADAPTER_FILE
from megatier.errors import ConfigError, UnsupportedModelError
from megatier.foreign import opened, shown
from megatier.models.safetensors_format import StoredTensor
from megatier.models.weight_files import read_headers

ON_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")
"""Names of models on the hub. A relative path may look so as well, and then names nothing else."""
_IDENTITY_ATTRIBUTE = "identity_of_base"
"""The attribute of a skeleton that has the identity of its base."""
_NUM_SAMPLES = 256
"""Places of a file that are looked at, the first and the last bytes among them."""
_SAMPLE_BYTES = 64 << 10
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
    if stored is None:
        stored = read_headers(folder)

    # One tensor of each file will do, because all of a file's tensors know the version whose header was read.
    tensor_of = {tensor.path: tensor for tensor in stored.values()}
    identity = dict[str, str]()
    for path in sorted(tensor_of):
        # By the file's name alone, so that a folder may be moved.
        identity[path.name] = _size_and_checksum(tensor_of[path])
    return identity


def check_beside(folder: Path, adapter: str | None) -> None:
    """Refuse a model's folder that holds adapters too, unless a run goes on with these.

    Other programs put them into the model when they load it.

    Args:
        folder: the model's folder.
        adapter: the folder of the adapter that a run goes on with, if it does.

    Raises:
        ConfigError: it does.
    """
    if not (folder / ADAPTER_FILE).exists():
        return

    # A run may name the folder in another way, such as by a link.
    if adapter and Path(adapter).expanduser().resolve() == folder.resolve():
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
        was = before.get(name, "missing")
        now = identity.get(name, "missing")
        raise ConfigError(
            f"model.lora.adapter: {adapter} was trained over another base than {base}: {name} was "
            f"{was} and is {now}. Give it its own base."
        )

    # Adapters of other programs have no identity, but a name.
    named = read_config(adapter).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        return

    # A folder may have been moved, and a name on the hub says little of it. Two names are of two models.
    are_on_hub = ON_HUB.fullmatch(named) and ON_HUB.fullmatch(base)
    if are_on_hub and named != base:
        raise ConfigError(
            f"model.lora.adapter: {adapter} is for {shown(named)}, and model.path is {base}. Set model.path to it, or "
            f"write {base} into its {ADAPTER_FILE} if both are the same."
        )
    if not before:
        _check_named(adapter, Path(named).expanduser(), folder, identity)


def _contents_of(folder: Path) -> set[tuple[str, str, tuple[int, ...]]]:
    """Return the name, dtype and shape of each tensor that a model's folder stores."""
    return {(tensor.name, tensor.dtype, tensor.shape) for tensor in read_headers(folder).values()}


def _check_named(adapter: Path, named: Path, folder: Path, identity: Mapping[str, str]) -> None:
    """Compare the base that an adapter of another program names with the one that it is given.

    Args:
        adapter: the folder of the adapter.
        named: the base that it names.
        folder: the base that it is given.
        identity: of the latter.

    Raises:
        ConfigError: they are others.
    """
    if any(named.glob("*.safetensors")):
        # The base that it names is here, so files are compared and not names.
        if identity_of(named) == identity:
            return
        if _contents_of(named) == _contents_of(folder):
            raise ConfigError(
                f"model.lora.adapter: {adapter} is for {shown(str(named))}, whose weights are others than those of "
                f"{folder}. Set model.path to its own base."
            )

        # A quantised copy, or one in another dtype, may well be of the same model.
        warnings.warn(
            f"the adapter {adapter} is for {shown(str(named))}, which stores its weights in other numbers than "
            f"{folder} does. So they cannot be compared; whether both are the same model nobody can tell.",
            stacklevel=2,
        )
        return

    # The folder of a snapshot has the name of the hub in the one above: models--OWNER--NAME/snapshots/COMMIT.
    names = set[str]()
    for part in (*folder.parts, *folder.resolve().parts):
        names.add(part)
        names.update(part.split("--"))
    if named.name not in names:
        warnings.warn(
            f"the adapter {adapter} names {shown(str(named))} as its base, which is not here to be compared with "
            f"{folder}. Their shapes fit; whether it is the same model nobody can tell.",
            stacklevel=2,
        )


def note_identity(model: PreTrainedModel, identity: dict[str, str]) -> None:
    """Note the identity of a model's base with the model, for the folder of its adapters."""
    setattr(model, _IDENTITY_ATTRIBUTE, identity)


def noted_identity(model: PreTrainedModel) -> dict[str, str]:
    """Return the identity that was noted; empty: there is none."""
    identity: dict[str, str] = getattr(model, _IDENTITY_ATTRIBUTE, {})
    return identity


def _size_and_checksum(tensor: StoredTensor) -> str:
    """Return size and checksum of a tensor's file, in words."""
    digest = hashlib.blake2b(digest_size=8)
    with opened(tensor.path, UnsupportedModelError) as file:
        size = os.fstat(file.fileno()).st_size
        last_place = max(0, size - _SAMPLE_BYTES)
        for place in range(_NUM_SAMPLES):
            file.seek(last_place * place // (_NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))

        # Asked afterwards, so that a file that was written meanwhile is found too.
        tensor.check(file.fileno())
    return f"{size:,} bytes, checksum {digest.hexdigest()}"
