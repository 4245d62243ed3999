"""Reads LLaMA-Factory's `dataset_info.json`: the file of a dataset, and the keys of its records.

Whatever it leaves out has LLaMA-Factory's defaults. As there, `columns` and `tags`, if they are given, name everything
that the records have.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from megatier.data.conversation import ASSISTANT, Alpaca, Shape, Text, Turns
from megatier.errors import DataError
from megatier.foreign import SETTINGS_BYTES_MAX, read_json

# The words of LLaMA-Factory's file. What is not among them is refused by `_check`.
DATASET_KEYS = {"file_name", "formatting", "columns", "tags", "split"}
COLUMNS = {"prompt", "query", "response", "history", "messages", "system", "tools", "images"}
DEFAULT_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
DEFAULT_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "system_tag": "system",
}
# What a description does not name is not looked at: no key of a record is refused.
NOT_NAMED: tuple[str, ...] = ()
# Roles of chat templates by the tags under which the file has the dataset's own names for them.
ROLES = {"user_tag": "user", "assistant_tag": ASSISTANT, "observation_tag": "tool", "system_tag": "system"}


def describe(file: Path, name: str, *, images: bool = False) -> tuple[Path, Shape]:
    """Return the file of a dataset, and the shape of its records.

    Args:
        file: the description.
        name: the name of the dataset in it.
        images: whether images are read (`data.images`).

    Raises:
        DataError: there is no such file or name, or the dataset is not local or not for supervised training.
    """
    place = f"data.files: {file}#{name}"
    try:
        datasets = read_json(file, SETTINGS_BYTES_MAX, DataError)
    except FileNotFoundError as error:
        raise DataError(f"data.files: cannot read {file}: {error.strerror}.") from error

    dataset = datasets.get(name) if isinstance(datasets, dict) else None
    if not isinstance(dataset, dict):
        known = ", ".join(sorted(datasets)) if isinstance(datasets, dict) else "none"
        raise DataError(f"{place}: there is no such dataset. Names: {known}.")

    columns = dataset.get("columns", DEFAULT_COLUMNS)
    tags = dataset.get("tags", DEFAULT_TAGS)
    _check(place, dataset, columns, tags)

    # Names of files are relative to the folder of the description, as LLaMA-Factory has them.
    shape = _shape(place, dataset.get("formatting", "alpaca"), columns, tags)
    if "images" in columns and not images:
        raise DataError(f"{place}: its records have images. Set data.images to true to read them.")
    if images and not isinstance(shape, Text):
        # As in LLaMA-Factory, a dataset whose description names no column of images has none beside its turns.
        keys = (columns["images"],) if "images" in columns else ()
        shape = replace(shape, images=keys)
    return file.parent / dataset["file_name"], shape


def _check(place: str, dataset: dict[str, Any], columns: object, tags: object) -> None:
    """Refuse an entry that asks for something that is not done here."""
    if not isinstance(dataset.get("file_name"), str):
        raise DataError(f"{place} has no file_name. Only local files are read: download the dataset and name its file.")
    if not _holds_text(columns) or not _holds_text(tags):
        raise DataError(f"{place}: columns and tags must be objects of text.")

    # Passing over such a key would train on something else than LLaMA-Factory does.
    asked = {key for key, value in dataset.items() if value}
    unknown_keys = sorted(asked - DATASET_KEYS)
    unknown_columns = sorted(columns.keys() - COLUMNS)
    others = [*unknown_keys, *unknown_columns]
    if others:
        raise DataError(f"{place}: {', '.join(others)} cannot be used here. Remove it, or name another dataset.")


def _holds_text(value: object) -> TypeGuard[dict[Any, str]]:
    """Return whether this is an object whose values are all text."""
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


def _shape(place: str, formatting: object, columns: dict[str, str], tags: dict[str, str]) -> Text | Turns | Alpaca:
    """Return the shape of a dataset's records."""
    system = columns.get("system")
    if formatting == "alpaca":
        prompt = columns.get("prompt")
        response = columns.get("response")
        if prompt is None:
            raise DataError(f"{place}: columns has no prompt.")
        if response is None:  # a dataset for pre-training
            return Text(prompt)
        return Alpaca(
            prompt=prompt,
            query=columns.get("query"),
            response=response,
            system=system,
            history=columns.get("history"),
            media=NOT_NAMED,
        )

    missing = [key for key in ("role_tag", "content_tag", "user_tag", "assistant_tag") if key not in tags]
    if formatting != "sharegpt" or "messages" not in columns or missing:
        lack = f"tags has no {missing[0]}" if missing else f"formatting {formatting!r} without a messages column"
        raise DataError(f"{place}: {lack}. It must be alpaca, or sharegpt with messages and the tags of its turns.")
    roles = tuple((tag, ROLES[key]) for key, tag in tags.items() if key in ROLES)
    return Turns(
        turns=columns["messages"],
        role=tags["role_tag"],
        content=tags["content_tag"],
        roles=roles,
        system=system,
        tools=columns.get("tools"),
        media=NOT_NAMED,
    )
