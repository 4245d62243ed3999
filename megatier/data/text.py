"""Documents out of files, folders, globs and JSONL, one at a time, in an order that does not depend on the machine.

A text file is one document; a JSONL file holds one a line. Bytes that are no UTF-8 become U+FFFD.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from megatier.config import PYTHON_STDLIB, DataConfig
from megatier.errors import DataError

STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Folders of the standard library's tree that are not its own source."""


def documents(config: DataConfig) -> Iterator[str]:
    """The dataset's documents in order, cut off after `data.max_bytes` of UTF-8. Empty documents are left out.

    Raises:
        DataError: a path is missing or unreadable, a JSON line is malformed, or there is no text at all.
    """
    left, found = config.max_bytes, False
    for path in find_files(config):
        for text in _read(path, config):
            if left is not None:
                # A character that does not fit whole is dropped.
                encoded = text.encode("utf-8")
                text = encoded[:left].decode("utf-8", errors="ignore")
                left -= min(len(encoded), left)
            if text:
                found = True
                yield text
            if left == 0:
                return
    if not found:
        raise DataError(f"no text in {', '.join(config.files)}. Check data.files, data.suffixes and data.text_field.")


def find_files(config: DataConfig) -> list[Path]:
    """Files of the dataset: entries in the order given, the files of each sorted by path, none twice.

    Raises:
        DataError: an entry matches nothing.
    """
    return list(dict.fromkeys(path for entry in config.files for path in _expand(entry, config.suffixes)))


def _expand(entry: str, suffixes: tuple[str, ...]) -> list[Path]:
    """Files that one entry of `data.files` stands for."""
    path = Path(entry).expanduser()
    try:
        if entry == PYTHON_STDLIB:
            found = list(_stdlib_files())
        elif path.is_dir():
            found = [file for file in path.rglob("*") if file.suffix.lower() in suffixes and file.is_file()]
        elif path.exists():
            found = [path]
        else:
            found = [file for file in Path(path.anchor).glob(str(path.relative_to(path.anchor))) if file.is_file()]
    except OSError as error:
        raise DataError(f"data.files: cannot read {entry}: {error.strerror}.") from error
    if not found:
        what = f"holds no file in {' '.join(suffixes)}" if path.is_dir() else "matches no file or folder"
        raise DataError(f"data.files: {entry} {what}.")
    return sorted(found, key=lambda file: file.as_posix())


def _stdlib_files() -> Iterator[Path]:
    """The standard library's own source files; folders that are skipped, some of them huge, are not walked."""
    for folder, subfolders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        subfolders[:] = [name for name in subfolders if name not in STDLIB_SKIPPED]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _read(path: Path, config: DataConfig) -> Iterator[str]:
    """Documents of one file."""
    is_jsonl = config.format == "jsonl" or (config.format == "auto" and path.suffix.lower() == ".jsonl")
    try:
        if is_jsonl:
            yield from _read_jsonl(path, config.text_field)
        else:
            yield path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}.") from error


def _read_jsonl(path: Path, text_field: str) -> Iterator[str]:
    """Texts of a JSONL file; blank lines are skipped."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: no valid JSON: {error.msg} at column {error.colno}."
                ) from error
            text = record.get(text_field) if isinstance(record, dict) else None
            if not isinstance(text, str):
                raise DataError(f"{path}, line {number}: no text under {text_field!r}. Set data.text_field to its key.")
            # JSON can spell half a surrogate pair, which UTF-8 has no bytes for.
            yield text.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace")
