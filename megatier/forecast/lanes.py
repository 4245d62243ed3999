"""The lanes of a machine for the simulation: the rate of each, and its share of links, drives and memory. Pure."""

from __future__ import annotations

from megatier.forecast.simulate import Lane
from megatier.schedule.rates import UPDATE_BYTES, UPDATE_READ_BYTES, UPDATE_WRITTEN_BYTES, Rates
from megatier.schedule.unit_spec import UnitSpec
from megatier.tier import Transport

MOVE_TRAFFIC = 2
"""Bytes of memory traffic for each byte that a drive reads or writes: the drive moves it, and the checksum reads it."""
RING_TRAFFIC = 3
"""Bytes of memory traffic for each byte through a ring: the host reads and writes it, and the GPU reads or writes
it."""
COLLECTIVES = ("gather", "scatter")
"""The two lanes that stand for the queue `ranks`, because all-gathers and reduce-scatters have different rates."""


def queue_of(lane: str) -> str:
    """Return the name that a plan has for a lane of the simulation."""
    return "ranks" if lane in COLLECTIVES else lane


def adamw_work(spec: UnitSpec, *, elsewhere: bool = False) -> float:
    """Return the work of AdamW on a unit, in the parameters by which rates count.

    Args:
        spec: the sizes of the unit.
        elsewhere: whether the new state goes to another place than the old.
    """
    # State is read and written. In another place the processor also fetches the bytes that it overwrites.
    schema = spec.schema
    passes = 3 if elsewhere else 2
    traffic = passes * schema.bytes_per_parameter + schema.grad_width
    return spec.num_trained * traffic / UPDATE_BYTES


def lanes_of(
    rates: Rates, num_ranks: int = 1, *, multiplies: bool = False, locked: tuple[float, float] = (1.0, 1.0)
) -> dict[str, Lane]:
    """Return the lanes of a machine, by name, with their shares of drives, links and RAM.

    Args:
        rates: the rates of the machine; for one of several ranks those of `Rates.of_rank`.
        num_ranks: the number of ranks.
        multiplies: whether updates on the GPU multiply matrices, so that they share its processors with compute.
        locked: the pinned share of the RAM that compute waits for, and of other state. All other bytes pass through
            rings, which share their threads.
    """
    # AdamW on the GPU is bound by its memory, and takes few processors from compute.
    products = {"processors": 1.0} if multiplies else {}
    update_gpu = Lane(rates.gpu_update_parameters_per_s, products)
    if rates.unified_bytes is not None:
        # AdamW on the GPU then uses the bandwidth of RAM. What compute uses of it is part of its measured rate.
        update_gpu = _in_memory(rates, update_gpu.rate, UPDATE_BYTES, **products)
    awaited, other = locked
    lanes = {
        "host": Lane(1.0),
        "compute": Lane(1.0, products),
        **_drive_lanes(rates),
        "ram_to_gpu": _to_gpu(rates, awaited),
        "state_to_gpu": _to_gpu(rates, other),
        "gpu_to_ram": _to_ram(rates, awaited),
        "state_to_ram": _to_ram(rates, other),
        "update": _in_memory(rates, rates.update_parameters_per_s, UPDATE_BYTES),
        "update_nvme": _in_memory(rates, rates.update_parameters_per_s, UPDATE_BYTES),
        "update_gpu": update_gpu,
    }
    if num_ranks > 1:
        lanes |= _rank_lanes(rates, num_ranks)
    return lanes


def _in_memory(rates: Rates, rate: float, traffic: float, **uses: float) -> Lane:
    """Return a lane that uses a share of the bandwidth of RAM.

    Args:
        rates: those of the machine.
        rate: bytes or parameters a second.
        traffic: bytes of memory traffic for each byte or parameter.
        uses: the share of each other resource at the full rate.
    """
    # The two rates were measured at different times, so the share may exceed 1.
    share = rate * traffic / rates.memory_bytes_per_s
    return Lane(rate, {"memory": min(1.0, share), **uses})


def _drive_lanes(rates: Rates) -> dict[str, Lane]:
    """Return the queues that read and write drives.

    An update reads R bytes of a parameter on NVMe and writes W. At the same time these take (R + W) / mixed seconds,
    and one after the other R / read + W / write. Each direction uses the quotient of the two as its share of the
    drives, so that both together reach the mixed rate.
    """
    # Without drives nothing moves on these lanes, so any rate will do.
    drives = rates.drives
    read = sum(drive.read_bytes_per_s for drive in drives) or 1.0
    write = sum(drive.write_bytes_per_s for drive in drives) or 1.0
    mixed = sum(drive.mixed_bytes_per_s for drive in drives) or 1.0

    at_once_s = UPDATE_BYTES / mixed
    in_turn_s = UPDATE_READ_BYTES / read + UPDATE_WRITTEN_BYTES / write
    disk = at_once_s / in_turn_s

    # Reads past RAM use the link to the GPU too.
    link = min(1.0, read / rates.to_gpu_bytes_per_s)
    return {
        "nvme_to_ram": _in_memory(rates, read, MOVE_TRAFFIC, disk=disk),
        "nvme_to_gpu": _in_memory(rates, read, MOVE_TRAFFIC, disk=disk, to_gpu=link),
        "ram_to_nvme": _in_memory(rates, write, MOVE_TRAFFIC, disk=disk),
    }


def _to_gpu(rates: Rates, locked: float) -> Lane:
    """Return a queue that copies to the GPU from RAM with this pinned share."""
    return _copies(rates, "to_gpu", rates.to_gpu_bytes_per_s, rates.ring_to_gpu_bytes_per_s, locked)


def _to_ram(rates: Rates, locked: float) -> Lane:
    """Return a queue that copies from the GPU to RAM with this pinned share."""
    return _copies(rates, "to_ram", rates.to_ram_bytes_per_s, rates.ring_to_ram_bytes_per_s, locked)


def _copies(rates: Rates, link: str, full: float, ring: float | None, locked: float) -> Lane:
    """Return a queue that copies between RAM and the GPU.

    Args:
        rates: those of the machine.
        link: the name of the link.
        full: bytes a second of pinned RAM.
        ring: bytes a second through a ring; None: not known.
        locked: the pinned share of the bytes.
    """
    # In unified memory both ends of a copy use the bandwidth of RAM.
    other_end = 0 if rates.unified_bytes is None else 1

    # A ring that was not measured is assumed to be bound by RAM.
    through_ring = min(full, ring or rates.memory_bytes_per_s / (RING_TRAFFIC + other_end))

    # Pinned bytes move at the rate of the link, all others at that of the ring, and the seconds add up.
    staged = 1 - locked
    staged_s = staged / through_ring
    locked_s = locked / full
    rate = 1 / (locked_s + staged_s)

    # All bytes use the link, but only staged ones use the threads of the rings.
    uses = {"ring": rate * staged_s, link: rate / full}
    traffic = locked + staged * RING_TRAFFIC + other_end
    return _in_memory(rates, rate, traffic, **uses)


def _rank_lanes(rates: Rates, num_ranks: int) -> dict[str, Lane]:
    """Return the lanes of compute and of the two collectives for one of several ranks.

    Collectives use the share `ranks_slowdown` of the GPU's processors, so compute is slower beside them.
    """
    # `Rates.of_rank` replaces rates that were not measured.
    assert rates.gather_bytes_per_s and rates.scatter_bytes_per_s
    processors = {"processors": min(1.0, rates.ranks_slowdown or 1.0)}
    lanes = {
        "compute": Lane(1.0, {"processors": 1.0}),
        "gather": Lane(rates.gather_bytes_per_s, processors),
        "scatter": Lane(rates.scatter_bytes_per_s, processors),
    }
    if rates.ranks_way is not Transport.RAM:
        return lanes

    # For each byte that comes from shared RAM the rank sends some itself: in an all-gather its shard, which all others
    # read, and in an all-to-all one piece for each of them.
    to_gpu = rates.to_gpu_bytes_per_s
    to_ram = rates.to_ram_bytes_per_s
    sent_bytes = {"gather": 1 / (num_ranks - 1), "scatter": 1.0}
    for name, sent in sent_bytes.items():
        rate = min(lanes[name].rate, to_gpu, to_ram / sent)
        links = {"to_gpu": rate / to_gpu, "to_ram": rate * sent / to_ram}
        lanes[name] = _in_memory(rates, rate, 1 + sent, **processors, **links)
    return lanes
