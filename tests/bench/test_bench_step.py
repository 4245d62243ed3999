"""The rows of a step, by tiny ones on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_step import measure
from peers.shapes import SHAPES, ExpertsShape
from rows import ROWS

from megatier.schedule.drive_rates import DriveRates
from megatier.schedule.rates import Rates
from megatier.setup import machine

MIB = 1 << 20
READ_BYTES_PER_S = 1e9
RATES = Rates(
    drives=(
        DriveRates(directory="a", read_bytes_per_s=READ_BYTES_PER_S, write_bytes_per_s=1e9, mixed_bytes_per_s=1e9),
    ),
    to_gpu_bytes_per_s=1e9,
    to_ram_bytes_per_s=1e9,
    update_parameters_per_s=1e9,
    memory_bytes_per_s=1e9,
    gpu_update_parameters_per_s=1e9,
    flops_per_s=1e9,
)


def tiny_row(number: int, mount: Path, shape: str = "tiny", batch: int = 2, **budgets: int) -> dict[str, Any]:
    """A row with the tiny shape and small budgets, on the CPU."""
    whole = ROWS[number]
    tiers = {"device": "cpu", "state": whole.tiers["state"], "gpu": 16 * MIB, "ram": 16 * MIB} | budgets
    run = replace(whole, shape=shape, batch=batch, sequence=16, tiers=tiers, nvme=16 * MIB)
    row, _ = measure(run, 1, 1, deterministic=True, bound=None, directory=mount, ranks=None)
    return row


def test_row_whose_base_is_read_where_it_lies_has_the_losses_of_the_one_in_block_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    monkeypatch.setattr(machine, "rates_or_assumed", lambda *_: (RATES, ()))
    in_blocks = tiny_row(29, tmp_path)
    in_place = tiny_row(32, tmp_path)
    assert in_place["losses"] == in_blocks["losses"]
    assert in_place["norms"] == in_blocks["norms"]
    assert (in_blocks["units_in_place"], in_place["units_in_place"]) == (0, 7)

    # As many bytes as from block files, all of them demanded, of which the base has no part in the tier.
    assert in_place["moved_bytes"] == in_blocks["moved_bytes"]
    assert in_place["surplus_bytes"] == {}
    assert in_place["drive_seconds"] == in_place["moved_bytes"]["nvme_to_ram"] / READ_BYTES_PER_S > 0
    assert in_place["state_bytes"]["nvme"] < in_blocks["state_bytes"]["nvme"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [37, 38])
def test_row_of_experts_runs_and_says_whether_it_clips(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 37 defers updates and has no drive; row 38 makes them in the backward, with experts in parts."""
    whole = SHAPES[ROWS[number].shape]
    assert isinstance(whole, ExpertsShape)
    small = replace(whole, hidden=64, ffn=32, heads=4, kv_heads=2, head_size=16, layers=2, vocab=256, experts=16)
    monkeypatch.setitem(SHAPES, "tiny experts", small)
    row = tiny_row(number, tmp_path, "tiny experts", batch=4, gpu=MIB, ram=MIB if number == 38 else 16 * MIB)
    assert row["num_parameters"] == small.num_parameters
    assert row["clip"] is (number == 37)
    assert (row["state_bytes"]["nvme"] > 0) is (number == 38)
    assert row["losses"][0] == pytest.approx(5.55, abs=0.3)
