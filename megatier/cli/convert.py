"""`megatier convert`: makes a config of megatier from a config of another trainer."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatier.cli.output import add_config_output, sections_of, write_config
from megatier.config import file as config_file
from megatier.config import text as config_text
from megatier.convert.conversion import Conversion, Finding, KeyOutcome
from megatier.convert.source import convert
from megatier.errors import ConfigError
from megatier.foreign import printable

TITLES: Mapping[KeyOutcome, str] = {
    "carried": "carried over",
    "default": "left at megatier's default",
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
        usage="%(prog)s [options] FILE --output CONFIG.yaml [--key VALUE ...]",
        description="Write a config of megatier from the YAML of LLaMA-Factory, Axolotl, accelerate or MegaTrain, or "
        "from DeepSpeed's JSON. The content of the file shows whose it is. Comments at the end of the config say of "
        "every key what it became, or why it was left out; those by which the run's numbers may differ are printed as "
        "well.",
        epilog="example: megatier convert ds.json --output run.yaml --model.path my/model --data.files my/texts",
    )
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="config of one of them; settings on the command line win"
    )
    add_config_output(parser)

    # What the parser does not know are settings, which the sections of the config take or refuse.
    options, overrides = parser.parse_known_args(argv)
    # With --overwrite the only copy of what was converted would be gone.
    exist = options.output.exists() and options.file.exists()
    if options.overwrite and exist and options.output.samefile(options.file):
        raise ConfigError(f"{options.output} is the file that is converted. Name another --output CONFIG.yaml.")
    conversion = convert(options.file)
    sections, names, needed = _check_settings(conversion, overrides)

    # The name comes from outside, and a line break in it would end the comment.
    head = [f"From {conversion.trainer}'s {printable(options.file.name)}, by `megatier convert`."]
    if needed:
        head.append(f"Still needed: {', '.join(needed)}")
    text = _comments(head) + config_text.write(sections, names, {}) + "\n" + _comments(_account(conversion.findings))
    write_config(options.output, text, overwrites=options.overwrite)

    print(*_summary(conversion, options.output), sep="\n")
    if needed:
        print(f"still needed, in the file or on the command line: {', '.join(needed)}")
    # Other trainers count epochs, so a number of steps that nobody gave would hardly be what is wanted.
    if names.isdisjoint({"train.steps", "train.epochs"}):
        print(f"train.steps is at its default, {sections['train']['steps']:,}: set it, or train.epochs")
    print(f"next, `megatier plan {options.output}` says whether it fits")
    return 0


def _check_settings(
    conversion: Conversion, overrides: Sequence[str]
) -> tuple[Mapping[str, Mapping[str, Any]], frozenset[str], Sequence[str]]:
    """Check the settings that were made, with overrides laid over them.

    Returns:
        All settings, the dotted names of those that somebody gave, and of those that are still needed.
    """
    # Without a stand-in, a setting that is still needed would keep all others from being checked.
    names = config_file.list_given(sections_of(conversion.settings), overrides)
    needed = [name for name, (other, _) in NEEDED.items() if names.isdisjoint({name, other})]
    tree = sections_of({**conversion.settings, **{name: NEEDED[name][1] for name in needed}})
    try:
        return config_file.to_dict(config_file.from_dict(tree, overrides)), names, needed
    except ConfigError as error:
        raise ConfigError(
            f"{conversion.source} as a config of megatier: {error} Settings on the command line may change that."
        ) from error


def _summary(conversion: Conversion, output: Path) -> Iterator[str]:
    """Yield a summary: the file that was converted, and the keys that a user should look at."""
    counts = Counter(finding.outcome for finding in conversion.findings)
    said = ", ".join(f"{counts[outcome]} {title}" for outcome, title in TITLES.items() if counts[outcome])
    yield f"{output} is written, from {conversion.trainer}'s {conversion.source}. Keys: {said or 'none'}."

    # A file of another trainer has dozens of keys, of which these alone ask for a decision.
    differing = [finding for finding in conversion.findings if finding.differs]
    if differing:
        yield f"By these the numbers may differ from those of a run of {conversion.trainer}:"
    for finding in differing:
        yield f"  {finding}"

    num_others = len(conversion.findings) - len(differing)
    if num_others:
        stand = "other stands" if num_others == 1 else "others stand"
        yield f"{num_others} {stand} in the file, as comments at its end."


def _account(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the fate of every key."""
    for outcome, title in TITLES.items():
        lines = [f"  {finding}" for finding in findings if finding.outcome == outcome]
        if lines:
            yield f"{title.capitalize()}:"
            yield from lines


def _comments(lines: Iterable[str]) -> str:
    return "".join(f"# {line}\n" for line in lines)
