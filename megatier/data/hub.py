"""Loads datasets by Hugging Face's `datasets`, from the hub or a folder, whole or as a stream.

`datasets` is imported here alone, and only if `data.dataset` asks for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatier.config.data_section import DataConfig
from megatier.errors import DataError

BROKEN = (OSError, ValueError, RuntimeError, LookupError, TypeError, ImportError)
"""The errors that `datasets`, pyarrow and the network raise besides `DatasetsError`."""


def load(config: DataConfig, split: str) -> Any:  # noqa: ANN401  datasets has no types
    """Return a split of `data.dataset` as a `Dataset`, whose rows lie in the cache of `datasets`.

    Raises:
        DataError: there is no such dataset, subset, split or revision, it cannot be reached, or `datasets` is missing.
    """
    with _opening(config) as datasets:
        rows = datasets.load_dataset(_name(config), config.subset, split=split, revision=config.revision)

        # As tables, whose images are the bytes of their files: the library would decode them.
        return rows.with_format("arrow") if config.images else rows


def stream(config: DataConfig, split: str) -> tuple[Any, str | None]:
    """Return a split of `data.dataset` as an `IterableDataset`, and its commit on the hub; None for a folder.

    Raises:
        DataError: see `load`.
    """
    with _opening(config) as datasets:
        builder = datasets.load_dataset_builder(_name(config), config.subset, revision=config.revision)
        dataset = builder.as_streaming_dataset(split=split)

    # A folder has a hash too, but that is no commit that could be asked for again.
    is_on_hub = builder.repo_id is not None
    return dataset, builder.hash if is_on_hub else None


def local_files(config: DataConfig, split: str) -> list[str]:
    """Return the local files of a split of a folder, in their order; none for a dataset of the hub.

    Raises:
        DataError: see `load`.
    """
    if not Path(_name(config)).is_dir():
        return []
    with _opening(config) as datasets:
        builder = datasets.load_dataset_builder(_name(config), config.subset, revision=config.revision)

    by_split = builder.config.data_files or {}
    files = by_split.get(split, ())
    return [str(file) for file in files if Path(file).is_file()]


def rows(config: DataConfig, split: str, dataset: Any) -> Iterator[tuple[str, dict[str, Any]]]:  # noqa: ANN401
    """Yield each row of a dataset with its place, such as "org/name (train), row 3".

    Raises:
        DataError: a file is damaged, or the network failed for good.
    """
    kind = _library(config).exceptions.DatasetsError
    with _naming_dataset(config, "cannot be read any further", kind):
        # Errors of whoever takes the rows do not pass through here: a generator sees its own alone.
        for number, row in enumerate(dataset, start=1):
            place = f"{config.dataset} ({split}), row {number}"
            yield place, row.to_pylist()[0] if config.images else row


def _name(config: DataConfig) -> str:
    """Return a name on the hub, or a folder with its ~ unfolded."""
    return str(Path(config.dataset or "").expanduser())


def _library(config: DataConfig) -> Any:  # noqa: ANN401
    """Return the module `datasets`, or refuse with the command that installs it."""
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(
            f"data.dataset: {config.dataset} needs the library datasets: pip install 'megatier[datasets]'."
        ) from error


@contextmanager
def _opening(config: DataConfig) -> Iterator[Any]:
    """Give the library, whose errors mean that the dataset cannot be loaded."""
    datasets = _library(config)
    with _naming_dataset(config, "cannot be loaded", datasets.exceptions.DatasetsError):
        yield datasets


@contextmanager
def _naming_dataset(config: DataConfig, failure: str, kind: type[Exception]) -> Iterator[None]:
    """Turn errors into one with the dataset's name and a remedy."""
    try:
        yield
    except (kind, *BROKEN) as error:
        # The library's further lines are advice for its own callers.
        said = str(error).strip() or type(error).__name__
        reason = said.splitlines()[0].rstrip(".")
        remedy = "Check data.dataset, data.subset, data.split and data.revision."
        if isinstance(error, ConnectionError):
            remedy = (
                "Check the network, or download it elsewhere (hf download --repo-type dataset NAME --local-dir FOLDER) "
                "and name the folder."
            )
        raise DataError(f"data.dataset: {config.dataset} {failure}: {reason}. {remedy}") from error
