"""The probe of drives: their rates as the store uses them, with block files, native I/O, checksums and slots.

`megatier bench` runs it. It prints nothing, and removes its files except after kill -9. A *flag* says that a figure is
not reliable. A *note* says something else about a figure.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatier.byte_counts import format_bytes_up
from megatier.config.values import MountBudget
from megatier.drives.blockfile import IoOptions
from megatier.drives.mounts import check_directory
from megatier.errors import CapacityError, ConfigError
from megatier.hardware import mount_of
from megatier.measure.block_device import block_device
from megatier.measure.drive_traffic import (
    BLOCK_BYTES,
    SUSTAINED_STEP_BYTES,
    BlockTraffic,
    Flow,
)
from megatier.schedule.drive_rates import DriveRates
from megatier.tier import PAGE_BYTES

BLOCKS_MIN = 16
"""The least number of blocks in the file."""
THREAD_COUNTS = (4, 8, 16)
"""The numbers of native threads in each direction that are tried. More threads would find nothing to do, because DEPTH
blocks have 16 requests."""
TRIAL_ROUNDS = 3
"""The number of times that each of these numbers is tried."""
TRIAL_SHARE = 0.1
"""The time of one trial flow, as a share of that of a measured one. A trial has a mixed flow and a writing one."""
AS_FAST = 0.97
"""The share of the best rates that counts as being as fast. The fewest threads that reach it are taken."""

DRIVE_LIMIT_BYTES_PER_S = 16e9
"""More than any drive moves: PCIe 5.0 with 4 lanes carries 15.8 GB/s in each direction."""
UNCOUNTED_SHARE_MAX = 1.5
"""The most that the bytes of a flow may be, as a multiple of those that the block device counted. If they are more, a
cache has answered."""
Trials = Mapping[int, tuple[float, float]]
"""The median rates of mixed and writing flows, in bytes per second, by the number of threads in each direction."""
KNEE_SHARE = 0.7
"""A long write has a knee if its rate fell to this share or less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveFigures:
    """The figures of one mount."""

    directory: str
    """The directory of the mount."""
    device: str
    """The name of its block device."""
    logical_block_bytes: int | None
    """The smallest request of the device, in bytes; None: not known."""
    num_drives: int
    """The number of drives in the device."""
    file_system: str
    """The type of the file system."""
    is_direct: bool
    """Whether the file was accessed with O_DIRECT, and not through the page cache."""
    alignment_bytes: int
    """The alignment of every offset, address and length."""
    size_bytes: int
    """The size of the file."""
    block_bytes: int
    """The size of its blocks."""
    read: Flow
    """The flow of reads."""
    write: Flow
    """The flow of writes."""
    mixed: Flow
    """The flow of reads and writes at the same time, in the ratio of 14 to 12 bytes, with AdamW on what is read."""
    sustained_bytes_per_s: tuple[float, ...]
    """The rate of each GiB of a long write; empty if none was wanted."""
    knee_bytes: int | None
    """The bytes after which a long write got slower for good, because the drive's write cache was full; None if it did
    not.
    """
    io_threads: int | None = None
    """The native threads in each direction with which `read`, `write` and `mixed` were measured."""
    first_write_bytes_per_s: float | None = None
    """The rate of filling the file, with the threads of `options`; None if that went to the page cache."""
    trials: Trials = field(default_factory=dict)
    """The median rates of mixed and writing flows, in bytes per second, by the number of threads in each direction.
    They choose that number, and are no figures of the drive, because the best of several short trials is too good. It
    is empty if none were tried."""
    notes: tuple[str, ...] = ()
    """Remarks on the figures."""
    flags: tuple[str, ...] = ()
    """The reasons why figures are not reliable."""

    @property
    def flows(self) -> dict[str, Flow]:
        """The flows by name. A step reads 14 bytes and writes 12 of each parameter that spills."""
        return {"read": self.read, "write": self.write, "mixed 14:12": self.mixed}

    @property
    def rates(self) -> DriveRates:
        """The rates of the drive, as a plan takes them."""
        # Only the mixed flow has windows, because it bounds a step that spills.
        windows = self.mixed.windows
        low = min(windows) if windows else None
        high = max(windows) if windows else None
        return DriveRates(
            directory=self.directory,
            read_bytes_per_s=self.read.bytes_per_s,
            write_bytes_per_s=self.write.bytes_per_s,
            mixed_bytes_per_s=self.mixed.bytes_per_s,
            io_threads=self.io_threads,
            first_write_bytes_per_s=self.first_write_bytes_per_s,
            mixed_low_bytes_per_s=low,
            mixed_high_bytes_per_s=high,
        )


def check_mount(mount: MountBudget) -> int:
    """Return the bytes of the file to measure with, once it is clear that the mount can hold it.

    Raises:
        ConfigError: the mount is no directory on a drive, or the size is too small to measure anything.
        CapacityError: the mount has less room.
    """
    directory = mount.directory
    num_bytes = mount.num_bytes or 0

    # A directory in RAM would be as fast as RAM, which would mislead plans.
    check_directory(directory, "--nvme")
    least = BLOCKS_MIN * IoOptions().granule_bytes
    if num_bytes < least:
        raise ConfigError(
            f"--nvme: {format_bytes_up(num_bytes)} on {directory} is too small; give {format_bytes_up(least)} or more."
        )

    # f_bavail, not f_bfree, which counts the blocks that file systems keep for root as well.
    disk = os.statvfs(directory)
    free = disk.f_bavail * disk.f_frsize
    if num_bytes > free:
        raise CapacityError("nvme", num_bytes, free, f"Free space on {directory}, or give it less: {directory}:SIZE.")
    return num_bytes


def probe_drive(
    mount: MountBudget,
    *,
    seconds: float,
    sustained_bytes: int = 0,
    threads: int = 1,
    options: IoOptions | None = None,
    pin: bool = False,
) -> DriveFigures:
    """Measure one mount with a file of the mount's size, and with the best number of threads.

    Args:
        mount: the directory, and the size of the file, which is rounded down to whole blocks.
        seconds: the time of reading, of writing, and of each window of the mixed flow. Trying the numbers of threads
            takes 1.8 times as long, all together.
        sustained_bytes: the bytes of a long write that comes first, and leaves the write cache full; 0: there is none.
        threads: the threads of AdamW on the CPU during the mixed flow.
        options: how block files are accessed.
        pin: pin the slots, as on a machine with a GPU.

    Raises:
        ConfigError, CapacityError: the mount cannot be used; see `check_mount`.
        TransferError, IntegrityError: the drive failed, or returned other bytes than were written.
    """
    options = options or IoOptions()
    num_bytes = check_mount(mount)
    granule = options.granule_bytes

    # In whole granules, because each has a checksum. A small file has smaller blocks, so that there are enough.
    block_bytes = min(BLOCK_BYTES, num_bytes // BLOCKS_MIN // granule * granule)
    device = block_device(mount.directory)
    directory = mount.directory
    with BlockTraffic(directory, num_bytes // block_bytes, block_bytes, options, pin=pin) as traffic:
        # First, so that everything else is measured with a full write cache.
        sustained = traffic.sustained(sustained_bytes) if sustained_bytes else ()
        is_direct = traffic.is_direct
        io_threads, trials = choose_threads(traffic, options.num_threads, seconds)

        # Measured again, and for longer, because the best of several short trials is too optimistic.
        write = traffic.write(seconds)
        mixed = traffic.updated(seconds, threads)
        read = traffic.read(seconds)
    knee_step = knee(sustained)
    figures = DriveFigures(
        directory=str(directory),
        device=device.name,
        logical_block_bytes=device.logical_block_bytes,
        num_drives=device.num_drives,
        file_system=mount_of(directory).file_system,
        is_direct=is_direct,
        alignment_bytes=PAGE_BYTES,
        size_bytes=num_bytes // block_bytes * block_bytes,
        block_bytes=block_bytes,
        read=read,
        write=write,
        mixed=mixed,
        sustained_bytes_per_s=sustained,
        knee_bytes=None if knee_step is None else knee_step * max(SUSTAINED_STEP_BYTES, block_bytes),
        io_threads=io_threads,
        first_write_bytes_per_s=traffic.fill_bytes_per_s if is_direct else None,
        trials=trials,
    )
    return replace(figures, notes=drive_notes(figures), flags=drive_flags(figures))


def choose_threads(traffic: BlockTraffic, default: int, seconds: float) -> tuple[int, Trials]:
    """Go on with the best number of threads. Return that number, and the rates of all that were tried.

    Through the page cache none are tried, because RAM answers for a part there. The default number stays then.
    """
    if not traffic.is_direct:
        return default, {}
    # Short trials find the best number, and its rates are measured afterwards.
    trials = try_threads(traffic, seconds * TRIAL_SHARE)
    io_threads = fewest_threads(trials)
    traffic.set_threads(io_threads)
    return io_threads, trials


def try_threads(traffic: BlockTraffic, seconds: float) -> Trials:
    """Return the median rates of mixed and writing flows, in bytes per second, by the number of THREAD_COUNTS.

    Rates of drives waver over time. So the numbers take turns, and each round begins with another one.
    """
    tried: dict[int, list[tuple[float, float]]] = {count: [] for count in THREAD_COUNTS}
    for number in range(TRIAL_ROUNDS):
        first = number % len(THREAD_COUNTS)
        for count in THREAD_COUNTS[first:] + THREAD_COUNTS[:first]:
            traffic.set_threads(count)
            mixed = traffic.mixed(seconds)
            writing = traffic.write(seconds)
            tried[count].append((mixed.bytes_per_s, writing.bytes_per_s))

    # Medians, because a drive that pauses once must not decide.
    medians = {}
    for count, rates in tried.items():
        mixed_rates, write_rates = zip(*rates, strict=True)
        medians[count] = (statistics.median(mixed_rates), statistics.median(write_rates))
    return medians


def fewest_threads(trials: Trials) -> int:
    """Return the smallest number of threads whose rates are both near the best, or else that of the best mixed rate.

    Few threads are better than many: a single read waits longer the more threads write at the same time.
    """
    # The best mixed rate and the best write rate may have different numbers of threads.
    least_mixed = AS_FAST * max(mixed for mixed, _ in trials.values())
    least_write = AS_FAST * max(write for _, write in trials.values())
    near = []
    for count, (mixed, write) in trials.items():
        if mixed >= least_mixed and write >= least_write:
            near.append(count)
    if near:
        return min(near)
    return max(trials, key=lambda count: trials[count][0])


def drive_flags(figures: DriveFigures) -> tuple[str, ...]:
    """Return the reasons why the figures are not those of the drive."""
    flags = []
    limit = DRIVE_LIMIT_BYTES_PER_S * figures.num_drives

    # PCIe carries as much in the other direction at the same time.
    for name, flow, most in (
        ("read", figures.read, limit),
        ("write", figures.write, limit),
        ("mixed", figures.mixed, 2 * limit),
    ):
        # Such a rate exceeds PCIe, so the bytes did not come from the drive.
        if flow.bytes_per_s > most:
            flags.append(f"{name}: more than {limit / 1e9:.0f} GB/s, which PCIe does not carry: a cache answered")
        elif flow.device_bytes is not None and flow.num_bytes > UNCOUNTED_SHARE_MAX * flow.device_bytes:
            share = flow.device_bytes / flow.num_bytes
            flags.append(f"{name}: the device moved {share:.0%} of the bytes: the page cache answered for the rest")

    if not figures.is_direct and figures.read.device_bytes is None:
        flags.append("through the page cache, and no counter tells how much the drive really moved")
    return tuple(flags)


def drive_notes(figures: DriveFigures) -> tuple[str, ...]:
    """Return remarks on the figures of a mount."""
    notes = []
    if not figures.is_direct:
        notes.append("no O_DIRECT here: measured through the page cache, read once after it was dropped")
    if figures.block_bytes < BLOCK_BYTES:
        least = format_bytes_up(BLOCKS_MIN * BLOCK_BYTES)
        notes.append(f"blocks smaller than the store's, {format_bytes_up(BLOCK_BYTES)}: give {least} or more")
    logical = figures.logical_block_bytes or 0
    if logical > PAGE_BYTES:
        notes.append(f"the device wants transfers of {logical} bytes; the store's may be smaller")

    for flow in figures.flows.values():
        # The device counts the bytes of all programs. One remark suffices for all flows.
        if flow.device_bytes and flow.device_bytes > UNCOUNTED_SHARE_MAX * flow.num_bytes:
            notes.append("others used the device meanwhile: the figures are too low")
            break
    return tuple(notes)


def knee(rates: Sequence[float]) -> int | None:
    """Return for how many steps a long write kept its first rate; None unless it lost 30 % of it or more for good.

    The steps are split into two levels, of two steps or more each, so that the sum of squares is least.
    """

    def squares(part: Sequence[float]) -> float:
        mean = statistics.fmean(part)
        return sum((rate - mean) ** 2 for rate in part)

    def cost(split: int) -> float:
        return squares(rates[:split]) + squares(rates[split:])

    # Two steps are the least that tell a level from a single slow step.
    best = min(range(2, len(rates) - 1), key=cost, default=None)
    if best is None:
        return None

    # Medians, because a single slow step is not a lower level.
    first = statistics.median(rates[:best])
    last = statistics.median(rates[best:])
    return best if last <= KNEE_SHARE * first else None
