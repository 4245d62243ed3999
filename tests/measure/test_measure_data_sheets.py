"""What makers say of GPUs, the names by which they are found, and the example machines that have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatier.measure.data_sheets import DATA_SHEETS, data_sheet_of
from megatier.schedule.rates import UPDATE_BYTES
from megatier.schedule.rates_file import read_rates

MACHINES = Path(__file__).parents[2] / "examples/machines"
NAMES = {
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA GeForce RTX 5090": "rtx-5090",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtx-pro-6000",
    "NVIDIA L40S": "l40s",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100-64-cores",
    "NVIDIA H200": "h200",
}
"""Cards as CUDA names them, and the files of machines that have them."""


@pytest.mark.parametrize(("name", "pattern"), [("NVIDIA A100-PCIE-40GB", "A100.*40GB"), ("NVIDIA H100 PCIe", "H100 P")])
def test_data_sheet_of_a_variant_is_its_own(name: str, pattern: str) -> None:
    found = data_sheet_of(name)
    assert found is not None
    assert found.name.startswith(pattern)


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GH200X", "", "cpu"])
def test_data_sheet_of_another_gpu_is_none(name: str) -> None:
    assert data_sheet_of(name) is None


@pytest.mark.parametrize("name", NAMES)
def test_machine_with_a_card_has_rates_that_its_data_sheet_allows(name: str) -> None:
    sheet = data_sheet_of(name)
    assert sheet is not None
    rates = read_rates(MACHINES / f"{NAMES[name]}.yaml")
    assert 0.55 <= rates.flops_per_s / sheet.sheet_flops_per_s <= 0.75
    assert 0.8 <= rates.gpu_update_parameters_per_s * UPDATE_BYTES / sheet.sheet_memory_bytes_per_s <= 0.9
    assert rates.to_gpu_bytes_per_s == pytest.approx(sheet.link_bytes_per_s, rel=0.07)
    assert rates.compute_capability is not None


def test_data_sheets_are_all_of_some_machine_or_variant() -> None:
    used = {sheet.name for name in NAMES if (sheet := data_sheet_of(name))}
    assert {sheet.name for sheet in DATA_SHEETS} - used == {"A100.*40GB", "H100 PCIe", "GH200", "GB10"}
