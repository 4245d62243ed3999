"""Lanes of a machine: how fast each one is alone, and what part of links, drives and memory it takes then. Pure."""

from __future__ import annotations

from megatier.forecast.simulate import Lane
from megatier.schedule.rates import UPDATE_BYTES, UPDATE_READ_BYTES, UPDATE_WRITTEN_BYTES, Rates
from megatier.tier import Transport

MOVE_TRAFFIC = 2
"""Bytes of memory traffic for each byte that a drive reads or writes: the drive moves it, and its checksum reads it."""
RING_TRAFFIC = 3
"""Bytes of memory traffic for each byte that passes through a ring: the host reads and writes it, then the GPU reads or
writes it."""
COLLECTIVES = ("gather", "scatter")
"""Lanes that stand for the queue `ranks` in a simulation, because each has a rate of its own."""


def queue_of(lane: str) -> str:
    """Return the name that a plan has for a lane of the simulation."""
    return "ranks" if lane in COLLECTIVES else lane


def lanes_of(
    rates: Rates, num_ranks: int = 1, *, multiplies: bool = False, locked: tuple[float, float] = (1.0, 1.0)
) -> dict[str, Lane]:
    """Return the lanes of a machine, with the drives and the host's memory that they share.

    Args:
        rates: those of the machine; of one of several ranks, those of `Rates.of_rank`.
        num_ranks: the number of ranks.
        multiplies: whether updates on the GPU multiply matrices. Then they and compute share its processors.
        locked: the share of RAM that is page-locked: of bytes that compute waits for, and of other state. All other
            bytes pass through rings, which share their threads.
    """
    # AdamW on the GPU is bound by its memory, and takes few processors from compute.
    products = {"processors": 1.0} if multiplies else {}
    update_gpu = Lane(rates.gpu_update_parameters_per_s, products)
    if rates.unified_bytes is not None:
        # That memory is the host's. What compute takes of it is in its own rate.
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
    """Return a lane that takes part of the host's memory.

    Args:
        rates: those of the machine.
        rate: bytes or parameters that the lane does in a second.
        traffic: bytes of memory traffic for each of them.
        uses: the share of each other resource that the lane takes at its full rate.
    """
    # Both were measured at different times, so the share may come out above 1.
    share = rate * traffic / rates.memory_bytes_per_s
    return Lane(rate, {"memory": min(1.0, share), **uses})


def _drive_lanes(rates: Rates) -> dict[str, Lane]:
    """Return the queues that read and write drives.

    An update reads R bytes of a parameter that spills, and writes W. At once, these take (R + W) / mixed seconds; one
    after the other they would take R / read + W / write. So each direction uses this share of the drives at its full
    rate, and both together get the mixed rate.
    """
    # Without drives nothing moves on these lanes, and any rate will do.
    drives = rates.drives
    read = sum(drive.read_bytes_per_s for drive in drives) or 1.0
    write = sum(drive.write_bytes_per_s for drive in drives) or 1.0
    mixed = sum(drive.mixed_bytes_per_s for drive in drives) or 1.0

    at_once_s = UPDATE_BYTES / mixed
    in_turn_s = UPDATE_READ_BYTES / read + UPDATE_WRITTEN_BYTES / write
    disk = at_once_s / in_turn_s

    # What goes past RAM takes the link as well.
    link = min(1.0, read / rates.to_gpu_bytes_per_s)
    return {
        "nvme_to_ram": _in_memory(rates, read, MOVE_TRAFFIC, disk=disk),
        "nvme_to_gpu": _in_memory(rates, read, MOVE_TRAFFIC, disk=disk, to_gpu=link),
        "ram_to_nvme": _in_memory(rates, write, MOVE_TRAFFIC, disk=disk),
    }


def _to_gpu(rates: Rates, locked: float) -> Lane:
    """Return a queue that copies RAM to the GPU, of which this share is page-locked."""
    return _copies(rates, "to_gpu", rates.to_gpu_bytes_per_s, rates.ring_to_gpu_bytes_per_s, locked)


def _to_ram(rates: Rates, locked: float) -> Lane:
    """Return a queue that copies from the GPU to RAM, of which this share is page-locked."""
    return _copies(rates, "to_ram", rates.to_ram_bytes_per_s, rates.ring_to_ram_bytes_per_s, locked)


def _copies(rates: Rates, link: str, full: float, ring: float | None, locked: float) -> Lane:
    """Return a queue that copies between RAM and the GPU.

    Args:
        rates: those of the machine.
        link: the resource that it uses.
        full: bytes a second of page-locked RAM.
        ring: bytes a second through a ring; None: not known.
        locked: the share of the bytes that is page-locked.
    """
    # In unified memory the GPU's end of a copy is in the host's memory too.
    other_end = 0 if rates.unified_bytes is None else 1

    # A ring that nobody has measured is bound by memory.
    through_ring = min(full, ring or rates.memory_bytes_per_s / (RING_TRAFFIC + other_end))

    # One part of the bytes goes at the rate of the link and the other at that of the ring, so their seconds add up.
    staged = 1 - locked
    staged_s = staged / through_ring
    locked_s = locked / full
    rate = 1 / (locked_s + staged_s)

    # The link is busy with all of them, and the threads of rings with those alone that are staged.
    uses = {"ring": rate * staged_s, link: rate / full}
    traffic = locked + staged * RING_TRAFFIC + other_end
    return _in_memory(rates, rate, traffic, **uses)


def _rank_lanes(rates: Rates, num_ranks: int) -> dict[str, Lane]:
    """Return compute and the two collectives of one of several ranks.

    Collectives take the share `ranks_slowdown` of the GPU's processors, so compute is slower beside them.
    """
    # `Rates.of_rank` has filled in what nobody measured.
    assert rates.gather_bytes_per_s and rates.scatter_bytes_per_s
    processors = {"processors": min(1.0, rates.ranks_slowdown or 1.0)}
    lanes = {
        "compute": Lane(1.0, {"processors": 1.0}),
        "gather": Lane(rates.gather_bytes_per_s, processors),
        "scatter": Lane(rates.scatter_bytes_per_s, processors),
    }
    if rates.ranks_way is not Transport.RAM:
        return lanes

    # Bytes of the rank itself go to RAM for each byte that comes from there: its shard, which all others read, or a
    # piece for each of them.
    to_gpu = rates.to_gpu_bytes_per_s
    to_ram = rates.to_ram_bytes_per_s
    sent_bytes = {"gather": 1 / (num_ranks - 1), "scatter": 1.0}
    for name, sent in sent_bytes.items():
        rate = min(lanes[name].rate, to_gpu, to_ram / sent)
        links = {"to_gpu": rate / to_gpu, "to_ram": rate * sent / to_ram}
        lanes[name] = _in_memory(rates, rate, 1 + sent, **processors, **links)
    return lanes
