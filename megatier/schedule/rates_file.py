"""Reads the rates of a machine from a file, and writes them as plain values. Pure, but for reading the file.

`megatier plan` and the scripts of `bench/` read a machine's file, and `megatier bench` writes one. Rates of a machine
that one does not have yet are written by hand. The file has the names of the fields of `Rates` and `DriveRates`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatier.config.values import parse_bytes, read_yaml
from megatier.errors import ConfigError
from megatier.schedule.drive_rates import DriveRates
from megatier.schedule.rates import RANK_RATES, Rates
from megatier.tier import Transport

RATE_FIELDS = {field.name for field in dataclasses.fields(Rates)}
MIXED_RANGE = ("mixed_low_bytes_per_s", "mixed_high_bytes_per_s")
OPTIONAL = {
    "fp8_flops_per_s",
    "gpu_bytes",
    "compute_capability",
    "unified_bytes",
    "locked_bytes",
    "ring_to_gpu_bytes_per_s",
    "ring_to_ram_bytes_per_s",
    "io_threads",
    "first_write_bytes_per_s",
    *MIXED_RANGE,
    *RANK_RATES,
}
DRIVE_FIELDS = {field.name for field in dataclasses.fields(DriveRates)}


def read_rates(path: Path) -> Rates:
    """Read rates from a YAML or JSON file, which may be the result of `megatier bench`.

    Figures may have byte units, such as "14GB".

    Raises:
        ConfigError: the file cannot be read, a name is missing or unknown, or a figure is not a positive number.
    """
    parsed = read_yaml(path)
    if not isinstance(parsed, dict):
        names = ", ".join(sorted(RATE_FIELDS))
        raise ConfigError(f"{path}: names and figures are expected: {names}.")

    # The result of `megatier bench` has the rates beside other figures.
    if isinstance(parsed.get("rates"), dict):
        parsed = parsed["rates"]

    # Drives are a list of their own, so they are taken out before all other names are checked.
    given = dict(parsed)
    listed = given.pop("drives", [])
    if not isinstance(listed, list) or not all(isinstance(drive, dict) for drive in listed):
        names = ", ".join(sorted(DRIVE_FIELDS))
        raise ConfigError(f"{path}: drives is a list of drives, each with {names}.")

    drives = []
    for drive in listed:
        figures = _figures(path, drive, DRIVE_FIELDS)
        drives.append(DriveRates(**figures))
    figures = _figures(path, given, RATE_FIELDS - {"drives"})
    return Rates(drives=tuple(drives), **figures)


def as_dict(rates: Rates) -> dict[str, Any]:
    """Return the rates as plain values for JSON or YAML, which `read_rates` reads back."""
    return dataclasses.asdict(rates) | {"drives": [dataclasses.asdict(drive) for drive in rates.drives]}


def _figures(path: Path, given: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """Return the values of these names. All but the optional ones have to be given."""
    # One error tells both, because a misspelt name is missing and unknown.
    missing = names - given.keys() - OPTIONAL
    unknown = given.keys() - names
    if missing or unknown:
        odd = [f"{name} is missing" for name in sorted(missing)]
        odd += [f"{name} is not known" for name in sorted(unknown, key=str)]
        faults = "; ".join(odd)
        raise ConfigError(f"{path}: {faults}.")

    figures = {}
    for name, value in given.items():
        figures[name] = _value(path, name, value)
    return figures


def _value(path: Path, name: str, value: Any) -> object:  # noqa: ANN401 - whatever the file has
    """Return the value of a name: text, a transport, or a positive number; None: it is optional and not known."""
    if name == "directory":
        if not isinstance(value, str):
            raise ConfigError(f"{path}: directory is {value!r}; text is expected.")
        return value

    if value is None and name in OPTIONAL:
        return None
    if name == "ranks_way":
        if value not in tuple(Transport):
            raise ConfigError(f"{path}: ranks_way is {value!r}; it is one of {', '.join(Transport)}.")
        return Transport(value)

    figure = _figure(value)

    # A number of threads has to be whole.
    if name == "io_threads" and figure is not None:
        figure = int(figure) if figure.is_integer() else None
    if figure is None:
        example = "8" if name == "io_threads" else '5.0e9 or "14GB"'
        raise ConfigError(f"{path}: {name} is {value!r}; a positive number is expected, such as {example}.")
    return figure


def _figure(value: object) -> float | None:
    """Return the value as a positive number; None if it is not one."""
    # Python counts a bool as an int.
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = parse_bytes(value) if isinstance(value, str) else value
        figure = float(number)
    except (ConfigError, OverflowError):
        return None

    return figure if 0 < figure < math.inf else None
