"""The rates of a machine, from a probe's figures, and the cache that keeps them."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Callable
from pathlib import Path

import pytest
from probe_figures import GB, LINKS, figures

from megatier import hardware
from megatier.drives.blockfile import IoOptions
from megatier.hardware import Gpu
from megatier.measure import probe
from megatier.measure.data_sheets import data_sheet_of
from megatier.schedule.drive_rates import DriveRates
from megatier.schedule.rates import UPDATE_BYTES, Rates
from megatier.schedule.rates_file import MIXED_RANGE

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
    for name in ("io_threads", "first_write_bytes_per_s", *MIXED_RANGE):  # written before they were measured
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


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090", "one that nobody knows"])
def test_rates_that_are_assumed_of_a_gpu_are_those_of_its_data_sheet(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(hardware, "gpus", lambda: [Gpu(name, 24 << 30, 20 << 30, compute_capability=8.9)])
    rates, assumed = probe.rates_or_assumed([], "cuda")
    sheet = data_sheet_of(name) or probe.UNKNOWN_GPU
    assert rates.flops_per_s == sheet.flops_per_s
    assert rates.gpu_update_parameters_per_s == sheet.memory_bytes_per_s / UPDATE_BYTES
    assert rates.to_gpu_bytes_per_s == rates.to_ram_bytes_per_s == sheet.link_bytes_per_s
    assert (rates.gpu_bytes, rates.compute_capability) == (24 << 30, 8.9)
    assert "flops_per_s" in assumed
    assert not probe.OF_GPU & set(assumed)
