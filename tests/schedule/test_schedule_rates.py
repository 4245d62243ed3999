"""Rates by hand: what is read, and what is refused with the name of the figure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatier.errors import ConfigError
from megatier.schedule.drive_rates import DriveRates
from megatier.schedule.rates import ASSUMED, Rates
from megatier.schedule.rates_file import as_dict, read_rates
from megatier.schedule.world import ONE_PROCESS, World
from megatier.tier import RING_BYTES, Transport

RATES = Rates(
    drives=(
        DriveRates(directory="/mnt/a", read_bytes_per_s=6e9, write_bytes_per_s=5e9, mixed_bytes_per_s=5.5e9),
        DriveRates(directory="/mnt/b", read_bytes_per_s=3e9, write_bytes_per_s=2e9, mixed_bytes_per_s=2.5e9),
    ),
    to_gpu_bytes_per_s=55e9,
    to_ram_bytes_per_s=54e9,
    update_parameters_per_s=6e9,
    memory_bytes_per_s=200e9,
    gpu_update_parameters_per_s=120e9,
    flops_per_s=600e12,
)


def written(directory: Path, text: str) -> Path:
    path = directory / "machine.yaml"
    path.write_text(text)
    return path


def changed(directory: Path, **figures: object) -> Path:
    return written(directory, json.dumps(as_dict(RATES) | figures))


def test_rates_written_as_json_are_read_back(tmp_path: Path) -> None:
    assert read_rates(written(tmp_path, json.dumps(as_dict(RATES)))) == RATES


def test_rates_with_byte_units_are_bytes(tmp_path: Path) -> None:
    drive = {"directory": "a", "read_bytes_per_s": "14GB", "write_bytes_per_s": 1, "mixed_bytes_per_s": "1GiB"}
    rates = read_rates(changed(tmp_path, drives=[drive], to_gpu_bytes_per_s="55 GB"))
    assert rates.to_gpu_bytes_per_s == 55e9
    assert rates.drives == (
        DriveRates(directory="a", read_bytes_per_s=14e9, write_bytes_per_s=1.0, mixed_bytes_per_s=float(1 << 30)),
    )


def test_rates_of_a_drive_may_name_its_io_threads(tmp_path: Path) -> None:
    drive = {"directory": "a", "read_bytes_per_s": 1, "write_bytes_per_s": 1, "mixed_bytes_per_s": 1}
    assert read_rates(changed(tmp_path, drives=[drive])).io_threads is None
    assert read_rates(changed(tmp_path, drives=[drive | {"io_threads": 8}] * 2)).io_threads == 16
    for value in (0, 2.5, "many"):
        with pytest.raises(ConfigError, match=r"io_threads is .* a positive number is expected, such as 8"):
            read_rates(changed(tmp_path, drives=[drive | {"io_threads": value}]))


def test_rates_of_drives_that_waver_have_a_slowest_and_a_fastest(tmp_path: Path) -> None:
    first, second = RATES.drives
    wavers = replace(first, mixed_low_bytes_per_s=4.4e9, mixed_high_bytes_per_s=6.6e9, first_write_bytes_per_s=1e9)
    rates = replace(RATES, drives=(wavers, second))
    assert read_rates(written(tmp_path, json.dumps(as_dict(rates)))) == rates
    slow, fast = rates.slowest.drives, rates.fastest.drives
    figures = [(d.read_bytes_per_s, d.write_bytes_per_s, d.mixed_bytes_per_s) for d in (slow[0], fast[0])]
    assert figures == [pytest.approx((4.8e9, 4e9, 4.4e9)), pytest.approx((7.2e9, 6e9, 6.6e9))]
    assert slow[0].first_write_bytes_per_s == pytest.approx(0.8e9)
    assert slow[1] == fast[1] == second
    assert RATES.slowest == RATES.fastest == RATES


def test_rates_without_drives_have_none(tmp_path: Path) -> None:
    figures = as_dict(RATES)
    del figures["drives"]
    assert read_rates(written(tmp_path, json.dumps(figures))).drives == ()


@pytest.mark.parametrize("value", [0, -1.0, "fast", True, None, float("inf"), float("nan"), [1], 10**400])
def test_rates_figure_that_is_no_positive_number_is_named(tmp_path: Path, value: object) -> None:
    with pytest.raises(ConfigError, match=r"flops_per_s is .* a positive number is expected"):
        read_rates(changed(tmp_path, flops_per_s=value))


def test_rates_names_missing_and_unknown_are_all_told(tmp_path: Path) -> None:
    figures = as_dict(RATES) | {"to_cpu": 1}
    del figures["memory_bytes_per_s"]
    with pytest.raises(ConfigError, match="memory_bytes_per_s is missing; to_cpu is not known"):
        read_rates(written(tmp_path, json.dumps(figures)))


def test_rates_names_that_are_no_text_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1 is not known; None is not known; to_cpu is not known"):
        read_rates(written(tmp_path, json.dumps(as_dict(RATES))[:-1] + ', 1: 2, null: 3, "to_cpu": 1}'))


def test_rates_directory_that_is_no_text_is_refused(tmp_path: Path) -> None:
    drive = as_dict(RATES)["drives"][0] | {"directory": [1]}
    with pytest.raises(ConfigError, match=r"directory is \[1\]; text is expected"):
        read_rates(changed(tmp_path, drives=[drive]))


@pytest.mark.parametrize("drives", ["/mnt/a", ["/mnt/a"], {"/mnt/a": 1}])
def test_rates_drives_of_another_shape_are_refused(tmp_path: Path, drives: object) -> None:
    with pytest.raises(ConfigError, match="drives is a list of drives, each with directory"):
        read_rates(changed(tmp_path, drives=drives))


@pytest.mark.parametrize("text", ["", "- 1\n", "a: [", "word", "a: 2026-13-45", "[" * 5000, "a: &a [*a]"])
def test_rates_file_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"machine\.yaml"):
        read_rates(written(tmp_path, text))


def test_rates_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.yaml: No such file or directory\."):
        read_rates(tmp_path / "none.yaml")


LINKED = replace(
    RATES, gather_bytes_per_s=300e9, scatter_bytes_per_s=200e9, network_bytes_per_s=50e9, ranks_slowdown=0.2
)


def test_rates_of_a_rank_are_its_gpu_and_its_part_of_the_host(tmp_path: Path) -> None:
    assert LINKED.of_rank(ONE_PROCESS) is LINKED
    assert read_rates(written(tmp_path, json.dumps(as_dict(LINKED)))) == LINKED
    of_two = LINKED.of_rank(World(2))
    assert of_two.drives == tuple(drive.times(0.5) for drive in RATES.drives)
    assert (of_two.update_parameters_per_s, of_two.memory_bytes_per_s) == (3e9, 100e9)
    assert (of_two.to_gpu_bytes_per_s, of_two.flops_per_s) == (RATES.to_gpu_bytes_per_s, RATES.flops_per_s)
    assert (of_two.gather_bytes_per_s, of_two.scatter_bytes_per_s) == (300e9, 200e9)
    # A link carries no more than the rank's part of what RAM does.
    assert LINKED.of_rank(World(8)).to_gpu_bytes_per_s == 25e9
    # Two hosts share nothing.
    assert LINKED.of_rank(World(4, 2)).memory_bytes_per_s == 100e9


def test_rates_over_hosts_are_those_of_the_slower_of_links_and_network() -> None:
    """Each of 16 GPUs gets 15 shards: 7 from its host, and 8 from the other one."""
    rank = LINKED.of_rank(World(16, 2))
    # A shard from the other host comes once to a host, over the network of one of its eight GPUs.
    assert rank.gather_bytes_per_s == pytest.approx(300e9)
    assert rank.scatter_bytes_per_s == pytest.approx(15 / (8 / 50e9))
    slow = replace(LINKED, network_bytes_per_s=1e9).of_rank(World(16, 2))
    assert slow.gather_bytes_per_s == pytest.approx(15 * 1e9)
    alone_on_its_host = LINKED.of_rank(World(2, 2))
    assert alone_on_its_host.gather_bytes_per_s == alone_on_its_host.scatter_bytes_per_s == 50e9


def test_rates_name_the_way_of_bytes_between_ranks_of_one_host(tmp_path: Path) -> None:
    shared = replace(LINKED, ranks_way=Transport.RAM)
    assert read_rates(written(tmp_path, json.dumps(as_dict(shared)))) == shared
    assert shared.of_rank(World(2)).ranks_way is Transport.RAM
    assert shared.of_rank(World(4, 2)).ranks_way is None
    with pytest.raises(ConfigError, match=r"ranks_way is 'pigeons'; it is one of copy engines, shared RAM, NCCL"):
        read_rates(changed(tmp_path, ranks_way="pigeons"))


def test_rates_of_links_that_are_not_known_are_assumed_by_name() -> None:
    assert RATES.assumed(ONE_PROCESS) == ()
    assert RATES.assumed(World(2)) == ("gather_bytes_per_s", "scatter_bytes_per_s", "ranks_slowdown")
    assert RATES.assumed(World(4, 2)) == tuple(ASSUMED)
    assert LINKED.assumed(World(4, 2)) == ()
    assert RATES.of_rank(World(2)).gather_bytes_per_s == ASSUMED["gather_bytes_per_s"]


def test_rates_with_a_limit_of_page_locked_ram_tell_the_shares_that_rings_leave() -> None:
    gib = 1 << 30
    assert RATES.locked_shares(gib, 1 << 40) == (1, 1)
    limited = RATES.with_locked(RING_BYTES + gib)
    assert limited.locked_shares(RING_BYTES, gib) == (1, 1)
    assert limited.locked_shares(4 * gib, gib) == (0.25, 0)
    assert limited.locked_shares(gib // 2, 2 * gib) == (1, 0.25)
    assert limited.locked_shares(0, 4 * gib) == (0, 0.25)
    assert limited.with_locked(1 << 20).locked_shares(gib, gib) == (0, 0)
    assert limited.with_locked(None) == limited.with_locked(1 << 50) == limited
    assert limited.of_rank(World(2, 1)).locked_bytes == (RING_BYTES + gib) / 2


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "examples/machines").iterdir()), ids=lambda p: p.stem
)
def test_rates_of_every_example_are_read_and_say_how_large_its_gpu_is(path: Path) -> None:
    rates = read_rates(path)
    assert rates.gpu_bytes is not None
    assert rates.drives
