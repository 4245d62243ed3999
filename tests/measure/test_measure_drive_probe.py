"""What a probe says of a drive: its rates, its threads, what it refuses, and what it leaves there."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
from pathlib import Path

import pytest
from probe_figures import GB, SECONDS, figures, flow

from megatier.config.values import MountBudget
from megatier.drives.blockfile import FileBatch, IoOptions
from megatier.errors import CapacityError, ConfigError, MegatierError, TransferError
from megatier.measure import drive_probe
from megatier.measure.drive_probe import DriveFigures
from megatier.measure.drive_traffic import Flow

SIZE = 4 << 20


BLOCK = 256 << 10


def test_probe_drive_measures_and_leaves_nothing(tmp_path: Path) -> None:
    found = drive_probe.probe_drive(MountBudget(tmp_path, SIZE + 1000), seconds=SECONDS, sustained_bytes=2 * SIZE)
    assert not list(tmp_path.iterdir())
    assert (found.size_bytes, found.block_bytes, found.alignment_bytes) == (SIZE, BLOCK, 4096)
    for one in (found.read, found.write, found.mixed):
        assert one.num_bytes >= 13 * BLOCK
        assert one.seconds > 0
        assert 0 < one.p50_ms <= one.p99_ms
    assert len(found.sustained_bytes_per_s) == 1
    assert found.knee_bytes is None
    assert any("blocks smaller than the store's" in note for note in found.notes)  # others may use the drive too
    flows = (found.read, found.write, found.mixed)
    windows = found.mixed.windows
    spread = (min(windows), max(windows)) if windows else (None, None)
    rates = (*(one.bytes_per_s for one in flows), found.io_threads, found.first_write_bytes_per_s, *spread)
    assert dataclasses.astuple(found.rates) == (str(tmp_path), *rates)
    assert (found.first_write_bytes_per_s is not None) == found.is_direct
    assert found.first_write_bytes_per_s is None or found.first_write_bytes_per_s > 0
    assert tuple(found.trials) == (drive_probe.THREAD_COUNTS if found.is_direct else ())
    assert found.io_threads in drive_probe.THREAD_COUNTS


@pytest.mark.parametrize(
    ("mixed", "write", "count"),
    [
        ((2.0, 2.0, 2.0), (3.0, 3.0, 3.0), 4),
        ((2.0, 2.06, 2.05), (3.0, 3.0, 3.0), 4),
        ((2.0, 2.4, 2.46), (3.0, 3.0, 3.0), 8),
        ((2.0, 2.0, 2.0), (3.0, 3.5, 3.6), 8),
        ((2.0, 2.2, 2.1), (3.0, 3.1, 3.6), 8),  # none is near both
    ],
)
def test_fewest_threads_near_the_best_of_both_rates_are_taken(
    mixed: tuple[float, ...], write: tuple[float, ...], count: int
) -> None:
    trials = dict(zip((4, 8, 16), zip(mixed, write, strict=True), strict=True))
    assert drive_probe.fewest_threads(trials) == count


def test_try_threads_takes_turns_and_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    class Drive:
        threads, turns = 0, list[int]()

        def set_threads(self, num_threads: int) -> None:
            self.threads = num_threads

        def mixed(self, seconds: float) -> Flow:
            self.turns.append(self.threads)
            return flow(GB * (9 if len(self.turns) == 1 else self.threads))  # one odd round

        def write(self, seconds: float) -> Flow:
            return flow(GB)

    found = drive_probe.try_threads(drive := Drive(), SECONDS)  # type: ignore[arg-type]
    assert drive.turns == [4, 8, 16, 8, 16, 4, 16, 4, 8]
    assert {count: (round(mixed / GB), round(write / GB)) for count, (mixed, write) in found.items()} == {
        4: (4, 1),
        8: (8, 1),
        16: (16, 1),
    }


def test_probe_drive_without_direct_says_so_and_reads_once(tmp_path: Path) -> None:
    found = drive_probe.probe_drive(MountBudget(tmp_path, SIZE), seconds=0.3, options=IoOptions(direct=False))
    assert not found.is_direct
    assert "no O_DIRECT" in found.notes[0]
    assert found.read.num_bytes == SIZE
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt, TransferError("read", "nvme", "x", 0, errno.EIO)])
@pytest.mark.parametrize("after", [3, 20, 40])
def test_probe_drive_that_ends_early_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException | type[BaseException], after: int
) -> None:
    counter, real = itertools.count(), FileBatch.wait

    def wait(self: FileBatch) -> None:
        real(self)
        if next(counter) == after:
            raise error

    monkeypatch.setattr(FileBatch, "wait", wait)
    with pytest.raises((KeyboardInterrupt, TransferError)):
        drive_probe.probe_drive(MountBudget(tmp_path, SIZE), seconds=SECONDS)
    assert not list(tmp_path.iterdir())


def refused(mount: MountBudget, kind: type[MegatierError]) -> str:
    with pytest.raises(kind) as caught:
        drive_probe.probe_drive(mount, seconds=SECONDS)
    return str(caught.value)


def test_probe_drive_missing_mount_is_named(tmp_path: Path) -> None:
    message = refused(MountBudget(tmp_path / "none", SIZE), ConfigError)
    assert f"{tmp_path / 'none'} is not a directory. Create it" in message


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm here")
def test_probe_drive_mount_in_ram_is_named() -> None:
    message = refused(MountBudget(Path("/dev/shm"), SIZE), ConfigError)
    assert message.startswith("--nvme: files in /dev/shm lie in RAM (tmpfs on /dev/shm), outside tiers.ram. Name a ")


@pytest.mark.parametrize("size", [0, 1000, None])
def test_probe_drive_size_too_small_names_the_least(tmp_path: Path, size: int | None) -> None:
    message = refused(MountBudget(tmp_path, size), ConfigError)
    assert f"on {tmp_path} is too small; give 1.0 MiB or more" in message
    assert not list(tmp_path.iterdir())


def test_probe_drive_full_mount_is_named(tmp_path: Path) -> None:
    message = refused(MountBudget(tmp_path, 1 << 60), CapacityError)
    assert f"Free space on {tmp_path}, or give it less: {tmp_path}:SIZE." in message
    assert not list(tmp_path.iterdir())


def test_probe_drive_read_only_mount_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mkdir(self: Path, *arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert f"cannot use {tmp_path}: Read-only file system." in refused(MountBudget(tmp_path, SIZE), ConfigError)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (figures(), None),
        (figures(read=flow(counted=0.5)), "read: the device moved 50% of the bytes: the page cache answered"),
        (figures(mixed=flow(counted=0.0)), "mixed: the device moved 0% of the bytes"),
        (figures(read=flow(17 * GB)), "read: more than 16 GB/s"),
        (figures(read=flow(17 * GB), num_drives=2), None),
        (figures(mixed=flow(30 * GB)), None),
        (figures(read=flow(counted=None)), None),
        (figures(read=flow(counted=None), is_direct=False), "no counter tells"),
    ],
)
def test_drive_flags_tell_what_cannot_be(found: DriveFigures, words: str | None) -> None:
    flags = drive_probe.drive_flags(found)
    assert not flags if words is None else words in flags[0]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (figures(), None),
        (figures(is_direct=False), "no O_DIRECT"),
        (figures(block_bytes=1 << 20), "blocks smaller than the store's, 32.0 MiB: give 512.0 MiB or more"),
        (figures(logical_block_bytes=16384), "wants transfers of 16384 bytes"),
        (figures(read=flow(counted=2.0)), "others used the device"),
    ],
)
def test_drive_notes_tell_what_to_know(found: DriveFigures, words: str | None) -> None:
    notes = drive_probe.drive_notes(found)
    assert not notes if words is None else words in notes[0]


@pytest.mark.parametrize(
    ("rates", "step"),
    [
        ([5, 5, 5, 2, 2, 2], 3),
        ([5.2, 4.9, 5, 5.1, 1, 1.1, 0.9], 4),
        ([5, 5, 5, 4.5, 4.4, 4.5], None),
        ([5, 5, 1, 5, 5, 5, 5], None),
        ([2, 2, 2, 5, 5, 5], None),
        ([5, 5, 1], None),
        ([], None),
    ],
)
def test_knee_is_where_a_long_write_slows_for_good(rates: list[float], step: int | None) -> None:
    assert drive_probe.knee(rates) == step
