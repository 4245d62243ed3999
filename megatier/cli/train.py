"""`megatier train`: trains a model as a config and overrides say."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from megatier.checkpoint.run_directory import check_is_free
from megatier.config import file as config_file
from megatier.config import schema
from megatier.config.section import settings_of
from megatier.errors import ConfigError
from megatier.report.console import announce, run_console
from megatier.session.paths import check_paths

HELP = """\
usage: megatier train [CONFIG.yaml] [--section.key VALUE ...]

Train a model as CONFIG.yaml says. Each setting below is a key of a section in this file. On the command line it is an
option, which wins over the file. Behind a setting stand what it takes and, in parentheses, its default:

  SIZE  a number with its unit, such as 96GiB or 500MB; without a unit it counts bytes
  LIST  values with commas between them, or a YAML list in the file
  KEYS  a section of its own in the file, or --section.key.KEY VALUE on the command line
  null  the setting is not set

A setting that changes the order of sums may change the last bits of the results. Other choices of memory and speed
change nothing in them. `megatier config show run.yaml` prints all settings of a run, `megatier plan run.yaml` says
whether it fits, and docs/guide.md explains the settings by their use.

  --help   show this text
  --debug  show the traceback of an error

examples:
  megatier train examples/quickstart.yaml
  megatier train run.yaml --tiers.ram 96GiB --tiers.nvme /mnt/a:500GiB,/mnt/b:500GiB --train.steps 100
  megatier train run.yaml --model.config.num_hidden_layers 12
"""


def run(argv: Sequence[str]) -> int:
    """Train; returns 0 when the run is complete."""
    if "-h" in argv or "--help" in argv:
        print(HELP, *settings(), sep="\n")
        return 0

    if not argv:
        raise ConfigError(
            "megatier train needs a config, such as `megatier train examples/quickstart.yaml`. `megatier init` writes "
            "one for your model and data, and `megatier train --help` lists all settings."
        )
    # The file may be left out, if the command line has all that a run needs.
    path = Path(argv[0]) if not argv[0].startswith("-") else None
    arguments = argv[1:] if path else argv
    loaded, given = config_file.load_given(path, arguments)
    console = run_console()
    announce(console, f"{loaded.output.directory}: loading PyTorch and transformers")
    check_paths(loaded, partial(announce, console))

    # A run that torchrun starts again finds itself there.
    if "RANK" not in os.environ:
        check_is_free(Path(loaded.output.directory))

    # Imported here because it loads torch: what is wrong so far is refused without waiting for that.
    from megatier.train.trainer import train

    train(loaded, console, given)
    return 0


def settings() -> Iterator[str]:
    """Yield the lines of the help about every setting: what it takes, its default, and what it means."""
    for name, section in schema.CONFIG_SECTIONS.items():
        yield f"{name}: {section.__doc__.splitlines()[0]}"
        for each in settings_of(section):
            yield f"  --{each.name}  {each.takes}  ({each.default})"
            yield textwrap.fill(each.doc, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)

        yield ""
