"""The run's records, `metrics.jsonl`, and figures as people read them."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Self

from megatier.errors import REMEDIES, ConfigError
from megatier.files import open_regular, read_regular, replace_file

OTHER_DIRECTORY = "Set output.directory to a directory of yours."
"""The remedy where a file of a run cannot be written, for errors that have none of their own."""


@contextmanager
def refusing(action: str) -> Iterator[None]:
    """Turn errors of the drive inside into one that says what to do, such as "cannot write FILE".

    Raises:
        ConfigError: the drive is full or gone, or a file cannot be written.
    """
    try:
        yield
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, OTHER_DIRECTORY)
        raise ConfigError(f"cannot {action}: {error.strerror}. {remedy}") from error


class MetricsLog:
    """A file of JSON objects, one a line. Each is on file when `write` returns, so a killed run keeps its record."""

    def __init__(self, path: Path) -> None:
        """Open the file, at its end.

        Raises:
            ConfigError: it cannot be written to.
        """
        self._path = path
        with refusing(f"write {path}"):
            self._file: IO[bytes] = _append_to(path)

            # A killed process may have left half a line, which must not swallow the next record.
            with os.fdopen(open_regular(path), "rb") as file:
                is_empty = file.seek(0, os.SEEK_END) == 0
                file.seek(0 if is_empty else -1, os.SEEK_END)
                if not is_empty and file.read() != b"\n":
                    self._file.write(b"\n")

    def write(self, record: Mapping[str, object]) -> None:
        """Append a record. NaN and infinities, which JSON lacks, become text: "nan", "inf", "-inf".

        Raises:
            ConfigError: the drive is full or gone. Nothing of the record is written.
        """
        # Made whole before it is written, and written at once: only a kill can leave half a line.
        line = json.dumps(plain(record), allow_nan=False)
        encoded = f"{line}\n".encode()
        with refusing(f"write {self._path}"):
            # A drive that fills up takes a part of a line without an error. What it took is dropped again, so that the
            # record may come once there is room.
            written = self._file.write(encoded)
            if written != len(encoded):
                self._file.truncate(self._file.seek(0, os.SEEK_END) - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def cut_after(self, step: int) -> tuple[list[int], int]:
        """Drop the records of later steps, which a run that is resumed from a checkpoint writes again.

        Lines that are no records are dropped too, because a run has to go on whatever its log went through.

        Returns:
            The numbers of the lines that were no records, and the last step of which there was one; `step` at least.

        Raises:
            ConfigError: the drive is full or gone.
        """
        with refusing(f"write {self._path}"):
            lines = read_regular(self._path).splitlines(keepends=True)
            kept = []
            not_records = []
            last_step = step
            for number, line in enumerate(lines, 1):
                # A line that is no record counts as later than any step, so it goes.
                step_of_line = _step_of(line)
                if step_of_line <= step:
                    kept.append(line)
                if not math.isfinite(step_of_line):
                    not_records.append(number)
                else:
                    last_step = max(last_step, int(step_of_line))

            # Whole or not at all, since a kill in here must not lose the records of the steps that stay.
            replace_file(self._path, b"".join(kept))

            # The file has another inode now.
            self._file.close()
            self._file = _append_to(self._path)

        return not_records, last_step

    def close(self) -> None:
        """Close the file. Closing twice is safe."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def format_seconds(seconds: float) -> str:
    """Return seconds as "35 ms", "4.20 s", "3 min 05 s" or "2 h 07 min"."""
    # The limits are those at which rounding would show the next larger unit, such as 1000 ms.
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.995:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def format_range(seconds: tuple[float, float]) -> str:
    """Return words that follow the seconds of a planned step: their range, if drives waver; else none."""
    low, high = (f"{value:.3g}" for value in seconds)

    # Compared as they are written: a range whose ends read the same says nothing.
    return f" ({low} to {high} as the drives waver)" if low != high else ""


def format_count(number: float) -> str:
    """Return a count as "950", "2.40M", "8.03B"."""
    for suffix, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number < scale:
            continue
        count = number / scale

        # Two decimals beside three digits would be more than anyone reads.
        return f"{count:.3g}{suffix}" if number >= 100 * scale else f"{count:.2f}{suffix}"
    return f"{number:.0f}"


def format_share(part: float, whole: float) -> str:
    """Return a part of a whole in percent, or "-" if the whole is 0."""
    # A step whose clock did not move has no shares.
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _append_to(path: Path) -> IO[bytes]:
    """Open a file to append to it, unbuffered."""
    # Each write is one call of the system, which survives the process.
    return os.fdopen(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab", buffering=0)


def _step_of(line: bytes) -> float:
    """Return the step of a record; infinite if the line is no record, such as half of one."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return math.inf


def plain(value: object) -> object:
    """Return the value as JSON can hold it, with NaN and infinities as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
