"""Rates: what the links, drives and processors of a machine do a second. Plans are made from these figures. Pure.

`megatier bench` measures them. For a machine that one does not have yet they are written by hand, in YAML with the
names of the fields below.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatier.config.values import parse_bytes, read_yaml
from megatier.errors import ConfigError
from megatier.tier import RING_BYTES, Transport

UPDATE_READ_BYTES = 14
"""Bytes that AdamW reads of one parameter with bf16 compute and fp32 moments: its state and its gradient."""
UPDATE_WRITTEN_BYTES = 12
"""Bytes that it writes: the state."""
UPDATE_BYTES = UPDATE_READ_BYTES + UPDATE_WRITTEN_BYTES
"""Memory traffic of that update, by which rates count parameters. Parameters with another schema count as so many of
these as their bytes say."""


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of a run, and the hosts that have equally many of them.

    Raises:
        ConfigError: there are none, or hosts cannot have equally many.
    """

    num_ranks: int = 1
    num_hosts: int = 1

    def __post_init__(self) -> None:
        """Check the numbers."""
        are_positive = self.num_ranks >= 1 and self.num_hosts >= 1
        if not are_positive or self.num_ranks % self.num_hosts:
            raise ConfigError(
                f"{self.num_ranks} ranks on {self.num_hosts} hosts: give a number of ranks that so many hosts share "
                "equally."
            )

    @property
    def num_host_ranks(self) -> int:
        """Ranks of one host, which share its RAM, its processors and its drives."""
        return self.num_ranks // self.num_hosts


ALONE = World()
"""One process, which has all of the state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveRates:
    """One drive, through the store's own block files."""

    directory: str
    """The directory where it is mounted, or a name."""
    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed_bytes_per_s: float
    """Bytes read and written together, in the shares of an update, if both go on at once. A full-duplex drive reaches
    up to the sum of both rates."""
    io_threads: int | None = None
    """Native threads each way with which it was measured; None: not known."""
    first_write_bytes_per_s: float | None = None
    """Rate of writing bytes of a file that were never written before, as a checkpoint does; None: not known."""
    mixed_low_bytes_per_s: float | None = None
    """The mixed rate in the slowest seconds of its measurement, whose median is mixed_bytes_per_s; None: not known."""
    mixed_high_bytes_per_s: float | None = None
    """The mixed rate in the fastest seconds; None: not known."""

    def times(self, factor: float) -> DriveRates:
        """Return a drive that does so many times as much a second."""
        # Slow, usual and fast seconds waver together, so all rates change by the same factor.
        rates = {}
        for field in dataclasses.fields(self):
            rate = getattr(self, field.name)
            if field.name.endswith("_per_s") and rate is not None:
                rates[field.name] = rate * factor
        return dataclasses.replace(self, **rates)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """One machine."""

    drives: tuple[DriveRates, ...]
    """The drives of the NVMe tier."""
    to_gpu_bytes_per_s: float
    """Rate of copies from pinned RAM, with nothing else going on."""
    to_ram_bytes_per_s: float
    """Rate of copies to pinned RAM, with nothing else going on."""
    update_parameters_per_s: float
    """Rate of AdamW on the CPU, with all threads, split masters and nothing else going on."""
    memory_bytes_per_s: float
    """Memory traffic that RAM carries when AdamW and copies both ways share it."""
    gpu_update_parameters_per_s: float
    """Rate of AdamW on the GPU."""
    flops_per_s: float
    """Rate of the matrix products of a layer's forward and backward at the compute dtype, as models reach it."""
    fp8_flops_per_s: float | None = None
    """The same of products in FP8, with the time in which numbers are rounded to it; None: not known."""
    gpu_bytes: float | None = None
    """Memory of the GPU; None: not known, so that a plan cannot say whether activations fit."""
    compute_capability: float | None = None
    """What CUDA calls the generation of the GPU, such as 8.9; None: not known. Kernels of attention and FP8 products
    are chosen by it."""
    gather_bytes_per_s: float | None = None
    """Rate at which a GPU receives weights from the others of its host, while all of them do so; None: not known."""
    scatter_bytes_per_s: float | None = None
    """Rate at which a GPU receives gradients from the others of its host, while all of them do so; None: not known."""
    network_bytes_per_s: float | None = None
    """Rate at which a GPU receives bytes from other hosts, while all GPUs of its host do so; None: not known."""
    ranks_slowdown: float | None = None
    """Seconds that compute loses for each second of gathers and scatters beside it, at most 1; None: not known. It is
    about 0.2 if copy engines move the bytes, and about 1 if kernels do."""
    ranks_way: Transport | None = None
    """What moved them when they were measured; None: not known. Through shared RAM they take part of the links between
    a GPU and RAM, and of RAM itself."""

    unified_bytes: float | None = None
    """Memory that is GPU memory and RAM at once, as of an integrated GPU; None: each has its own."""
    locked_bytes: float | None = None
    """RAM that can be page-locked; None: no limit is known."""
    ring_to_gpu_bytes_per_s: float | None = None
    """Rate of copies through a ring from RAM that is not page-locked; None: not known."""
    ring_to_ram_bytes_per_s: float | None = None
    """Rate of copies through a ring to RAM that is not page-locked; None: not known."""

    def gpu_bytes_beside(self, ram_bytes: int) -> float | None:
        """Return the memory of the GPU that a budget of RAM leaves: all of it, but of unified memory; None: not known.

        Args:
            ram_bytes: the budget of a host.
        """
        if self.unified_bytes is None or self.gpu_bytes is None:
            return self.gpu_bytes
        return min(self.gpu_bytes, max(0.0, self.unified_bytes - ram_bytes))

    def locked_shares(self, awaited_bytes: int, other_bytes: int) -> tuple[float, float]:
        """Return how much is page-locked of RAM that compute waits for, and of all other RAM.

        Rings have their part first, and then what compute waits for.
        """
        total_bytes = awaited_bytes + other_bytes
        if self.locked_bytes is None or total_bytes <= self.locked_bytes:
            return 1.0, 1.0

        left = max(0.0, self.locked_bytes - RING_BYTES)
        awaited = min(left, awaited_bytes)
        left -= awaited

        # Of no bytes the share does not matter, and must not divide by zero.
        awaited_share = awaited / max(1, awaited_bytes)
        other_share = left / max(1, other_bytes)
        return awaited_share, min(1.0, other_share)

    def with_locked(self, locked_bytes: int | None) -> Rates:
        """Return the machine with a limit of page-locked RAM that a user has set; None: there is none."""
        limits = [limit for limit in (self.locked_bytes, locked_bytes) if limit is not None]
        return dataclasses.replace(self, locked_bytes=min(limits, default=None))

    def assumed(self, world: World) -> tuple[str, ...]:
        """Return the names of the rates that ranks need and that `of_rank` assumes because they are not known."""
        if world.num_ranks == 1:
            return ()

        assumed = []

        # The network matters only between hosts.
        for name in ASSUMED:
            is_needed = name != "network_bytes_per_s" or world.num_hosts > 1
            if is_needed and getattr(self, name) is None:
                assumed.append(name)
        return tuple(assumed)

    def of_rank(self, world: World) -> Rates:
        """Return the machine as one of several ranks has it: its own GPU, and its part of what the host's ranks share.

        The rates of gathers and scatters are then those from all other ranks, over links and network at the same time.
        A gather brings each byte of other hosts to a host once, over all of its GPUs; a scatter brings what belongs to
        the rank.
        """
        if world.num_ranks == 1:
            return self

        # RAM, processors and drives are those of the host, of which each rank has an equal part.
        local = world.num_host_ranks
        memory = self.memory_bytes_per_s / local

        # A plan for ranks has to have a figure for each of them, and `assumed` tells which are none of this machine.
        gather = self.gather_bytes_per_s or ASSUMED["gather_bytes_per_s"]
        scatter = self.scatter_bytes_per_s or ASSUMED["scatter_bytes_per_s"]
        network = self.network_bytes_per_s or ASSUMED["network_bytes_per_s"]
        slowdown = self.ranks_slowdown or ASSUMED["ranks_slowdown"]
        others = world.num_ranks - 1
        if world.num_hosts > 1:
            # Seconds for each byte of one shard: all links are at work at once, so the slower kind counts.
            far = world.num_ranks - local
            gather = others / max(others / gather, far / local / network)
            scatter = others / max((local - 1) / scatter, far / network)

        # A GPU's link is its own, but it carries no more than the rank's part of what RAM does.
        return dataclasses.replace(
            self.times(1 / local),
            to_gpu_bytes_per_s=min(self.to_gpu_bytes_per_s, memory),
            to_ram_bytes_per_s=min(self.to_ram_bytes_per_s, memory),
            update_parameters_per_s=self.update_parameters_per_s / local,
            memory_bytes_per_s=memory,
            locked_bytes=None if self.locked_bytes is None else self.locked_bytes / local,
            gather_bytes_per_s=gather,
            scatter_bytes_per_s=scatter,
            network_bytes_per_s=network,
            ranks_slowdown=slowdown,
            ranks_way=self.ranks_way if world.num_hosts == 1 else None,
        )

    @property
    def io_threads(self) -> int | None:
        """Native threads each way that keep all drives busy at once; None if those of one drive are not known."""
        total = 0
        for drive in self.drives:
            # The others' threads alone would leave this drive without work.
            if drive.io_threads is None:
                return None
            total += drive.io_threads
        return total or None

    def times(self, factor: float) -> Rates:
        """Return the machine with drives that do so many times as much a second."""
        return dataclasses.replace(self, drives=tuple(drive.times(factor) for drive in self.drives))

    @property
    def slowest(self) -> Rates:
        """The machine with every drive as in the slowest seconds of its measurement."""
        return self._as_in([drive.mixed_low_bytes_per_s for drive in self.drives])

    @property
    def fastest(self) -> Rates:
        """The machine with every drive as in the fastest seconds of its measurement."""
        return self._as_in([drive.mixed_high_bytes_per_s for drive in self.drives])

    def _as_in(self, mixed: Sequence[float | None]) -> Rates:
        """Return the machine with each drive scaled to a mixed rate, if that is known."""
        drives = []
        for drive, rate in zip(self.drives, mixed, strict=True):
            if rate is None:
                drives.append(drive)
            else:
                # Only the mixed rate was measured as it wavers, and reads and writes are taken to waver with it.
                factor = rate / drive.mixed_bytes_per_s
                drives.append(drive.times(factor))
        return dataclasses.replace(self, drives=tuple(drives))


ASSUMED = {
    "gather_bytes_per_s": 25e9,
    "scatter_bytes_per_s": 25e9,
    "network_bytes_per_s": 12.5e9,
    "ranks_slowdown": 1.0,
}
"""What is assumed of links between GPUs that were not measured: they are PCIe 4 with 16 lanes, the network has 100
Gbit/s for each GPU, and kernels move the bytes. This is rather low: with NVLink, GPUs are ten times as fast."""

FIELDS = {field.name for field in dataclasses.fields(Rates)}
WAVERING = {"mixed_low_bytes_per_s", "mixed_high_bytes_per_s"}
OF_RANKS = {"ranks_way", *ASSUMED}
"""What is measured of links between ranks, by ranks alone."""
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
    *WAVERING,
    *OF_RANKS,
}
DRIVE_FIELDS = {field.name for field in dataclasses.fields(DriveRates)}


def read_rates(path: Path) -> Rates:
    """Read rates from a YAML or JSON file, or from the result of `megatier bench`.

    Figures may have byte units, such as "14GB".

    Raises:
        ConfigError: it cannot be read, or a name is missing or unknown, or its figure is no positive number.
    """
    parsed = read_yaml(path)
    if not isinstance(parsed, dict):
        names = ", ".join(sorted(FIELDS))
        raise ConfigError(f"{path}: names and figures are expected: {names}.")

    # The whole result of `megatier bench` has the rates in a part of their own.
    if isinstance(parsed.get("rates"), dict):
        parsed = parsed["rates"]

    given = dict(parsed)
    listed = given.pop("drives", [])
    if not isinstance(listed, list) or not all(isinstance(drive, dict) for drive in listed):
        names = ", ".join(sorted(DRIVE_FIELDS))
        raise ConfigError(f"{path}: drives is a list of drives, each with {names}.")

    drives = []
    for drive in listed:
        figures = _figures(path, drive, DRIVE_FIELDS)
        drives.append(DriveRates(**figures))
    figures = _figures(path, given, FIELDS - {"drives"})
    return Rates(drives=tuple(drives), **figures)


def as_dict(rates: Rates) -> dict[str, Any]:
    """Return the rates as plain values for JSON or YAML, which `read_rates` reads back."""
    return dataclasses.asdict(rates) | {"drives": [dataclasses.asdict(drive) for drive in rates.drives]}


def _figures(path: Path, given: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """Return the values of some names, of which all but the optional ones must be there."""
    # Both are said at once: a name that is misspelt is missing and unknown.
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
    """Return the value of a name: text, a way between ranks, or a positive number; None: optional and not known."""
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

    # Threads are counted, so 2.5 of them are no figure, although it is a positive number.
    if name == "io_threads" and figure is not None:
        figure = int(figure) if figure.is_integer() else None
    if figure is None:
        example = "8" if name == "io_threads" else '5.0e9 or "14GB"'
        raise ConfigError(f"{path}: {name} is {value!r}; a positive number is expected, such as {example}.")
    return figure


def _figure(value: object) -> float | None:
    """Return a positive number; None if it is none."""
    # A bool is an int to Python, and no rate.
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = parse_bytes(value) if isinstance(value, str) else value
        figure = float(number)
    except (ConfigError, OverflowError):
        return None

    return figure if 0 < figure < math.inf else None
