"""`megatier train`: a config, overrides, a run."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from megatier.config import file as config_file
from megatier.config import schema
from megatier.config import values as config_values
from megatier.errors import ConfigError
from megatier.train.outlet import run_console

HELP = """\
usage: megatier train [CONFIG.yaml] [--section.key VALUE ...]

Train a model as CONFIG.yaml says. Every setting below can stand in the file, as a key of its section, or on the command
line, which wins. In parentheses stands what it is by default; null means not set. A SIZE is written 96GiB, 500MB or as
plain bytes, a LIST with commas (in the file also as a list). `megatier config show` prints all settings of a run.

  --help   show this text
  --debug  show the traceback of an error

examples:
  megatier train examples/quickstart.yaml
  megatier train run.yaml --tiers.ram 96GiB --tiers.nvme /mnt/a:500GiB,/mnt/b:500GiB --train.steps 100
  megatier train run.yaml --model.config.num_hidden_layers 12
"""

KINDS: dict[Any, str] = {bool: "true | false", int: "N", float: "X", str: "TEXT", tuple: "LIST", dict: "KEYS"}


def run(argv: Sequence[str]) -> int:
    """Train; 0 when the run is whole."""
    if "-h" in argv or "--help" in argv:
        print(HELP, *settings(), sep="\n")
        return 0
    if not argv:
        raise ConfigError("give a config: `megatier train run.yaml`. `megatier train --help` lists all settings.")
    path = Path(argv[0]) if argv and not argv[0].startswith("-") else None
    words = argv[1:] if path else argv
    loaded = config_file.load(path, words)
    from megatier.train.trainer import train  # loads torch: only once the config is known to be right

    train(loaded, run_console(), config_file.given(path, words))
    return 0


def settings() -> Iterator[str]:
    """The help's lines about every setting: what it takes, by default and at most, and what it means."""
    for name, section in schema.SECTIONS.items():
        yield f"{name}: {section.__doc__}"
        docs, hints = config_file.field_docs(section), get_type_hints(section, include_extras=True)
        for field in dataclasses.fields(section):
            default = (",".join(field.default) or "none") if isinstance(field.default, tuple) else field.default
            said = "null" if default is None else str(default).lower()
            yield f"  --{name}.{field.name}  {_kind(hints[field.name])}  ({said})"
            yield textwrap.fill(docs[field.name], 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
        yield ""


def _kind(hint: Any) -> str:  # noqa: ANN401  type hints have no common type
    """What a setting takes."""
    if get_origin(hint) is Literal:
        return " | ".join(get_args(hint))
    if hint == config_values.ByteCount:
        return "SIZE"
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(_kind(part) for part in get_args(hint) if part is not NoneType)
    return KINDS[get_origin(hint) or hint]
