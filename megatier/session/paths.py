"""Looks for the files and folders that a config names, before anything is loaded that takes seconds.

Runs without torch and transformers. A path is checked again when it is opened, since it may be gone by then.
"""

from __future__ import annotations

from pathlib import Path

from megatier.config.data_section import BYTE_TOKENIZER, PROCESSOR_FILES
from megatier.config.schema import RunConfig
from megatier.data.sources import Say, check_sources
from megatier.drives.mounts import budget_bytes
from megatier.errors import DataError
from megatier.foreign import printable
from megatier.models.location import find_local

TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.spm", "*.tiktoken", "tekken.json")
"""Names of the files that make a tokenizer, of which it has one at least."""


def check_paths(config: RunConfig, say: Say = lambda _: None, *, reads_text: bool = True) -> None:
    """Refuse a model, texts or mounts that are not there, and texts that are none.

    Args:
        config: the run.
        say: takes a remark about files that are passed over, or read several times.
        reads_text: whether the run reads its text, or has the tokens of it already.

    Raises:
        ConfigError: a local model or a mount is missing or of another kind, or a mount is smaller than its budget.
        DataError: a folder has no tokenizer, an entry of `data.files` matches nothing, or a file cannot be read as it
            would be.
    """
    if config.model.path is not None:
        find_local(config.model.path)
    check_tokenizer(config)
    if config.data.dataset is None and reads_text:
        check_sources(config.data, say)
    for mount in config.tiers.mounts:
        budget_bytes(mount)


def check_tokenizer(config: RunConfig) -> None:
    """Refuse a local folder in which there is no tokenizer, or no processor if images are read.

    What lies on the hub is looked at when it is loaded.

    Raises:
        DataError: names the folder.
    """
    name = config.data.tokenizer or config.model.path
    if name is None or name == BYTE_TOKENIZER or not (folder := Path(name).expanduser()).is_dir():
        return
    if not any(path for pattern in TOKENIZERS for path in folder.glob(pattern)):
        raise DataError(
            f"no tokenizer at {printable(name)}: the folder has no tokenizer.json and no other file of one. Give "
            "data.tokenizer a folder, a hub id or bytes."
        )
    if config.data.images and not any(
        (folder / file).is_file() for file in (*PROCESSOR_FILES, "processor_config.json")
    ):
        raise DataError(
            f"no processor of images at {printable(name)}: the folder has no {PROCESSOR_FILES[0]}. data.images needs "
            "the folder or hub id of a model with images, in model.path or data.tokenizer."
        )
