"""Passes over units a, b and c that fit into one slot each, and where their state is at home."""

from __future__ import annotations

from megatier.schedule.drive_rates import DriveRates
from megatier.schedule.placement import Placement
from megatier.schedule.rates import Rates
from megatier.schedule.slots import SlotPlan
from megatier.schedule.timeline import Access, Load, ReduceScatter, Timeline, Update
from megatier.tier import STATE_KINDS, Kind, Phase, Tier

RATES = Rates(
    drives=(DriveRates(directory="a", read_bytes_per_s=3e9, write_bytes_per_s=2e9, mixed_bytes_per_s=2.5e9),),
    to_gpu_bytes_per_s=50e9,
    to_ram_bytes_per_s=50e9,
    update_parameters_per_s=5e9,
    memory_bytes_per_s=150e9,
    gpu_update_parameters_per_s=150e9,
    flops_per_s=1e12,
)
"""A machine with one GPU and one drive, for plans."""

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
        activation_homes={},
        grad_homes={unit: Tier.GPU if unit in gpu else grads for unit in units},
    )


def planned_loads(timeline: Timeline) -> list[Load]:
    """The loads that no update feeds."""
    return [item for item in timeline.items if isinstance(item, Load)]


def planned_updates(timeline: Timeline) -> list[Update]:
    """The updates, but for those that loads make."""
    return [item for item in timeline.items if isinstance(item, Update)]


def planned_reduce_scatters(timeline: Timeline) -> list[ReduceScatter]:
    """The scatters."""
    return [item for item in timeline.items if isinstance(item, ReduceScatter)]
