"""Passes over units a, b and c that fit into one slot each, and where their state is at home."""

from __future__ import annotations

from megatier.schedule.placement import Placement
from megatier.schedule.slots import SlotPlan
from megatier.schedule.timeline import Access
from megatier.tier import STATE_KINDS, Kind, Phase, Tier

SIZE = 2048


def accesses(order: str) -> list[Access]:
    return [Access(unit, Phase.FORWARD, 0) for unit in order]


def placement(
    units: str, num_slots: int, *, gpu: str = "", ram: str = "", grads: Tier | None = Tier.RAM, split: bool = True
) -> Placement:
    """Units on NVMe but those named; `ram` has their weight planes alone there."""
    homes = {}
    for unit in units:
        for kind in STATE_KINDS:
            on_ram = unit in ram and kind is Kind.WEIGHT
            homes[unit, kind] = Tier.GPU if unit in gpu else Tier.RAM if on_ram else Tier.NVME
    slots = (SlotPlan(tier=Tier.GPU, kind=Kind.WEIGHT, slot_bytes=SIZE * (2 if split else 4), num_slots=num_slots),)
    return Placement(
        homes=homes,
        slots=slots,
        chunk_elements=SIZE,
        grad_homes={unit: Tier.GPU if unit in gpu else grads for unit in units},
    )
