"""Identifies a base model by its weight files, without reading all of them."""

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
from megatier.foreign import opened, printable
from megatier.models.safetensors_format import StoredTensor
from megatier.models.weight_files import read_headers

ON_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")
"""Names of models on the hub. A relative path may look the same."""
_IDENTITY_ATTRIBUTE = "identity_of_base"
"""The attribute of a skeleton with the identity of its base."""
_NUM_SAMPLES = 256
"""The number of samples of a file that are read, its first and last bytes included."""
_SAMPLE_BYTES = 64 << 10
"""The bytes of each sample. So a file of 16 MiB is read whole, and 16 MiB of a larger one."""


def identity_of(folder: Path, stored: Mapping[str, StoredTensor] | None = None) -> dict[str, str]:
    """Return the size and a checksum of each weight file in a model's folder, by file name.

    The checksum covers samples at even distances, so it detects another or a further trained model in files of any
    size. A change of only a few weights may be missed.

    Args:
        folder: the folder.
        stored: the tensors that are read from the folder, whose files are identified; None: those that it has now.

    Raises:
        UnsupportedModelError: a file is missing or damaged.
        FileChangedError: a file was replaced or written since its header was read.
    """
    if stored is None:
        stored = read_headers(folder)

    # One tensor of each file is enough, since each knows the version of its file.
    tensor_of = {tensor.path: tensor for tensor in stored.values()}
    identity = dict[str, str]()
    for path in sorted(tensor_of):
        # Only by the file's name, so that a folder may be moved.
        identity[path.name] = _size_and_checksum(tensor_of[path])
    return identity


def check_beside(folder: Path, adapter: str | None) -> None:
    """Refuse a model's folder that also holds adapters, unless a run continues with them.

    Other programs add them to the model when they load it.

    Args:
        folder: the model's folder.
        adapter: the folder of the adapter that a run continues with, if any.

    Raises:
        ConfigError: it does.
    """
    if not (folder / ADAPTER_FILE).exists():
        return

    # A run may name the folder in another way, such as by a link.
    if adapter and os.path.realpath(Path(adapter).expanduser()) == os.path.realpath(folder):
        return
    raise ConfigError(
        f"{folder} holds adapters beside the model ({ADAPTER_FILE}), which from_pretrained would put into it. Set "
        "model.lora.adapter to this folder to go on with them, merge them with PEFT, or move that file away for the "
        "model alone."
    )


def check_base(adapter: Path, folder: Path, identity: Mapping[str, str], base: str) -> None:
    """Refuse an adapter of another base, and warn if that cannot be determined.

    Args:
        adapter: the folder of the adapter.
        folder: the folder of the base.
        identity: of the base, as `identity_of` gives it.
        base: the base's folder or its name on the hub.

    Raises:
        ConfigError: the base differs. The message says in what.
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

    # Adapters of other programs store no identity, but a name.
    named = read_config(adapter).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        return

    # A folder may have been moved, but two different hub names are two models.
    are_on_hub = ON_HUB.fullmatch(named) and ON_HUB.fullmatch(base)
    if are_on_hub and named != base:
        raise ConfigError(
            f"model.lora.adapter: {adapter} is for {printable(named)}, and model.path is {base}. Set model.path to it, "
            f"or write {base} into its {ADAPTER_FILE} if both are the same."
        )
    if not before:
        _check_named(adapter, Path(named).expanduser(), folder, identity)


def _contents_of(folder: Path) -> set[tuple[str, str, tuple[int, ...]]]:
    """Return the name, dtype and shape of each tensor that a model's folder stores."""
    return {(tensor.name, tensor.dtype, tensor.shape) for tensor in read_headers(folder).values()}


def _check_named(adapter: Path, named: Path, folder: Path, identity: Mapping[str, str]) -> None:
    """Compare the base that an adapter of another program names with the given one.

    Args:
        adapter: the folder of the adapter.
        named: the folder of the base that it names.
        folder: the folder of the given base.
        identity: the identity of the given base.

    Raises:
        ConfigError: they differ.
    """
    if any(named.glob("*.safetensors")):
        # The named base is here, so files are compared instead of names.
        if identity_of(named) == identity:
            return
        if _contents_of(named) == _contents_of(folder):
            raise ConfigError(
                f"model.lora.adapter: {adapter} is for {printable(str(named))}, whose weights are others than those of "
                f"{folder}. Set model.path to its own base."
            )

        # A quantised copy, or one in another dtype, may be the same model.
        warnings.warn(
            f"the adapter {adapter} is for {printable(str(named))}, which stores its weights in other numbers than "
            f"{folder} does. So they cannot be compared; whether both are the same model nobody can tell.",
            stacklevel=2,
        )
        return

    # The parent of a snapshot's folder has the hub's name: models--OWNER--NAME/snapshots/COMMIT.
    names = set[str]()
    for part in (*folder.parts, *folder.resolve().parts):
        names.add(part)
        names.update(part.split("--"))
    if named.name not in names:
        warnings.warn(
            f"the adapter {adapter} names {printable(str(named))} as its base, which is not here to be compared with "
            f"{folder}. Their shapes fit; whether it is the same model nobody can tell.",
            stacklevel=2,
        )


def note_identity(model: PreTrainedModel, identity: dict[str, str]) -> None:
    """Store the identity of a model's base on the model, for the folder of its adapters."""
    setattr(model, _IDENTITY_ATTRIBUTE, identity)


def noted_identity(model: PreTrainedModel) -> dict[str, str]:
    """Return the stored identity; empty: there is none."""
    identity: dict[str, str] = getattr(model, _IDENTITY_ATTRIBUTE, {})
    return identity


def _size_and_checksum(tensor: StoredTensor) -> str:
    """Return the size and checksum of a tensor's file, as text."""
    digest = hashlib.blake2b(digest_size=8)
    with opened(tensor.path, UnsupportedModelError) as file:
        size = os.fstat(file.fileno()).st_size
        last_place = max(0, size - _SAMPLE_BYTES)
        for place in range(_NUM_SAMPLES):
            file.seek(last_place * place // (_NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))

        # Checked afterwards, so that a write meanwhile is noticed too.
        tensor.check(file.fileno())
    return f"{size:,} bytes, checksum {digest.hexdigest()}"
