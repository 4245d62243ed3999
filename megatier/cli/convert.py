"""`megatier convert`: makes a config of megatier from a config of another trainer."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatier.cli.output import write_new
from megatier.config import file as config_file
from megatier.config import text as config_text
from megatier.convert.conversion import Conversion, Finding
from megatier.convert.source import convert
from megatier.errors import ConfigError

TITLES = {
    "carried": "carried over",
    "default": "not set there, so at megatier's default",
    "left": "not carried over",
}
NEEDED: Mapping[str, tuple[str, object]] = {
    "model.path": ("model.config", "model"),
    "data.files": ("data.dataset", ["text"]),
}
"""Settings that every run needs and DeepSpeed's files never have. Each comes with the setting that may replace it, and
with a value that stands in for it while the rest is checked."""


def run(argv: Sequence[str]) -> int:
    """Write the config and say what became of each key; returns 0 when the file is written."""
    parser = argparse.ArgumentParser(
        prog="megatier convert",
        usage="%(prog)s FILE --output CONFIG.yaml [--section.key VALUE ...]",
        description="Write a config of megatier from the YAML of LLaMA-Factory or MegaTrain, or from DeepSpeed's JSON, "
        "and say of every key what it became, or why it was left out. The content of the file shows whose it is.",
        epilog="example: megatier convert ds.json --output run.yaml --model.path my/model --data.files my/texts",
    )
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="config of one of them; settings on the command line win"
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="CONFIG.yaml", help="the file to write; it must not exist yet"
    )

    options, overrides = parser.parse_known_args(argv)
    made = convert(options.file)
    sections, names, needed = _checked(made, overrides)

    head = f"# From {made.trainer}'s {options.file.name}, by `megatier convert`.\n"
    if needed:
        head += f"# Still needed: {', '.join(needed)}\n"
    write_new(options.output, head + config_text.write(sections, names, {}))

    print(*_report(made.findings), sep="\n")
    if needed:
        print(f"still needed, in the file or on the command line: {', '.join(needed)}")
    print(
        f"{options.output} is written; `megatier config show {options.output}` also shows the settings at their default"
    )
    return 0


def _checked(
    made: Conversion, overrides: Sequence[str]
) -> tuple[Mapping[str, Mapping[str, Any]], frozenset[str], Sequence[str]]:
    """Check the settings that were made, with overrides laid over them.

    Returns:
        All settings, the dotted names of those that somebody gave, and of those that are still needed.
    """
    tree: dict[str, dict[str, Any]] = {}
    for name, value in made.settings.items():
        section, _, key = name.partition(".")
        tree.setdefault(section, {})[key] = value

    # Without a stand-in, a setting that is still needed would keep all others from being checked.
    names = config_file.given_in(tree, overrides)
    needed = [name for name, (other, _) in NEEDED.items() if names.isdisjoint({name, other})]
    for name in needed:
        section, _, key = name.partition(".")
        tree.setdefault(section, {})[key] = NEEDED[name][1]

    try:
        return config_file.to_dict(config_file.from_dict(tree, overrides)), names, needed
    except ConfigError as error:
        raise ConfigError(
            f"{made.source} as a config of megatier: {error} Settings on the command line may change that."
        ) from error


def _report(findings: Sequence[Finding]) -> Iterator[str]:
    for outcome, title in TITLES.items():
        if lines := [f"  {finding}" for finding in findings if finding.outcome == outcome]:
            yield f"{title}:"
            yield from lines
