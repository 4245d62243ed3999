"""Rates of common GPUs from their makers' data sheets, for plans of machines that were not measured.

Sources, all by NVIDIA: the white papers of the architectures GA102 (RTX 3090), Ada (RTX 4090), RTX Blackwell (RTX 5090)
and Grace Hopper (GH200), and the data sheets of A100, L40S, H100, H200, RTX Pro 6000 Blackwell and DGX Spark (GB10).
FLOPs are those of dense products of bf16 with sums in fp32; many sheets print twice as many, for sparse ones. That of
DGX Spark has FP4 alone, of which bf16 is one part in eight.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FLOPS_SHARE = 0.6
"""Share of the FLOPs of a data sheet that layers reach, as measured on an H200: 590 of 989 TFLOP/s."""
MEMORY_SHARE = 0.87
"""Share of the memory rate of a data sheet that AdamW reaches, as measured on an H200: 4.16 of 4.8 TB/s."""
PCIE_4 = 25e9
"""Bytes a second that copies reach in each direction over PCIe 4.0 with 16 lanes."""
PCIE_5 = 50e9
"""The same over PCIe 5.0."""


@dataclass(frozen=True, slots=True)
class DataSheet:
    """One GPU as its maker describes it."""

    name: str
    """A pattern of the name that CUDA gives it."""
    sheet_flops_per_s: float
    """Dense products of bf16, with sums in fp32."""
    sheet_memory_bytes_per_s: float
    """What its memory carries."""
    link_bytes_per_s: float
    """What copies between RAM and the GPU reach in each direction, in a slot that is as fast as the card."""

    @property
    def flops_per_s(self) -> float:
        """The rate that layers are taken to reach."""
        return FLOPS_SHARE * self.sheet_flops_per_s

    @property
    def memory_bytes_per_s(self) -> float:
        """The rate that AdamW is taken to reach."""
        return MEMORY_SHARE * self.sheet_memory_bytes_per_s


DATA_SHEETS = (
    DataSheet("RTX 3090", 71e12, 936e9, PCIE_4),
    DataSheet("RTX 4090", 165e12, 1008e9, PCIE_4),
    DataSheet("RTX 5090", 210e12, 1792e9, PCIE_5),
    DataSheet("RTX PRO 6000 Blackwell", 504e12, 1792e9, PCIE_5),
    DataSheet("L40S", 362e12, 864e9, PCIE_4),
    DataSheet("A100.*40GB", 312e12, 1555e9, PCIE_4),
    DataSheet("A100", 312e12, 1935e9, PCIE_4),
    DataSheet("H100 PCIe", 756e12, 2000e9, PCIE_5),
    DataSheet("H100", 989e12, 3350e9, PCIE_5),
    DataSheet("H200", 989e12, 4800e9, PCIE_5),
    # Its link was measured: 375 GB/s to the GPU and 297 back (arXiv 2407.07850). The sheet says 450.
    DataSheet("GH200", 989e12, 4000e9, 297e9),
    # A copy stays within one memory, which it reads and writes.
    DataSheet("GB10", 125e12, 273e9, 120e9),
)
"""The first whose pattern is in the name of a GPU counts."""


def data_sheet_of(name: str) -> DataSheet | None:
    """Return the data sheet of a GPU by the name that CUDA gives it; None: it has none here."""
    # The card of a laptop has the name of a faster one.
    if "Laptop" in name:
        return None
    return next((sheet for sheet in DATA_SHEETS if re.search(rf"\b{sheet.name}\b", name)), None)
