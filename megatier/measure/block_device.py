"""The block device under a directory, and the bytes that it has moved, as the kernel counts them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megatier.hardware import ROOT, text_of

SECTOR_BYTES = 512
"""The unit of the kernel's counters, whatever the size of the device's sectors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDevice:
    """The device under a directory, as the kernel shows it."""

    name: str
    """Its name, such as nvme0n1p1. It is "unknown" if there is no block device (network, overlay, RAM)."""
    logical_block_bytes: int | None
    """The least bytes that it moves at once; None if that is unknown."""
    num_drives: int
    """The number of drives that it is made of. It is more than 1 for RAID and LVM."""
    counters: Path | None
    """The file with the kernel's counters of this device."""

    def moved_bytes(self) -> tuple[int, int] | None:
        """Return the bytes read and written since the machine started; None if nothing counts them."""
        # The third and the seventh number of the file are the sectors that were read and written.
        fields = text_of(self.counters).split() if self.counters is not None else []
        return (int(fields[2]) * SECTOR_BYTES, int(fields[6]) * SECTOR_BYTES) if len(fields) > 6 else None


def block_device(directory: Path, root: Path = ROOT) -> BlockDevice:
    """Return the block device that holds a directory."""
    number = directory.stat().st_dev
    folder = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    if not (folder / "stat").is_file():
        return BlockDevice(name="unknown", logical_block_bytes=None, num_drives=1, counters=None)

    lines = text_of(folder / "uevent").splitlines()
    names = [line.removeprefix("DEVNAME=") for line in lines if "DEVNAME=" in line]

    # A partition has no queue of its own. That of its drive lies in the folder above.
    size = None
    for holder in (folder, folder.resolve().parent):
        text = text_of(holder / "queue/logical_block_size").strip()
        if size is None and text.isdigit():
            size = int(text)
    return BlockDevice(
        name=names[0] if names else folder.name,
        logical_block_bytes=size,
        num_drives=_num_drives(folder),
        counters=folder / "stat",
    )


def _num_drives(folder: Path) -> int:
    # RAID and LVM are devices over others, perhaps in several layers, which the kernel links as slaves.
    slaves = list((folder / "slaves").glob("*"))
    return sum(map(_num_drives, slaves)) if slaves else 1
