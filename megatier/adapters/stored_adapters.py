"""Reads adapters from a folder in PEFT's format: their config and their weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from megatier.config.lora import ADAPTER_FILE
from megatier.errors import ConfigError
from megatier.foreign import SETTINGS_BYTES_MAX, TABLE_BYTES_MAX, opened, parse_json, printable, read_object
from megatier.models.safetensors_format import SAFETENSORS_DTYPES, StoredTensor, read_header
from megatier.models.weights import FULL_PRECISION_NAMES, read_bytes

WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""The prefix of all parameter names in an adapter folder."""
BASE = "base"
"""The metadata entry of the weights with the identity of the adapter's base: `base.identity_of` as JSON."""

_TAKEN_SETTINGS = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "fan_in_fan_out",
    "use_rslora",
    "use_dora",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "layers_pattern",
)
"""Settings of PEFT's config that are used."""
_IGNORED_SETTINGS = (
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "peft_type",
    "peft_version",
    "revision",
    "task_type",
    "loftq_config",
    "megatron_config",
    "megatron_core",
    "qalora_group_size",
    "runtime_config",
    "ensure_weight_tying",
    "eva_config",
    "corda_config",
    "lora_ga_config",
)
"""Settings that do not affect the layers: about first values, names and other programs."""
_INIT_METHODS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Initialisations that do not change the base."""


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of a folder's adapters, as arguments of PEFT's `LoraConfig`.

    Raises:
        ConfigError: there are none, or they are not supported. The message names the setting.
    """
    return checked_settings(read_config(folder), f"model.lora.adapter: {folder / ADAPTER_FILE}")


def checked_settings(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the supported settings of a PEFT config, and check the others.

    Args:
        config: the config, with its kind.
        where: the beginning of messages.

    Raises:
        ConfigError: adapters of this kind are not supported. The message names the setting.
    """
    # PEFT's other kinds (prefixes, IA3, ...) add other things to a model than the layers that are streamed here.
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"{where} is of the kind {printable(str(kind))}; LORA alone is trained here.")

    # An unknown setting may affect the layers, unless it is off.
    is_refused = {
        "bias": config.get("bias", "none") != "none",
        "init_lora_weights": config.get("init_lora_weights") not in _INIT_METHODS,
    }
    for key, value in config.items():
        if key not in (*_TAKEN_SETTINGS, *_IGNORED_SETTINGS, *is_refused):
            is_refused[key] = bool(value)

    for key, refused in is_refused.items():
        if refused:
            raise ConfigError(
                f"{where} sets {printable(key)} to {printable(str(config[key]))}, and such adapters are not trained "
                "here."
            )
    return {key: config[key] for key in _TAKEN_SETTINGS if config.get(key) is not None}


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config of an adapter folder, as stored.

    Raises:
        ConfigError: there is none.
    """
    try:
        return read_object(folder / ADAPTER_FILE, SETTINGS_BYTES_MAX, ConfigError)
    except FileNotFoundError as error:
        raise ConfigError(
            f"model.lora.adapter: {folder} has no {ADAPTER_FILE}. Give the folder of an adapter in PEFT's format."
        ) from error


class StoredAdapter:
    """The weights of an adapter folder, by their names in a model."""

    def __init__(self, folder: Path, model: PreTrainedModel, names: Mapping[str, str]) -> None:
        """Check the weights' header against the adapters in a model.

        Args:
            folder: the folder of adapters.
            model: the skeleton with such adapters.
            names: the parameters of the adapters, by their names in a folder.

        Raises:
            ConfigError: a tensor is missing, unknown, of another shape or not in full precision. The message names it.
        """
        # Older releases of PEFT wrote a pickle instead, which could run code when it is loaded.
        path = folder / WEIGHTS_FILE
        if not path.is_file():
            raise ConfigError(
                f"model.lora.adapter: {folder} has no {WEIGHTS_FILE}. Load it with PEFT, and save it with "
                "save_pretrained()."
            )

        stored = read_header(path)
        odd = sorted(stored.keys() ^ names.keys())

        # PEFT also stores the embedding itself with an embedding's adapter, unless it is told not to.
        if odd and all(name in stored and ".base_layer." in name for name in odd):
            raise ConfigError(
                f"model.lora.adapter: {path} holds weights of the base too, such as {printable(odd[0])}. Load it with "
                "PEFT, and save it with save_pretrained(save_embedding_layers=False)."
            )
        if odd:
            defect = "holds {}, which is no part of" if odd[0] in stored else "lacks {}, a part of"
            raise ConfigError(
                f"model.lora.adapter: {path} {defect.format(printable(odd[0]))} such adapters of "
                f"{type(model).__name__} ({len(odd)} such tensors). Is it an adapter for another base?"
            )

        self._stored = {names[name]: tensor for name, tensor in stored.items()}
        for name, tensor in self._stored.items():
            _check(path, tensor, tuple(model.get_parameter(name).shape))

    def __contains__(self, name: str) -> bool:
        """Return whether a parameter of the model is in the folder."""
        return name in self._stored

    def read(self, name: str) -> Tensor:
        """Return a whole parameter, flat and in fp32.

        Raises:
            TransferError: the file has become shorter or unreadable meanwhile.
        """
        stored = self._stored[name]

        # At once, since an adapter's matrices are small.
        raw = read_bytes(stored, 0, stored.num_bytes)
        return raw.view(SAFETENSORS_DTYPES[stored.dtype]).float()


def noted_base(folder: Path) -> dict[str, str] | None:
    """Return the identity of an adapter folder's base; None: it is not stored.

    Raises:
        ConfigError: the weights have no header.
    """
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        return None

    # Not `read_header`, which omits the metadata.
    with opened(path, ConfigError) as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        raw = file.read(min(header_bytes, TABLE_BYTES_MAX))
        header = parse_json(raw, f"{path}: the safetensors header", ConfigError)

    # Another program may have written anything there.
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    noted = metadata.get(BASE) if isinstance(metadata, dict) else None
    if not isinstance(noted, str):
        return None
    try:
        identity = parse_json(noted.encode("utf-8", "replace"), "the base", ConfigError)
    except ConfigError:
        return None
    return identity if isinstance(identity, dict) else None


def _check(path: Path, tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    """Check a stored tensor against its parameter.

    Raises:
        ConfigError: it is of another shape, or not in full precision.
    """
    if tensor.shape != shape:
        raise ConfigError(
            f"model.lora.adapter: {path}: tensor {printable(tensor.name)} has shape {tensor.shape}; this base asks for "
            f"{shape}. Is it an adapter for another base?"
        )
    if tensor.dtype not in FULL_PRECISION_NAMES:
        raise ConfigError(
            f"model.lora.adapter: {path}: tensor {printable(tensor.name)} is {printable(tensor.dtype)}; adapters are "
            f"read in {', '.join(FULL_PRECISION_NAMES)}."
        )
