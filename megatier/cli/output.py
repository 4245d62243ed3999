"""Files that commands write where their user says."""

from __future__ import annotations

from pathlib import Path

from megatier.errors import ConfigError


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
