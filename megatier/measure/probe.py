"""The cache of rates that `megatier bench` has measured on this machine, from which plans are made.

It is the file `megatier/rates.json` in $XDG_CACHE_HOME or ~/.cache, with an entry for each machine. An entry is used
only if its facts match the machine: host name, machine id, processor, cores and GPUs. A drive in it is used only if the
directory is on the file system that was measured: the same mount point, type, size, device number and id.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import secrets
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatier import hardware
from megatier.measure.data_sheets import PCIE_4, DataSheet, data_sheet_of
from megatier.schedule.drive_rates import DriveRates
from megatier.schedule.rates import RANK_RATES, UPDATE_BYTES, Rates
from megatier.tier import Transport

if TYPE_CHECKING:
    from megatier.measure.drive_probe import DriveFigures
    from megatier.measure.link_probe import LinkFigures

IO_THREADS = 4
"""The native threads in each direction if nothing was measured."""
IO_THREADS_MAX = 256
"""The most native threads in each direction for all drives together."""

ASSUMED_DRIVE_BYTES_PER_S = 2e9
"""The rate at which a drive that was not measured is taken to read, to write, or to do both together."""
ASSUMED_CORES = 16
"""So many cores are taken to be enough for all that RAM carries."""
ASSUMED_MEMORY_BYTES_PER_S = 8e9
"""The rate that RAM is taken to carry for each core."""
ASSUMED_CORE_FLOPS_PER_S = 50e9
"""The FLOP/s that a core of a processor is taken to compute."""
UNKNOWN_GPU = DataSheet("", 330e12, 1.7e12, PCIE_4)
"""What is taken for a GPU without a data sheet here."""
OF_GPU = {"gpu_bytes", "compute_capability", "unified_bytes"}
"""The names of what is no rate, but known of a GPU."""


def rates_of(drives: Iterable[DriveFigures], links: LinkFigures) -> Rates:
    """Return the rates that a plan needs: those of the first GPU, and of AdamW with the most threads.

    Mounts on one file system get equal shares of its rates, because a plan adds them up.
    """
    copies = links.copies[0]
    update = links.updates[-1]
    rates = [drive.rates for drive in drives]
    gpus = hardware.gpus()
    return Rates(
        drives=_share_drives(rates, [mount_facts(Path(drive.directory)) for drive in rates]),
        to_gpu_bytes_per_s=copies.to_gpu_bytes_per_s,
        to_ram_bytes_per_s=copies.to_ram_bytes_per_s,
        update_parameters_per_s=update.parameters_per_s,
        memory_bytes_per_s=update.shared_memory_bytes_per_s,
        gpu_update_parameters_per_s=links.gpu_update_parameters_per_s,
        flops_per_s=links.flops_per_s,
        fp8_flops_per_s=links.fp8_flops_per_s,
        locked_bytes=links.locked_bytes,
        ring_to_gpu_bytes_per_s=None if links.rings is None else links.rings.to_gpu_bytes_per_s,
        ring_to_ram_bytes_per_s=None if links.rings is None else links.rings.to_ram_bytes_per_s,
        gpu_bytes=float(gpus[0].total_bytes) if gpus else None,
        compute_capability=gpus[0].compute_capability if gpus else None,
        unified_bytes=_unified_bytes(gpus[0]) if gpus else None,
    )


def machine_facts(device: str) -> dict[str, Any]:
    """Return the facts that tell this machine from others, as far as rates go, for runs on "cuda" or "cpu"."""
    return {
        "host": platform.node(),
        "machine_id": hardware.text_of(Path("/etc/machine-id")).strip(),
        "processor": _processor(),
        "cores": hardware.cores_usable(),
        "device": device,
        "gpus": [gpu.name for gpu in hardware.gpus()] if device == "cuda" else [],
    }


def mount_facts(directory: Path) -> dict[str, Any]:
    """Return the facts that tell the file system of a directory from others."""
    mount = hardware.mount_of(directory)
    status = directory.stat()
    disk = os.statvfs(directory)
    return {
        "mount": str(mount.directory),
        "file_system": mount.file_system,
        "device": f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}",
        "id": disk.f_fsid,
        "total_bytes": disk.f_blocks * disk.f_frsize,
    }


def cache_path() -> Path:
    """Return the file that keeps this user's rates."""
    return hardware.cache_directory() / "rates.json"


def cache_rates(rates: Rates, device: str, path: Path | None = None) -> Path:
    """Keep rates for `cached_rates`, in place of those that this machine had.

    Drives, and links between ranks, that were not measured now stay.

    Args:
        rates: the rates that were measured here now. Those of a drive are in full, and its directory is there.
        device: "cuda" or "cpu".
        path: the cache file; None: this user's.

    Raises:
        OSError: it cannot be written.
    """
    path = path or cache_path()
    machine = machine_facts(device)
    drives = [
        {"facts": mount_facts(Path(drive.directory)), "rates": dataclasses.asdict(drive)} for drive in rates.drives
    ]

    # Drives of this machine that were measured earlier stay, unless they were measured now.
    measured_now = [drive["facts"] for drive in drives]
    entries = _entries(path)
    before = [drive for entry in entries if entry["machine"] == machine for drive in entry["drives"]]
    links = {name: value for name, value in dataclasses.asdict(rates).items() if name != "drives"}
    kept = [entry["links"] for entry in entries if entry["machine"] == machine]

    # Links between ranks are measured by a command of their own, so one that measures without ranks keeps them.
    for name in RANK_RATES:
        links[name] = links[name] or next((each[name] for each in kept if each.get(name)), None)
    entry = {
        "machine": machine,
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "links": links,
        "drives": drives + [drive for drive in before if drive["facts"] not in measured_now],
    }
    others = [entry for entry in entries if entry["machine"] != machine]
    path.parent.mkdir(parents=True, exist_ok=True)

    # The file is written whole and then renamed. So two commands at once leave one of the two lists, never a mixture.
    written = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        written.write_text(json.dumps([*others, entry], indent=2) + "\n", encoding="utf-8")
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)
    return path


def cached_rates(directories: Sequence[Path], device: str, path: Path | None = None) -> Rates | None:
    """Return the rates that were measured on this machine, with a drive for each directory; None if one is missing.

    Args:
        directories: the mounts of a run, in its order. Any directory on the same file system will do.
        device: "cuda" or "cpu".
        path: the cache file; None: this user's.
    """
    machine = machine_facts(device)
    for entry in _entries(path or cache_path()):
        if entry["machine"] != machine:
            continue
        try:
            # A mount that is missing is refused by name elsewhere. Here it only means that nothing is known of it.
            if not all(directory.is_dir() for directory in directories):
                return None
            facts = [mount_facts(directory) for directory in directories]
        except OSError:  # such as a name that is too long, or a folder that this user may not look into
            return None

        # The drive was measured in another directory perhaps, so its rates get the name of this one.
        known = [drive["facts"] for drive in entry["drives"]]
        if any(asked not in known for asked in facts):
            return None
        drives = [DriveRates(**entry["drives"][known.index(asked)]["rates"]) for asked in facts]
        named = [dataclasses.replace(drive, directory=str(d)) for drive, d in zip(drives, directories, strict=True)]
        links = entry["links"]
        way = links.get("ranks_way")
        return Rates(
            drives=_share_drives(named, facts), **links | {"ranks_way": None if way is None else Transport(way)}
        )

    return None


def rates_or_assumed(directories: Sequence[Path], device: str) -> tuple[Rates, tuple[str, ...]]:
    """Return rates for a plan on this machine, and the names of those that are assumed because nobody measured them.

    Args:
        directories: the mounts of a run, in its order.
        device: "cuda" or "cpu".
    """
    measured = cached_rates(directories, device)
    if measured is not None:
        return measured, ()

    # The drives of a run are often new while the machine is not.
    rate = ASSUMED_DRIVE_BYTES_PER_S
    drives = tuple(
        DriveRates(directory=str(directory), read_bytes_per_s=rate, write_bytes_per_s=rate, mixed_bytes_per_s=rate)
        for directory in directories
    )

    # So the links are taken as they were measured, and the drives alone are assumed.
    links = cached_rates((), device)
    if links is not None:
        return dataclasses.replace(links, drives=drives), ("drives",)

    assumed = dataclasses.replace(_assumed_links(device), drives=drives)
    names = []
    for field in dataclasses.fields(Rates):
        # What a GPU is and has is read from it, not assumed. Rates that are None, as those of links between ranks are
        # here, are left to `Rates.assumed`.
        if field.name not in OF_GPU and getattr(assumed, field.name):
            names.append(field.name)
    return assumed, tuple(names)


def io_threads(asked: int | None, rates: Rates | None) -> tuple[int, str]:
    """Return how many native threads read NVMe in a run, and as many write, with the reason for that number.

    Args:
        asked: the value of `tiers.io_threads`.
        rates: the rates of the run's mounts, if they were measured.
    """
    if asked is not None:
        return asked, "as set"
    if rates is None or rates.io_threads is None:
        return IO_THREADS, "the default; `megatier bench` finds the best number for these drives"
    return min(rates.io_threads, IO_THREADS_MAX), "as `megatier bench` found"


def _assumed_links(device: str) -> Rates:
    """Return the rates of a machine that was not measured, but for its drives. They are round, and rather low."""
    cores = hardware.cores_usable()

    # A few cores cannot take all that RAM carries, and beyond so many more of them take no more.
    memory = ASSUMED_MEMORY_BYTES_PER_S * min(cores, ASSUMED_CORES)

    # On a CPU a copy between the tiers is one in RAM, which reads and writes each byte.
    on_cpu = Rates(
        drives=(),
        to_gpu_bytes_per_s=memory / 2,
        to_ram_bytes_per_s=memory / 2,
        update_parameters_per_s=memory / UPDATE_BYTES,
        memory_bytes_per_s=memory,
        gpu_update_parameters_per_s=memory / UPDATE_BYTES,
        flops_per_s=ASSUMED_CORE_FLOPS_PER_S * cores,
    )
    gpus = hardware.gpus() if device == "cuda" else ()
    if not gpus:
        return on_cpu

    # Which GPU it is tells more of it than round figures for all.
    gpu = gpus[0]
    sheet = data_sheet_of(gpu.name) or UNKNOWN_GPU
    return dataclasses.replace(
        on_cpu,
        to_gpu_bytes_per_s=sheet.link_bytes_per_s,
        to_ram_bytes_per_s=sheet.link_bytes_per_s,
        gpu_update_parameters_per_s=sheet.memory_bytes_per_s / UPDATE_BYTES,
        flops_per_s=sheet.flops_per_s,
        gpu_bytes=float(gpu.total_bytes),
        compute_capability=gpu.compute_capability,
        unified_bytes=_unified_bytes(gpu),
    )


def _unified_bytes(gpu: hardware.Gpu) -> float | None:
    """Return the memory that a GPU shares with RAM; None: it has its own."""
    return float(hardware.ram_total_bytes()) if gpu.is_unified else None


def _share_drives(drives: Sequence[DriveRates], facts: Sequence[dict[str, Any]]) -> tuple[DriveRates, ...]:
    """Divide the rates of a file system into equal parts for the directories that lie on it."""
    # Directories of one file system have equal facts.
    parts = [facts.count(here) for here in facts]
    return tuple(
        dataclasses.replace(
            # Threads are rounded up, so that every directory has at least one.
            drive.times(1 / n),
            io_threads=None if drive.io_threads is None else -(-drive.io_threads // n),
        )
        for drive, n in zip(drives, parts, strict=True)
    )


def _entries(path: Path) -> list[dict[str, Any]]:
    """Return the entries of the cache that this version can use; none if it is damaged, or of another version."""
    try:
        entries = json.loads(hardware.text_of(path))
    except ValueError:
        return []
    # A cache that cannot be read costs a measurement and nothing else, so it is no error.
    return [entry for entry in entries if _is_whole(entry)] if isinstance(entries, list) else []


def _is_whole(entry: object) -> bool:
    """Return whether an entry has everything that this version needs; newer figures may be missing."""
    try:
        assert isinstance(entry, dict)
        # Made for the check alone: a field that is missing, or that this version does not know, is a TypeError.
        for drive in entry["drives"]:
            DriveRates(**drive["rates"])
        Rates(drives=(), **entry["links"])
        return bool(entry["machine"]) and all(drive["facts"] for drive in entry["drives"])
    except (AssertionError, AttributeError, KeyError, TypeError):
        return False


def _processor() -> str:
    names = (
        line.partition(":")[2] for line in hardware.text_of(Path("/proc/cpuinfo")).splitlines() if "model name" in line
    )
    # Arm's file has no such line, and the architecture stands for it then.
    return next(names, platform.machine()).strip()
