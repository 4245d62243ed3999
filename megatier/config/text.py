"""Writes settings for people: YAML with remarks after settings, which `config.file.load` reads again."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import yaml

from megatier.byte_counts import UNITS
from megatier.config.schema import CONFIG_SECTIONS
from megatier.config.section import hints, types_of
from megatier.config.values import ByteCount

INDENT = "  "


class _Dumper(yaml.SafeDumper):
    """Writes lists on one line, and quotes text that `config.file` would take for something else."""

    def list_node(self, values: list[object]) -> yaml.Node:
        return self.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=True)

    def text_node(self, text: str) -> yaml.Node:
        """Return the node of a text.

        The reader takes 2e-5 for a number, but PyYAML for text. Characters that cannot be printed come back only if
        they are quoted.
        """
        is_like_a_number = re.fullmatch(r"[-+.]?[\d_][-+.\d_:eE]*", text)
        style = '"' if is_like_a_number or not text.isprintable() else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(list, _Dumper.list_node)
_Dumper.add_representer(str, _Dumper.text_node)


def dump(tree: Mapping[str, Any]) -> str:
    """Return YAML that `config.file` reads as the same lists, dicts, numbers and text."""
    # Lines are never folded: a folded text of several lines would be hard to edit by hand.
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf)


def write(sections: Mapping[str, Mapping[str, Any]], names: Collection[str], remarks: Mapping[str, str]) -> str:
    """Return some settings as YAML, in the order of the sections' fields.

    Args:
        sections: values, as `config.file.to_dict` gives them.
        names: dotted names of those to write.
        remarks: comments by dotted name.
    """
    lines: list[str] = []

    for name, section in CONFIG_SECTIONS.items():
        keys = [key for key in hints(section) if f"{name}.{key}" in names]
        if not keys:
            continue

        lines.append(f"{name}:")
        for key in keys:
            # A mapping takes several lines, of which the first one has the remark.
            first, *rest = _lines(section, key, sections[name][key])
            remark = remarks.get(f"{name}.{key}")
            if remark:
                first = f"{first}  # {remark}"
            lines += [first, *rest]

    # An empty document would be null, and not a mapping.
    return "\n".join(lines or ["{}"]) + "\n"


def _lines(section: type[Any], key: str, value: object) -> Iterator[str]:
    if isinstance(value, int) and _is_size(section, key):
        value = exact_size(value)
    text = dump({key: value})
    indented = textwrap.indent(text, INDENT)
    yield from indented.splitlines()


def _is_size(section: Any, key: str) -> bool:  # noqa: ANN401
    """Return whether a setting is a number of bytes."""
    return ByteCount in types_of(hints(section)[key])


def format_options(settings: Mapping[str, Any]) -> str:
    """Return settings by dotted name as options of the command line, with units."""
    options = []
    for dotted, value in settings.items():
        name, _, key = dotted.partition(".")
        section = CONFIG_SECTIONS[name]
        written = value
        if value is None or isinstance(value, bool):
            # As YAML has them, which is what the command line reads.
            written = json.dumps(value)
        elif _is_size(section, key):
            written = exact_size(value)
        options.append(f"--{dotted} {written}")
    return " ".join(options)


def exact_size(num_bytes: int) -> int | str:
    """Return bytes as text with the largest unit of which they are a multiple; as a plain number if there is none."""
    # 0 is a multiple of every unit, and needs none.
    for unit, scale in UNITS:
        if num_bytes and num_bytes % scale == 0:
            return f"{num_bytes // scale}{unit}"
    return num_bytes
