"""The block device under a directory, and what it has moved, as the kernel shows them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megatier.hardware import ROOT

SECTOR_BYTES = 512
"""Unit of the kernel's counters, whatever the device's sectors are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDevice:
    """The device under a directory, as the kernel shows it."""

    name: str
    """Such as nvme0n1p1; "unknown" for what has no block device of its own (network, overlay, RAM)."""
    logical_block_bytes: int | None
    num_drives: int
    """Drives that it is made of, at least 1: more for RAID and LVM."""
    counters: Path | None
    """The kernel's counters of this device."""

    def moved_bytes(self) -> tuple[int, int] | None:
        """Bytes read and written since the machine started; None where nothing counts them."""
        fields = _text(self.counters).split() if self.counters is not None else []
        return (int(fields[2]) * SECTOR_BYTES, int(fields[6]) * SECTOR_BYTES) if len(fields) > 6 else None


def block_device(directory: Path, root: Path = ROOT) -> BlockDevice:
    """The block device that holds a directory."""
    number = directory.stat().st_dev
    folder = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    if not (folder / "stat").is_file():
        return BlockDevice(name="unknown", logical_block_bytes=None, num_drives=1, counters=None)
    names = [line.removeprefix("DEVNAME=") for line in _text(folder / "uevent").splitlines() if "DEVNAME=" in line]
    sizes = [_text(queue / "queue/logical_block_size").strip() for queue in (folder, folder.resolve().parent)]
    size = next((int(text) for text in sizes if text.isdigit()), None)
    return BlockDevice(
        name=names[0] if names else folder.name,
        logical_block_bytes=size,
        num_drives=_num_drives(folder),
        counters=folder / "stat",
    )


def _num_drives(folder: Path) -> int:
    slaves = list((folder / "slaves").glob("*"))
    return sum(map(_num_drives, slaves)) if slaves else 1


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
