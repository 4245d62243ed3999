"""Probes on tiny sizes: what is measured, what is refused, what is flagged, and that no file stays. No timing."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import math
import os
import platform
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatier import hardware
from megatier.config.values import MountBudget
from megatier.drives.blockfile import FileBatch, IoOptions
from megatier.errors import CapacityError, ConfigError, MegatierError, TransferError
from megatier.hardware import Gpu
from megatier.measure import drive_probe, link_probe, probe
from megatier.measure.drive_probe import DriveFigures
from megatier.measure.drive_traffic import BLOCK_BYTES, Flow
from megatier.measure.link_probe import CopyFigures, LinkFigures, UpdateFigures
from megatier.measure.link_traffic import COPY_PIECES, CopyTraffic, UpdateTraffic
from megatier.schedule.rates import WAVERING, DriveRates, Rates

SIZE = 4 << 20
BLOCK = 256 << 10
SECONDS = 0.01
GB = 10**9


def flow(bytes_per_s: float = 2 * GB, counted: float | None = 1.0) -> Flow:
    return Flow(
        num_bytes=10 * GB,
        seconds=10 * GB / bytes_per_s,
        p50_ms=1.0,
        p99_ms=2.0,
        device_bytes=None if counted is None else int(10 * GB * counted),
    )


def figures(read: Flow | None = None, **other: object) -> DriveFigures:
    """A drive at 2 GB/s with nothing to say about it."""
    plain = DriveFigures(
        directory="/mnt/a",
        device="vda",
        logical_block_bytes=512,
        num_drives=1,
        file_system="ext4",
        is_direct=True,
        alignment_bytes=4096,
        size_bytes=1 << 33,
        block_bytes=BLOCK_BYTES,
        read=read or flow(),
        write=flow(),
        mixed=flow(),
        sustained_bytes_per_s=(),
        knee_bytes=None,
    )
    return dataclasses.replace(plain, **other)  # type: ignore[arg-type]


LINKS = LinkFigures(
    device="cpu",
    copies=(
        CopyFigures(
            device="cpu",
            to_gpu_bytes_per_s=1.0,
            to_ram_bytes_per_s=2.0,
            to_gpu_both_bytes_per_s=3.0,
            to_ram_both_bytes_per_s=4.0,
        ),
    ),
    updates=(
        UpdateFigures(
            threads=1,
            parameters_per_s=5.0,
            memory_bytes_per_s=130.0,
            shared_parameters_per_s=4.0,
            shared_to_gpu_bytes_per_s=1.0,
            shared_to_ram_bytes_per_s=1.0,
            shared_memory_bytes_per_s=106.0,
        ),
        UpdateFigures(
            threads=2,
            parameters_per_s=10.0,
            memory_bytes_per_s=260.0,
            shared_parameters_per_s=9.0,
            shared_to_gpu_bytes_per_s=2.0,
            shared_to_ram_bytes_per_s=3.0,
            shared_memory_bytes_per_s=239.0,
        ),
    ),
    gpu_update_parameters_per_s=11.0,
    matmul_flops_per_s=12.0,
    flops_per_s=13.0,
)


# ---------------------------------------------------------------------- drives


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
    assert tuple(found.trials) == (drive_probe.THREADS if found.is_direct else ())
    assert found.io_threads in drive_probe.THREADS


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


# ---------------------------------------------------------------------- links and processors


def test_probe_links_on_the_cpu_measures_all() -> None:
    links = link_probe.probe_links(
        "cpu", [2, 1, 2], seconds=SECONDS, copy_bytes=1 << 20, update_elements=1 << 16, matmul_size=64
    )
    assert [update.threads for update in links.updates] == [1, 2]
    rows = [dataclasses.astuple(copies)[1:] for copies in links.copies]
    rows += [dataclasses.astuple(update) for update in links.updates]
    assert all(number > 0 for row in rows for number in row)
    assert links.gpu_update_parameters_per_s == links.updates[-1].parameters_per_s
    assert links.flops_per_s == links.matmul_flops_per_s > 0
    assert "no GPU: the native memory copy stands for the link" in links.notes[0]
    assert not links.flags


@pytest.mark.gpu
def test_probe_links_on_the_gpu_measures_all() -> None:
    links = link_probe.probe_links(
        "cuda", [1], seconds=0.1, copy_bytes=64 << 20, update_elements=1 << 22, matmul_size=1024
    )
    assert len(links.copies) == torch.cuda.device_count()
    assert links.copies[0].device == torch.cuda.get_device_name(0)
    assert 0 < links.flops_per_s < links.matmul_flops_per_s
    assert links.gpu_update_parameters_per_s > 0
    assert not links.flags


def test_layers_on_a_gpu_count_at_their_share_of_a_sustained_product() -> None:
    product, layers = 662e12, 596e12  # an H200, both for seconds: docs/log/2026-11.md
    assert product * link_probe.LAYER_EFFICIENCY["cuda"] == pytest.approx(layers, rel=0.01)
    assert link_probe.link_notes("cuda") == (
        "flops_per_s: 0.9 of a sustained bf16 product, as measured for layers of 8B shape on an H200",
    )


def test_copies_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    with CopyTraffic(torch.device("cpu"), 1 << 20) as copies:
        half = copies._way_bytes
        copies._host.bytes[:half].fill_(1)
        copies._device.bytes[half:].fill_(2)
        turns = itertools.count()
        assert copies.to_gpu(lambda: next(turns) >= COPY_PIECES) > 0
        assert copies.to_ram(lambda: next(turns) >= 3 * COPY_PIECES) > 0
        assert copies._device.bytes[:half].unique().tolist() == [1]
        assert copies._host.bytes[half:].unique().tolist() == [2]


def test_updates_keep_numbers_finite() -> None:
    turns = itertools.count()
    with UpdateTraffic(torch.device("cpu"), 1 << 16) as update:
        update.on_cpu(2, lambda: next(turns) >= 1000)
        moments = update._arena.bytes[4 << 16 : 12 << 16].view(torch.float32)
        assert bool(moments.isfinite().all())
        assert not math.isclose(float(moments[0]), 0.0114, rel_tol=1e-6)


def test_link_flags_tell_what_no_link_carries() -> None:
    assert not link_probe.link_flags(LINKS)
    fast = dataclasses.replace(
        LINKS,
        copies=(
            CopyFigures(
                device="X",
                to_gpu_bytes_per_s=1e9,
                to_ram_bytes_per_s=500e9,
                to_gpu_both_bytes_per_s=1.0,
                to_ram_both_bytes_per_s=1.0,
            ),
        ),
    )
    assert link_probe.link_flags(fast) == ("X: copies at 500 GB/s, more than any link carries",)


# ---------------------------------------------------------------------- rates and their cache


RATES = Rates(
    drives=(),
    to_gpu_bytes_per_s=1.0,
    to_ram_bytes_per_s=2.0,
    update_parameters_per_s=10.0,
    memory_bytes_per_s=239.0,
    gpu_update_parameters_per_s=11.0,
    flops_per_s=13.0,
)


def with_drives(*directories: Path) -> Rates:
    return dataclasses.replace(
        RATES,
        drives=tuple(
            DriveRates(directory=str(path), read_bytes_per_s=6.0, write_bytes_per_s=4.0, mixed_bytes_per_s=5.0)
            for path in directories
        ),
    )


@pytest.fixture
def other_mount(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Makes a directory look like a mount of its own."""
    real, apart = probe.mount_facts, set[Path]()
    monkeypatch.setattr(probe, "mount_facts", lambda path: real(path) | ({"id": str(path)} if path in apart else {}))
    return apart.add


def test_rates_of_takes_the_first_gpu_and_the_most_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Gpu] = []
    monkeypatch.setattr(hardware, "gpus", lambda: found)
    assert probe.rates_of([], LINKS) == RATES

    found += [Gpu("first", 80 << 30, 70 << 30), Gpu("second", 24 << 30, 20 << 30)]
    assert probe.rates_of([], LINKS) == dataclasses.replace(RATES, gpu_bytes=float(80 << 30))

    drive = figures(directory=str(tmp_path))
    assert probe.rates_of([drive], LINKS).drives == (
        DriveRates(
            directory=str(tmp_path), read_bytes_per_s=2 * GB, write_bytes_per_s=2 * GB, mixed_bytes_per_s=2 * GB
        ),
    )


def test_rates_of_mounts_on_one_file_system_are_shared(tmp_path: Path) -> None:
    drive = figures(directory=str(tmp_path))
    assert [one.read_bytes_per_s for one in probe.rates_of([drive, drive], LINKS).drives] == [GB, GB]


def test_io_threads_are_asked_for_or_measured_or_4() -> None:
    eight = DriveRates(directory="a", read_bytes_per_s=1.0, write_bytes_per_s=1.0, mixed_bytes_per_s=1.0, io_threads=8)
    assert probe.io_threads(None, None) == probe.io_threads(None, RATES)
    assert probe.io_threads(None, None)[0] == IoOptions().num_threads
    assert probe.io_threads(None, dataclasses.replace(RATES, drives=(eight,))) == (8, "as `megatier bench` found")
    assert probe.io_threads(None, dataclasses.replace(RATES, drives=(eight, eight)))[0] == 16
    unknown = dataclasses.replace(eight, io_threads=None)
    assert probe.io_threads(None, dataclasses.replace(RATES, drives=(eight, unknown)))[0] == 4
    assert probe.io_threads(None, dataclasses.replace(RATES, drives=(eight,) * 40))[0] == 256
    assert probe.io_threads(3, dataclasses.replace(RATES, drives=(eight,))) == (3, "as set")


def test_cached_threads_first_writes_and_wavering_are_kept_and_shared_on_one_file_system(tmp_path: Path) -> None:
    path, inner = tmp_path / "rates.json", tmp_path / "inner"
    inner.mkdir()
    drive = DriveRates(
        directory=str(tmp_path),
        read_bytes_per_s=6.0,
        write_bytes_per_s=4.0,
        mixed_bytes_per_s=5.0,
        io_threads=8,
        first_write_bytes_per_s=3.0,
        mixed_low_bytes_per_s=4.5,
        mixed_high_bytes_per_s=6.5,
    )
    probe.cache_rates(dataclasses.replace(RATES, drives=(drive,)), "cpu", path)
    for directories in ([tmp_path], [tmp_path, inner]):
        found = probe.cached_rates(directories, "cpu", path)
        assert found is not None
        assert found.io_threads == 8
        assert sum(one.first_write_bytes_per_s or 0 for one in found.drives) == 3
        assert sum(one.mixed_low_bytes_per_s or 0 for one in found.drives) == 4.5
        assert sum(one.mixed_high_bytes_per_s or 0 for one in found.drives) == 6.5
    entries = json.loads(path.read_text())
    for name in ("io_threads", "first_write_bytes_per_s", *WAVERING):  # written before they were measured
        del entries[0]["drives"][0]["rates"][name]
    path.write_text(json.dumps(entries))
    assert probe.cached_rates([tmp_path], "cpu", path) == with_drives(tmp_path)


def test_cached_rates_are_those_measured(tmp_path: Path) -> None:
    path = tmp_path / "cache/rates.json"
    assert probe.cached_rates([], "cpu", path) is None
    assert probe.cache_rates(with_drives(tmp_path), "cpu", path) == path
    assert probe.cached_rates([tmp_path], "cpu", path) == with_drives(tmp_path)
    assert probe.cached_rates([], "cpu", path) == RATES
    assert [entry.name for entry in path.parent.iterdir()] == ["rates.json"]


def test_cached_rates_serve_directories_of_the_same_file_system(tmp_path: Path) -> None:
    path, inner = tmp_path / "rates.json", tmp_path / "inner"
    inner.mkdir()
    probe.cache_rates(with_drives(tmp_path), "cpu", path)
    assert probe.cached_rates([inner], "cpu", path) == with_drives(inner)
    both = probe.cached_rates([tmp_path, inner], "cpu", path)
    assert both is not None
    assert both.drives == tuple(
        DriveRates(directory=str(directory), read_bytes_per_s=3.0, write_bytes_per_s=2.0, mixed_bytes_per_s=2.5)
        for directory in (tmp_path, inner)
    )


def test_cached_rates_of_another_machine_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rates.json"
    probe.cache_rates(RATES, "cpu", path)
    here = platform.node()
    monkeypatch.setattr(platform, "node", lambda: "elsewhere")
    assert probe.cached_rates([], "cpu", path) is None
    probe.cache_rates(dataclasses.replace(RATES, flops_per_s=99.0), "cpu", path)
    monkeypatch.setattr(platform, "node", lambda: here)
    assert probe.cached_rates([], "cpu", path) == RATES


def test_cached_rates_of_other_mounts_are_none(tmp_path: Path, other_mount: Callable[[Path], None]) -> None:
    path, inner = tmp_path / "rates.json", tmp_path / "inner"
    inner.mkdir()
    probe.cache_rates(with_drives(tmp_path), "cpu", path)
    other_mount(inner)
    assert probe.cached_rates([inner], "cpu", path) is None
    assert probe.cached_rates([tmp_path, inner], "cpu", path) is None
    assert probe.cached_rates([tmp_path / "none"], "cpu", path) is None
    assert probe.cached_rates([tmp_path / ("long" * 99)], "cpu", path) is None


def test_cache_keeps_drives_that_were_not_measured_again(tmp_path: Path, other_mount: Callable[[Path], None]) -> None:
    path, inner = tmp_path / "rates.json", tmp_path / "inner"
    inner.mkdir()
    other_mount(inner)
    probe.cache_rates(with_drives(tmp_path), "cpu", path)
    probe.cache_rates(dataclasses.replace(with_drives(inner), flops_per_s=14.0), "cpu", path)
    assert probe.cached_rates([inner, tmp_path], "cpu", path) == dataclasses.replace(
        with_drives(inner, tmp_path), flops_per_s=14.0
    )
    assert len(json.loads(path.read_text())) == 1


@pytest.mark.parametrize(
    "text", ["", "{", "{}", "[1, {}]", '[{"machine": 1, "drives": [], "links": {"old": 1}}]', "\x00"]
)
def test_cache_that_is_damaged_is_empty_and_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rates.json"
    path.write_text(text)
    assert probe.cached_rates([], "cpu", path) is None
    probe.cache_rates(RATES, "cpu", path)
    assert probe.cached_rates([], "cpu", path) == RATES


def test_cache_path_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert probe.cache_path() == tmp_path / "megatier/rates.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert probe.cache_path() == tmp_path / ".cache/megatier/rates.json"
