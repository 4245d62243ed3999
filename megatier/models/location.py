"""Locates a model: in a local folder, or in a repository of the hub. It runs without torch."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from megatier.config.lora import ADAPTER_FILE
from megatier.errors import ConfigError, ModelNotFoundError
from megatier.foreign import at_one_commit, printable

MODEL_CONFIG_FILE = "config.json"
_SETTINGS_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
"""The files of a hub repository that a skeleton and a tokenizer need."""
_WEIGHT_FILES = "*.safetensors"
"""Its weights. Many repositories also hold them in other formats, which are not downloaded."""
_FORMAT_REMEDY = "Give the folder of a Hugging Face model, with config.json and *.safetensors."


def resolve(path_or_id: str, *, weights: bool = True) -> Path:
    """Return the folder of a model: a local one, or a snapshot of a hub repository, which is downloaded if needed.

    Args:
        path_or_id: the folder, or the name on the hub.
        weights: whether the weights are needed. A plan only needs the settings.

    Raises:
        ModelNotFoundError: there is no such folder or repository.
        ConfigError: see `find_local`.
    """
    if (folder := find_local(path_or_id)) is not None:
        return folder

    # Imported here, since the client is slow to import and most runs never need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    patterns = [*_SETTINGS_FILES, _WEIGHT_FILES] if weights else [*_SETTINGS_FILES]
    try:
        return at_one_commit(snapshot_download(path_or_id, allow_patterns=patterns))
    except (OSError, HFValidationError) as error:
        raise ModelNotFoundError(
            f"{path_or_id} is no local folder, and the hub could not be read ({type(error).__name__}). "
            "Give the path of a downloaded model, or check the name, the network and your access rights."
        ) from error


def find_local(path_or_id: str) -> Path | None:
    """Return a model's local folder; None if the name can only be that of a hub repository.

    Raises:
        ConfigError: a file or folder of this name holds no model.
        ModelNotFoundError: the name is neither that of a folder nor a hub id.
    """
    path = Path(path_or_id).expanduser()

    # Text that cannot be a path, such as a name that is too long, raises an OSError.
    try:
        if path.is_dir():
            _check_folder(path)
            return path
        # A model in one file, such as GGUF.
        if path.exists():
            raise ConfigError(_refusal(path, [path], "is a file"))
    except PermissionError as error:
        raise ConfigError(
            f"model.path: cannot read {printable(str(error.filename))}: {error.strerror}. Check your rights there."
        ) from error
    except OSError:
        pass

    # A relative path such as ./model looks like a hub id too.
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path_or_id) or path_or_id.startswith("."):
        raise ModelNotFoundError(
            f"no such model folder: {printable(path_or_id)}. Give a folder that exists, or a hub id."
        )
    return None


@contextlib.contextmanager
def naming_option(option: str) -> Iterator[None]:
    """Add to the error about a missing model which option gives its new location."""
    try:
        yield
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"{error} If it was moved, say with {option} where it is now.") from error


def _check_folder(folder: Path) -> None:
    """Refuse a folder without a config, and say what it holds.

    Raises:
        ConfigError: it has no config.json.
    """
    if (folder / MODEL_CONFIG_FILE).exists():
        return
    # The files there tell what the user has.
    files = sorted(folder.iterdir())
    complaint = f"has no {MODEL_CONFIG_FILE}" if files else "is empty"
    raise ConfigError(_refusal(folder, files, complaint))


def _refusal(path: Path, files: list[Path], complaint: str) -> str:
    """Return a message about a path that is not a model's folder."""
    if any(file.suffix.lower() == ".gguf" for file in files):
        complaint = "is in GGUF, a format for inference that has no full precision"
    if any(file.name == ADAPTER_FILE for file in files):
        complaint = (
            f"has no {MODEL_CONFIG_FILE} but adapters ({ADAPTER_FILE}): set model.path to their base and "
            "model.lora.adapter to this folder. By itself it"
        )
        return f"model.path: {printable(str(path))} {complaint} is no Hugging Face model."
    return f"model.path: {printable(str(path))} {complaint}, so it is no Hugging Face model. {_FORMAT_REMEDY}"
