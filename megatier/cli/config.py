"""`megatier config show`: prints every setting of a run, and where it comes from."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatier.byte_counts import format_bytes
from megatier.cli.output import print_json
from megatier.config import file as config_file
from megatier.config import text as config_text
from megatier.config.schema import CONFIG_SECTIONS, RunConfig
from megatier.hardware import cores_usable, default_budgets, device_for, gpus
from megatier.measure.probe import cached_rates, io_threads

CONFIG_HEADER = """\
# All settings of the run. `default`: neither the file nor the command line gives it. `from this machine`: a run that
# begins now would take this value. If `megatier bench` has measured the machine, the planner of such a run chooses
# tiers.gpu and settings that are at their default. This file, given to a run, fixes every setting, so the planner
# chooses none: take out the lines that it should choose.
"""
GIVEN, MACHINE, DEFAULT = "given", "from this machine", "default"


def run(argv: Sequence[str]) -> int:
    """Print the settings; returns 0 when they are valid."""
    parser = argparse.ArgumentParser(
        prog="megatier config",
        usage="%(prog)s show [CONFIG.yaml] [--section.key VALUE ...]",
        description="Print all settings of a run as YAML. A comment marks those that are at their default, and those "
        "that this machine decides. The output can be given to `megatier train` as a config.",
        epilog="example: megatier config show run.yaml --tiers.ram 64GiB > all.yaml",
    )
    parser.add_argument("action", choices=("show",), metavar="show", help="print the settings (the only action)")
    parser.add_argument(
        "config",
        type=Path,
        nargs="?",
        metavar="CONFIG.yaml",
        help="config of the run; settings on the command line win",
    )
    parser.add_argument(
        "--json", action="store_true", help="print settings and where they come from as one JSON document"
    )

    # What the parser does not know is a setting, which the loader checks.
    options, overrides = parser.parse_known_args(argv)
    loaded, given = config_file.load_given(options.config, overrides)
    of_machine = _of_machine(loaded)

    sections = config_file.to_dict(loaded)
    for name, value in of_machine.items():
        section, _, key = name.partition(".")
        sections[section][key] = value
    names = [f"{name}.{key}" for name, section in CONFIG_SECTIONS.items() for key in section.__dataclass_fields__]
    if options.json:
        sources = {name: GIVEN if name in given else DEFAULT for name in names} | dict.fromkeys(of_machine, MACHINE)
        print_json({"settings": sections, "sources": sources})
        return 0

    # Budgets are plain numbers of bytes, so a remark says them in a unit that one can read.
    remarks = {name: DEFAULT for name in names if name not in given} | dict.fromkeys(of_machine, MACHINE)
    for name in of_machine.keys() & {"tiers.gpu", "tiers.ram"}:
        remarks[name] += f", {format_bytes(sections['tiers'][name.removeprefix('tiers.')])}"

    print(CONFIG_HEADER + config_text.write(sections, names, remarks), end="")
    return 0


def _of_machine(config: RunConfig) -> dict[str, object]:
    """Return the settings that the machine decides, by dotted name; less if the GPU of the config is missing."""
    tiers = config.tiers
    settings = dict[str, object]()

    device = device_for(tiers.device)
    if tiers.device == "auto":
        settings["tiers.device"] = device
    if config.model.compile is None:
        settings["model.compile"] = device == "cuda"
    # A config may ask for a GPU that is not in this machine, such as one that is written for another one.
    if device == "cuda" and not gpus():
        return settings

    budgets = default_budgets(device)
    if tiers.gpu is None:
        settings["tiers.gpu"] = budgets.gpu_bytes
    if tiers.ram is None:
        settings["tiers.ram"] = budgets.ram_bytes

    if tiers.io_threads is None and tiers.nvme:
        # Nothing is measured here, since that would write to the drives.
        rates = cached_rates([mount.directory for mount in tiers.mounts], device)
        settings["tiers.io_threads"], _ = io_threads(None, rates)
    if tiers.update_threads is None:
        settings["tiers.update_threads"] = cores_usable()
    return settings
