from __future__ import annotations

import os
from pathlib import Path

from megatier.measure.block_device import block_device


def sysfs(root: Path, directory: Path) -> Path:
    """A made-up block device under a directory; returns its folder."""
    number = directory.stat().st_dev
    device = root / "devices/nvme0n1"
    partition = device / "nvme0n1p1"
    (device / "queue").mkdir(parents=True)
    partition.mkdir()
    (device / "queue/logical_block_size").write_text("4096\n")
    (partition / "uevent").write_text("MAJOR=259\nDEVNAME=nvme0n1p1\nDEVTYPE=partition\n")
    (partition / "stat").write_text("  7 0 100 1 5 0 200 2 0 3 4\n")
    link = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    link.parent.mkdir(parents=True)
    link.symlink_to(partition)
    return partition


def test_block_device_of_a_partition_has_its_counters_and_its_drives_sectors(tmp_path: Path) -> None:
    sysfs(tmp_path, tmp_path)
    device = block_device(tmp_path, root=tmp_path)
    assert (device.name, device.logical_block_bytes, device.num_drives) == ("nvme0n1p1", 4096, 1)
    assert device.moved_bytes() == (51200, 102400)


def test_block_device_of_a_raid_counts_its_drives(tmp_path: Path) -> None:
    folder = sysfs(tmp_path, tmp_path)
    for name in ("sda", "sdb", "md1/slaves/sdc", "md1/slaves/sdd"):
        (folder / "slaves" / name).mkdir(parents=True)
    assert block_device(tmp_path, root=tmp_path).num_drives == 4


def test_block_device_unknown_counts_nothing(tmp_path: Path) -> None:
    device = block_device(tmp_path, root=tmp_path)
    assert (device.name, device.logical_block_bytes, device.moved_bytes()) == ("unknown", None, None)
