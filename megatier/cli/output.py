"""What commands write: files where their user says, and one JSON document for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatier.errors import ConfigError
from megatier.report.metrics import plain


def write_text(path: Path, text: str, option: str) -> None:
    """Write a file, in place of one that is there.

    Args:
        path: the file.
        text: what it will hold.
        option: what names another file, such as "--output FILE.json".

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}. Name another {option}.") from error


def json_text(document: Mapping[str, Any]) -> str:
    """A document as JSON, which has no NaN: that is text."""
    return json.dumps(plain(document), indent=2, allow_nan=False) + "\n"


def print_json(document: Mapping[str, Any]) -> None:
    """Print a document, which is then all of stdout."""
    print(json_text(document), end="")
