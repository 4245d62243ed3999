"""The lanes of a machine: rates, and shares of what several of them use."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_timelines import RATES

from megatier.forecast.lanes import lanes_of
from megatier.schedule.drive_rates import DriveRates
from megatier.schedule.rates import UPDATE_BYTES
from megatier.tier import Transport


def test_lanes_of_ranks_that_share_ram_take_the_links_of_a_gpu_and_ram() -> None:
    """A rank of three sends a byte for each two that it gathers, and a byte for each one that it scatters."""
    rates = replace(
        RATES,
        gather_bytes_per_s=8e9,
        scatter_bytes_per_s=6e9,
        to_gpu_bytes_per_s=10e9,
        to_ram_bytes_per_s=5e9,
        memory_bytes_per_s=40e9,
        ranks_slowdown=0.2,
        ranks_way=Transport.RAM,
    )
    lanes = lanes_of(rates, num_ranks=3)
    assert lanes["gather"].rate == 8e9
    assert lanes["gather"].uses == pytest.approx({"memory": 0.3, "processors": 0.2, "to_gpu": 0.8, "to_ram": 0.8})
    assert lanes["scatter"].rate == 5e9  # no more than its link carries
    assert lanes["scatter"].uses == pytest.approx({"memory": 0.25, "processors": 0.2, "to_gpu": 0.5, "to_ram": 1.0})
    for way in (None, Transport.COPIES, Transport.KERNELS):
        assert lanes_of(replace(rates, ranks_way=way), num_ranks=3)["gather"].uses == {"processors": 0.2}


def test_lanes_of_ram_that_is_not_page_locked_take_the_rate_of_rings_and_share_their_threads() -> None:
    rates = replace(RATES, to_gpu_bytes_per_s=60e9, to_ram_bytes_per_s=50e9, memory_bytes_per_s=120e9)
    assert lanes_of(rates)["ram_to_gpu"].rate == pytest.approx(60e9)
    assert lanes_of(rates)["ram_to_gpu"].uses["ring"] == 0

    # A byte costs three of memory traffic, as long as nobody has measured rings.
    assert lanes_of(rates, locked=(0.0, 0.0))["ram_to_gpu"].rate == pytest.approx(40e9)
    measured = replace(rates, ring_to_gpu_bytes_per_s=30e9, ring_to_ram_bytes_per_s=20e9)
    lanes = lanes_of(measured, locked=(0.0, 0.0))
    assert lanes["state_to_gpu"].rate == pytest.approx(30e9)
    assert lanes["gpu_to_ram"].rate == lanes["state_to_ram"].rate == pytest.approx(20e9)
    assert lanes["ram_to_gpu"].uses == pytest.approx({"memory": 0.75, "ring": 1.0, "to_gpu": 0.5})

    # A third of the bytes takes the link at once: 1/3 at 60 GB/s and 2/3 at 30 GB/s.
    lane = lanes_of(measured, locked=(1 / 3, 0.0))["ram_to_gpu"]
    assert lane.rate == pytest.approx(36e9)
    assert lane.uses["ring"] == pytest.approx(0.8)
    assert lanes_of(measured, locked=(1 / 3, 0.0))["state_to_gpu"].rate == pytest.approx(30e9)


def test_lanes_of_drives_reach_the_mixed_rate_when_an_update_reads_and_writes_at_once() -> None:
    """14 bytes read at 7 GB/s and 12 written at 6 take 4 s in turn, and 2.6 s at a mixed rate of 10 GB/s."""
    drive = DriveRates(directory="a", read_bytes_per_s=7e9, write_bytes_per_s=6e9, mixed_bytes_per_s=10e9)
    lanes = lanes_of(replace(RATES, drives=(drive,), to_gpu_bytes_per_s=14e9))
    assert lanes["nvme_to_ram"].uses["disk"] == pytest.approx(2.6 / 4)
    assert lanes["ram_to_nvme"].uses["disk"] == pytest.approx(2.6 / 4)
    assert lanes["nvme_to_gpu"].uses["to_gpu"] == pytest.approx(0.5)


def test_lanes_of_unified_memory_read_and_write_it_in_copies_and_updates() -> None:
    rates = replace(RATES, to_gpu_bytes_per_s=10e9, gpu_update_parameters_per_s=1e9, memory_bytes_per_s=40e9)
    apart, unified = lanes_of(rates), lanes_of(replace(rates, unified_bytes=1e11))
    assert apart["ram_to_gpu"].uses["memory"] == 0.25
    assert unified["ram_to_gpu"].uses["memory"] == 0.5
    assert apart["update_gpu"].uses == {}
    assert unified["update_gpu"].uses == pytest.approx({"memory": UPDATE_BYTES / 40})
