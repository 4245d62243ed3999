"""Reads the headers and settings of a model's folder."""

from __future__ import annotations

import contextlib
from pathlib import Path

from transformers import GenerationConfig

from megatier.errors import UnsupportedModelError
from megatier.foreign import SETTINGS_BYTES_MAX, TABLE_BYTES_MAX, printable, read_object, reading
from megatier.models.safetensors_format import StoredTensor, read_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
GENERATION_FILE = "generation_config.json"
"""The file with the model's generation settings."""


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a folder by their stored names.

    Raises:
        UnsupportedModelError: a file is missing or damaged, or files contradict one another.
    """
    single = folder / SINGLE_FILE
    index = folder / INDEX_FILE

    # As in transformers, a single file takes precedence over an index, which an earlier save may have left.
    if single.is_file():
        return read_header(single)
    if not index.is_file():
        raise UnsupportedModelError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}. Convert other formats with save_pretrained()."
        )

    stored: dict[str, StoredTensor] = {}
    weight_map = _weight_map(index)
    for file_name in sorted(set(weight_map.values())):
        # Only the name is checked, since the hub's cache links files into another folder.
        if Path(file_name).name != file_name or not _is_file(folder / file_name):
            raise UnsupportedModelError(f"{index}: {printable(file_name)!r} is no file in this folder.")
        for name, tensor in read_header(folder / file_name).items():
            # transformers would silently use one of them.
            if name in stored:
                raise UnsupportedModelError(f"{tensor.path}: tensor {printable(name)} is also in {stored[name].path}.")
            stored[name] = tensor

    # Conversely, everything that the index lists must be there, in the file that it names.
    for name, file_name in weight_map.items():
        if name not in stored or stored[name].path.name != file_name:
            raise UnsupportedModelError(
                f"{folder / file_name}: tensor {printable(name)} is missing; the index lists it. Download the file "
                "again."
            )

    return stored


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor, according to an index."""
    settings = read_object(index, TABLE_BYTES_MAX, UnsupportedModelError)
    weight_map = settings.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise UnsupportedModelError(f"{index}: weight_map must give a file name for each tensor.")
    return weight_map


def _is_file(path: Path) -> bool:
    """Return whether a file is there."""
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False


def read_generation_config(folder: Path) -> GenerationConfig | None:
    """Return the generation settings of a model's folder, which are exported unchanged.

    Returns:
        The settings; None if the folder has none.

    Raises:
        UnsupportedModelError: transformers does not take them.
    """
    path = folder / GENERATION_FILE
    with contextlib.suppress(FileNotFoundError):
        read_object(path, SETTINGS_BYTES_MAX, UnsupportedModelError)
        with reading(f"{path}: transformers does not take these settings", UnsupportedModelError):
            settings = GenerationConfig.from_pretrained(folder)

            # What cannot be written is refused now, rather than when the trained model is exported.
            settings.to_json_string()
            return settings

    return None
