"""Output of commands: files that their user names, and one JSON document for programs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatier.errors import ConfigError
from megatier.report.metrics import plain


def write_text(path: Path, text: str, option: str) -> None:
    """Write a file. One that exists is replaced.

    Args:
        path: the file.
        text: its text.
        option: the option that names it, such as "--output FILE.json".

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}. Name another {option}.") from error


def sections_of(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return settings, which are given by dotted name, by section and key."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    return sections


def add_config_output(parser: argparse.ArgumentParser) -> None:
    """Add the options `--output` and `--overwrite` of a command that makes a config, which `write_config` takes."""
    parser.add_argument(
        "--output", type=Path, required=True, metavar="CONFIG.yaml", help="the file to write; it must not exist yet"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")


def write_config(path: Path, text: str, *, overwrites: bool) -> None:
    """Write a config that a command has made.

    Args:
        path: the file.
        text: its text.
        overwrites: whether a file of this name is replaced.

    Raises:
        ConfigError: there is a file of this name that is to stay, or it cannot be written.
    """
    # Opened only if it is new, rather than looked for first: another command may write it meanwhile.
    mode = "w" if overwrites else "x"
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists already. Add --overwrite to replace it, or name another --output CONFIG.yaml."
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}. Name another --output CONFIG.yaml.") from error


def json_text(document: Mapping[str, Any]) -> str:
    """Return a document as JSON. JSON has no NaN, so a NaN is written as text."""
    # `plain` has written NaN as text by now. If one is left, an error is better than a file that parsers refuse.
    return json.dumps(plain(document), indent=2, allow_nan=False) + "\n"


def print_json(document: Mapping[str, Any]) -> None:
    """Print a document. The command then prints nothing else to stdout."""
    print(json_text(document), end="")
