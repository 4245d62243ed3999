"""How settings are written for people: YAML with a remark behind a setting, which `config_file.load` reads again."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Collection, Iterator, Mapping
from typing import Any, get_args, get_type_hints

import yaml
from jsonargparse import get_loader

from megatier.config import SECTIONS
from megatier.config_values import ByteCount, parse_yaml

INDENT = "  "


def write(sections: Mapping[str, Mapping[str, Any]], names: Collection[str], remarks: Mapping[str, str]) -> str:
    """Some settings as YAML, in the order of the sections' fields.

    Args:
        sections: values, as `config_file.to_dict` gives them.
        names: dotted names of those to write.
        remarks: comments by dotted name.
    """
    lines: list[str] = []
    for name, section in SECTIONS.items():
        keys = [key for key in section.__dataclass_fields__ if f"{name}.{key}" in names]
        if not keys:
            continue
        lines.append(f"{name}:")
        for key in keys:
            first, *rest = _lines(section, key, sections[name][key])
            remark = remarks.get(f"{name}.{key}")
            lines += [f"{first}  # {remark}" if remark else first, *rest]
    return "\n".join(lines or ["{}"]) + "\n"


def _lines(section: type[Any], key: str, value: object) -> Iterator[str]:
    if isinstance(value, int) and ByteCount in get_args(get_type_hints(section, include_extras=True)[key]):
        value = exact_size(value)
    text = yaml.safe_dump(
        {key: value},
        sort_keys=False,
        allow_unicode=True,
        width=math.inf,
        default_flow_style=None if isinstance(value, list) else False,
    )
    if parse_yaml(text, get_loader("yaml")) != {key: value}:  # it reads 2e-5 as a number, YAML's writer as text
        text = f"{key}: {json.dumps(value)}"
    yield from textwrap.indent(text, INDENT).splitlines()


def exact_size(num_bytes: int) -> int | str:
    """Bytes with the largest unit of which they are a multiple."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes and num_bytes % scale == 0:
            return f"{num_bytes // scale}{unit}"
    return num_bytes
