"""`megatier bench`: measures this machine's drives, links and processors, and keeps the rates for `megatier plan`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatier import hardware
from megatier.byte_counts import format_bytes
from megatier.cli.output import json_text, print_json, write_text
from megatier.config.values import MountBudget, parse_bytes, parse_mount
from megatier.errors import ConfigError
from megatier.report.console import say
from megatier.report.report import figure_table
from megatier.schedule.rates import Rates
from megatier.schedule.rates_file import as_dict

if TYPE_CHECKING:
    from megatier.measure.drive_probe import DriveFigures
    from megatier.measure.link_probe import LinkFigures
    from megatier.measure.rank_probe import RankFigures

THREADS_MAX = 1024
T = TypeVar("T")


def run(argv: Sequence[str]) -> int:
    """Measure, print and keep; returns 0, or 1 if a figure is not to be believed."""
    options = _parser().parse_args(argv)
    mounts = _mounts(options.nvme, _parse_option("--size", parse_bytes, options.size))
    sustained = _parse_option("--sustained", parse_bytes, options.sustained)
    threads = _parse_option("--threads", _threads, options.threads) if options.threads else default_threads()
    if not 0 < options.seconds < float("inf"):
        raise ConfigError(f"--seconds is {options.seconds:g}; give a number above 0.")
    # Measuring takes minutes, so whatever could fail after it is looked at before.
    for path in filter(None, (options.output, options.picture)):
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"cannot write {path}: its directory does not exist. Create it first.")

    # Imported here because it loads torch: wrong arguments are refused without waiting for that.
    from megatier.measure import rank_probe
    from megatier.ranks.channel import SingleRank
    from megatier.ranks.rendezvous import joined
    from megatier.setup.machine import choose_device

    device = choose_device(options.device, "--device").type
    with joined(device) as ranks:
        # A process alone is its own first rank, so that what follows has one way for both.
        all_ranks = ranks or SingleRank()
        console = Console(quiet=options.json or all_ranks.rank > 0)

        # The first rank measures the host, and keeps all figures. The others wait meanwhile.
        host = all_ranks.broadcast(lambda: _measure_host(options, mounts, sustained, threads, device, console))
        between = None
        if ranks is not None:
            with console.status("measuring links between ranks"):
                between = rank_probe.probe_ranks(ranks, device, seconds=options.seconds)
            _print_ranks(console, between)
        # If the first rank cannot write its files, all ranks end with its error, and torchrun sees no rank that went
        # well.
        return all_ranks.broadcast(lambda: _end(options, device, console, *host, between))


def _measure_host(
    options: argparse.Namespace,
    mounts: Sequence[MountBudget],
    sustained: int,
    threads: Sequence[int],
    device: str,
    console: Console,
) -> tuple[list[DriveFigures], LinkFigures]:
    """Measure what one process can, and print it."""
    from megatier.measure.drive_probe import check_mount, probe_drive
    from megatier.measure.link_probe import probe_links
    from megatier.measure.lock_probe import locked_limit

    locked = None
    if device == "cuda":
        with console.status("pinning RAM"):
            locked = locked_limit()

    # All mounts are checked before the first one is measured, which takes minutes.
    for mount in mounts:
        check_mount(mount)
    drives = []
    for mount in mounts:
        with console.status(escape(f"filling and measuring {mount.directory} ({format_bytes(mount.num_bytes or 0)})")):
            drive = probe_drive(
                mount,
                seconds=options.seconds,
                sustained_bytes=sustained,
                threads=max(threads),
                pin=device == "cuda" and locked is None,
            )
        _print_drive(console, drive)
        drives.append(drive)

    with console.status("measuring copies, AdamW and products"):
        links = probe_links(device, threads, seconds=options.seconds, locked_bytes=locked)
    _print_links(console, links)
    return drives, links


def _end(
    options: argparse.Namespace,
    device: str,
    console: Console,
    drives: Sequence[DriveFigures],
    links: LinkFigures,
    between: RankFigures | None,
) -> int:
    """Keep the rates, and write what was asked for; returns the exit code."""
    # Imported only here: the picture loads torch, for which a mistake in the command need not wait.
    from megatier.measure.probe import machine_facts, rates_of
    from megatier.report.probe_picture import draw

    rates = rates_of(drives, links)
    if between is not None:
        rates = between.added_to(rates)
    if rates.io_threads is not None:
        say(console, f"a run uses {rates.io_threads} I/O threads each way, unless tiers.io_threads says otherwise")
    if len(rates.drives) > len({drive.device for drive in drives}):
        say(console, "note: some mounts share a device, so a plan counts a share of its rates for each")

    # Figures that are not to be believed are printed, but no plan is made from them.
    believed = tuple(drive.rates for drive in drives if not drive.flags)
    rates_file = _keep(console, dataclasses.replace(rates, drives=believed), links)
    report = _report(machine_facts(device), rates, drives, links, between)
    _write(console, options, report, partial(draw, drives, links))
    if options.json:
        print_json(report | {"rates_file": None if rates_file is None else str(rates_file)})
    # A script that measures many machines need not read the tables to drop figures like these.
    return 1 if links.flags or any(drive.flags for drive in drives) else 0


def _write(console: Console, options: argparse.Namespace, report: dict[str, Any], draw: Callable[[str], str]) -> None:
    """Write the files that were asked for. `draw` makes a picture with a title."""
    if options.output is not None:
        write_text(options.output, json_text(report), "--output FILE.json")
        say(console, f"figures written to {options.output}")
    if options.picture is not None:
        facts = report["machine"]
        cores = f"{facts['cores']} cores"
        machine = ", ".join([facts["processor"], cores, *facts["gpus"]])

        # A picture is looked at elsewhere, so it says which machine was measured, and when.
        picture = draw(f"megatier bench, {datetime.now(UTC):%Y-%m-%d}: {machine}")
        write_text(options.picture, picture, "--picture FILE.svg")
        say(console, f"picture written to {options.picture}")


def default_threads(cores: int | None = None) -> list[int]:
    """Return 1, 2, 4, ... and all cores that this process may use."""
    cores = cores or hardware.cores_usable()
    # The last power is above the number of cores, and so becomes that number.
    return sorted({min(1 << power, cores) for power in range(cores.bit_length() + 1)})


def _parser() -> argparse.ArgumentParser:
    """Return the words that the command takes."""
    parser = argparse.ArgumentParser(
        prog="megatier bench",
        description="Measure how fast this machine is: drives (through the store's own files), copies between RAM and "
        "GPU, AdamW, and matrix products. The rates are kept for `megatier plan`.",
        epilog="example: megatier bench --nvme /mnt/a,/mnt/b --size 16GiB --output bench.json",
    )
    add = parser.add_argument
    add(
        "--nvme",
        action="append",
        default=[],
        metavar="DIR[:SIZE],...",
        help="drives to measure, and how much of each may be filled (default: no drive)",
    )
    add(
        "--size",
        default="8GiB",
        metavar="SIZE",
        help="size of the file on drives that are named without one; it is removed afterwards (default: %(default)s)",
    )
    add(
        "--seconds",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds of each measurement; mixed reads and writes take six times as long (default: %(default)g)",
    )
    add(
        "--threads",
        metavar="N,...",
        help="numbers of threads to try for AdamW on the CPU (default: 1, 2, 4, ... all cores)",
    )
    add(
        "--sustained",
        default="0",
        metavar="SIZE",
        help="also write this much to each drive without a pause, to fill its cache (default: nothing)",
    )
    add("--output", type=Path, metavar="FILE.json", help="also write all figures as JSON")
    add("--json", action="store_true", help="print all figures as one JSON document, and nothing else")
    add("--picture", type=Path, metavar="FILE.svg", help="also draw all figures")
    add(
        "--device",
        choices=["auto", "cuda", "cpu"],
        default="auto",
        help="device on which a run would compute (default: a GPU if there is one)",
    )
    return parser


def _parse_option(name: str, parse: Callable[[str], T], text: str) -> T:
    """Return the value of an option; an error names the option."""
    try:
        return parse(text)
    except ValueError as error:  # ConfigError is one
        raise ConfigError(f"{name} is {text!r}: {error}") from error


def _threads(text: str) -> list[int]:
    """Return numbers of threads from text such as 1,2,4."""
    counts = [int(word) for word in text.split(",")]
    if not all(1 <= count <= THREADS_MAX for count in counts):
        raise ConfigError(f"give numbers from 1 to {THREADS_MAX}.")
    return counts


def _mounts(texts: Sequence[str], num_bytes: int) -> list[MountBudget]:
    """Return the mounts that are named, each with a size: its own, or so many bytes."""
    given = [word for text in texts for word in text.split(",") if word]
    mounts: list[MountBudget] = []
    for word in given:
        mount = parse_mount(word, "--nvme")

        # Not all that is free, as for a run: the file is filled before it is read, which could take hours.
        if mount.num_bytes is None:
            mount = MountBudget(mount.directory, num_bytes)
        mounts.append(mount)

    # A plan adds drives up, so it would count this one twice.
    if len({os.path.realpath(mount.directory) for mount in mounts}) < len(mounts):
        raise ConfigError(f"--nvme names a directory twice: {', '.join(given)}. Name each drive once.")

    return mounts


# ---------------------------------------------------------------------- output


def _print_drive(console: Console, drive: DriveFigures) -> None:
    access = "O_DIRECT" if drive.is_direct else "page cache"
    title = (
        f"{drive.directory}: {drive.device}, {drive.file_system}, {access}, aligned to {drive.alignment_bytes:,} "
        f"bytes, blocks of {format_bytes(drive.block_bytes)}"
    )
    table = figure_table(escape(title), "", "rate", "p50 a block", "p99 a block")
    for name, flow in drive.flows.items():
        table.add_row(name, _rate(flow.bytes_per_s), f"{flow.p50_ms:.1f} ms", f"{flow.p99_ms:.1f} ms")
    if windows := drive.mixed.windows:
        table.add_row("mixed, as it wavers", _range(windows), "", "")
    if drive.first_write_bytes_per_s is not None:
        table.add_row("first write", _rate(drive.first_write_bytes_per_s), "", "")
    if steps := drive.sustained_bytes_per_s:
        table.add_row("sustained write", _range(steps), "", "")
        knee = "no knee" if drive.knee_bytes is None else f"after {format_bytes(drive.knee_bytes)}"
        table.add_row("write cache ends", knee, "", "")
    if drive.io_threads is not None:
        trials = []
        for count, (mixed, write) in drive.trials.items():
            trials.append(f"{count}: {_rate(mixed)} mixed, {_rate(write)} write")
        tried = f" (short trials: {'; '.join(trials)})" if trials else ""
        table.caption = f"with {drive.io_threads} I/O threads each way{tried}"
    _print(console, table, drive.notes, drive.flags)


def _print_links(console: Console, links: LinkFigures) -> None:
    table = Table("links and processors", "alone", "all at once", title_justify="left")
    for name, alone, both in links.copy_rates:
        table.add_row(escape(name), _rate(alone), _rate(both))
    table.add_section()
    for update in links.updates:
        plural = "s" if update.threads > 1 else ""
        by_itself = _parameters(update.parameters_per_s)
        beside_others = _parameters(update.shared_parameters_per_s)
        table.add_row(f"AdamW, {update.threads} thread{plural}", by_itself, beside_others)

        # In bytes as well, since the threads of AdamW and copies share what RAM carries.
        table.add_row("  of RAM", _rate(update.memory_bytes_per_s), _rate(update.shared_memory_bytes_per_s))
    table.add_section()

    dtype = "fp32"
    if links.device == "cuda":
        dtype = "bf16"
        table.add_row("AdamW on the GPU", _parameters(links.gpu_update_parameters_per_s), "")
    table.add_row(f"{dtype} product", f"{links.matmul_flops_per_s / 1e9:,.0f} GFLOP/s", "")
    if links.fp8_matmul_flops_per_s is not None:
        table.add_row("fp8 product", f"{links.fp8_matmul_flops_per_s / 1e9:,.0f} GFLOP/s", "")
    if links.locked_bytes is not None:
        table.add_row("RAM that can be pinned", format_bytes(links.locked_bytes), "")
    _print(console, table, links.notes, links.flags)


def _print_ranks(console: Console, between: RankFigures) -> None:
    hosts = f" on {between.hosts} hosts" if between.hosts > 1 else ""
    title = f"links between {between.ranks} ranks{hosts}"
    table = Table(title, "a rank receives", title_justify="left")

    # A rank has its own shard already, so only those of the others move.
    moved = between.layer_bytes * (between.ranks - 1) / between.ranks
    gathered = moved / between.gather_seconds
    scattered = moved / between.scatter_seconds
    table.add_row("gather", _rate(gathered))
    table.add_row("scatter", _rate(scattered))
    table.add_row("compute loses, of their time", f"{between.slowdown:.0%}")
    why = f" ({escape(between.why)})" if between.why else ""
    table.caption = f"by {between.way}{why}"
    console.print(table)


def _print(console: Console, table: Table, notes: Sequence[str], flags: Sequence[str]) -> None:
    console.print(table)
    for note in notes:
        console.print(f"[yellow]note[/] {escape(note)}", highlight=False, soft_wrap=True)
    for flag in flags:
        console.print(f"[red]not to be believed[/] {escape(flag)}", highlight=False, soft_wrap=True)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def _range(bytes_per_s: Sequence[float]) -> str:
    return f"{_rate(min(bytes_per_s))} to {_rate(max(bytes_per_s))}"


def _parameters(per_s: float) -> str:
    return f"{per_s / 1e9:.2f} Gparam/s"


def _keep(console: Console, rates: Rates, links: LinkFigures) -> Path | None:
    """Keep rates that may be believed; returns their file, or None if they are not kept."""
    from megatier.measure.probe import cache_rates

    # A plan takes links and drives together, so drives alone are not kept either.
    if links.flags:
        say(console, "rates not kept for `megatier plan`: some are not to be believed, as said above")
        return None

    # No error of the command: the figures are printed all the same.
    try:
        path = cache_rates(rates, links.device)
    except OSError as error:
        say(console, f"rates not kept for `megatier plan`: {error}; set XDG_CACHE_HOME to a directory of yours")
        return None
    say(console, f"rates kept for `megatier plan` in {path}")
    return path


def _report(
    facts: dict[str, Any],
    rates: Rates,
    drives: Sequence[DriveFigures],
    links: LinkFigures,
    between: RankFigures | None,
) -> dict[str, Any]:
    """Return all that was measured, and on which machine."""
    # What figures of two days may differ by, besides the machine itself.
    machine = {
        **facts,
        "ram_available_bytes": hardware.ram_available_bytes(),
        "huge_pages": hardware.transparent_huge_pages(),
        "kernel": platform.release(),
        "megatier": _version("megatier"),
        "torch": _version("torch"),
        "python": platform.python_version(),
    }
    return {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "rates": as_dict(rates),
        "drives": [
            dataclasses.asdict(drive)
            | {"bytes_per_s": {name: getattr(drive, name).bytes_per_s for name in ("read", "write", "mixed")}}
            for drive in drives
        ],
        "links": dataclasses.asdict(links),
        "ranks": None if between is None else dataclasses.asdict(between),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        # megatier runs from its source, where no package has metadata.
        return "not installed"
