"""The rates of a machine: what its links, drives and processors do a second. Pure.

`megatier bench` measures them, `rates_file` reads and writes them, and plans and forecasts are made from them.
`of_rank` gives the share of them that one of several ranks has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megatier.schedule.drive_rates import DriveRates
from megatier.schedule.world import World
from megatier.tier import RING_BYTES, Transport

UPDATE_READ_BYTES = 14
"""Bytes that AdamW reads of one parameter with bf16 compute and fp32 moments: its state and its gradient."""
UPDATE_WRITTEN_BYTES = 12
"""Bytes that it writes: the state."""
UPDATE_BYTES = UPDATE_READ_BYTES + UPDATE_WRITTEN_BYTES
"""Memory traffic of that update. Update rates count such parameters; one with another schema counts in proportion to
its bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """The rates of one machine."""

    drives: tuple[DriveRates, ...]
    """The drives of the NVMe tier."""
    to_gpu_bytes_per_s: float
    """Rate of copies from pinned RAM, with nothing else going on."""
    to_ram_bytes_per_s: float
    """Rate of copies to pinned RAM, with nothing else going on."""
    update_parameters_per_s: float
    """Rate of AdamW on the CPU, with all threads, split masters and nothing else going on."""
    memory_bytes_per_s: float
    """Bandwidth of RAM when AdamW and copies in both directions share it."""
    gpu_update_parameters_per_s: float
    """Rate of AdamW on the GPU."""
    flops_per_s: float
    """Rate of the matrix products in a layer's forward and backward at the compute dtype, as models reach it."""
    fp8_flops_per_s: float | None = None
    """The same for products in FP8, the time to round numbers to FP8 included; None: not known."""
    gpu_bytes: float | None = None
    """Memory of the GPU; None: not known, so that a plan cannot say whether activations fit."""
    compute_capability: float | None = None
    """CUDA's number for the generation of the GPU, such as 8.9; None: not known. It decides the kernels of attention
    and of FP8 products."""
    gather_bytes_per_s: float | None = None
    """Bytes a GPU receives a second in an all-gather of weights among the GPUs of its host; None: not known."""
    scatter_bytes_per_s: float | None = None
    """Bytes a GPU receives a second in a reduce-scatter of gradients among the GPUs of its host; None: not known."""
    network_bytes_per_s: float | None = None
    """Bytes a GPU receives a second from other hosts, while all GPUs of its host do so; None: not known."""
    ranks_slowdown: float | None = None
    """Seconds that compute loses for each second of collectives beside it, at most 1; None: not known. It is about 0.2
    if copy engines move the bytes, and about 1 if kernels do."""
    ranks_way: Transport | None = None
    """The transport with which collectives were measured; None: not known. Shared RAM takes a part of the links between
    GPU and RAM, and of the bandwidth of RAM."""

    unified_bytes: float | None = None
    """Memory that GPU and CPU share, as with an integrated GPU; None: each has its own."""
    locked_bytes: float | None = None
    """RAM that can be pinned; None: no limit is known."""
    ring_to_gpu_bytes_per_s: float | None = None
    """Rate of copies through a ring from RAM that is not pinned; None: not known."""
    ring_to_ram_bytes_per_s: float | None = None
    """Rate of copies through a ring to RAM that is not pinned; None: not known."""

    def gpu_bytes_beside(self, ram_bytes: int) -> float | None:
        """Return the GPU memory that is left beside a RAM budget. Only unified memory shrinks by it. None: not known.

        Args:
            ram_bytes: the RAM budget of the host.
        """
        if self.unified_bytes is None or self.gpu_bytes is None:
            return self.gpu_bytes
        return min(self.gpu_bytes, max(0.0, self.unified_bytes - ram_bytes))

    def locked_shares(self, awaited_bytes: int, other_bytes: int) -> tuple[float, float]:
        """Return the pinned share of the RAM that compute waits for, and that of all other RAM.

        Rings are pinned first, then what compute waits for, then the rest.
        """
        total_bytes = awaited_bytes + other_bytes
        if self.locked_bytes is None or total_bytes <= self.locked_bytes:
            return 1.0, 1.0

        left = max(0.0, self.locked_bytes - RING_BYTES)
        awaited = min(left, awaited_bytes)
        left -= awaited

        # The share of zero bytes does not matter, but must not divide by zero.
        awaited_share = awaited / max(1, awaited_bytes)
        other_share = left / max(1, other_bytes)
        return awaited_share, min(1.0, other_share)

    def with_locked(self, locked_bytes: int | None) -> Rates:
        """Return the machine with a limit of pinned RAM that a user has set; None: no limit."""
        limits = [limit for limit in (self.locked_bytes, locked_bytes) if limit is not None]
        return dataclasses.replace(self, locked_bytes=min(limits, default=None))

    def assumed(self, world: World) -> tuple[str, ...]:
        """Return the names of the rates between ranks that are not known, for which `of_rank` takes `ASSUMED`."""
        if world.num_ranks == 1:
            return ()

        assumed = []

        # The network matters only between hosts.
        for name in ASSUMED:
            is_needed = name != "network_bytes_per_s" or world.num_hosts > 1
            if is_needed and getattr(self, name) is None:
                assumed.append(name)
        return tuple(assumed)

    def of_rank(self, world: World) -> Rates:
        """Return the rates that one of several ranks has: its own GPU, and its share of what the host's ranks share.

        The rates of collectives are then those from all other ranks, over links and network at the same time. An
        all-gather brings each byte of other hosts to a host once, spread over its GPUs. A reduce-scatter brings only
        the bytes of the rank's own shard.
        """
        if world.num_ranks == 1:
            return self

        # RAM, processors and drives are those of the host, of which each rank has an equal part.
        local = world.num_host_ranks
        memory = self.memory_bytes_per_s / local

        # A plan needs a figure for each of these. `assumed` names those that were not measured on this machine.
        gather = self.gather_bytes_per_s or ASSUMED["gather_bytes_per_s"]
        scatter = self.scatter_bytes_per_s or ASSUMED["scatter_bytes_per_s"]
        network = self.network_bytes_per_s or ASSUMED["network_bytes_per_s"]
        slowdown = self.ranks_slowdown or ASSUMED["ranks_slowdown"]
        others = world.num_ranks - 1
        if world.num_hosts > 1:
            # In seconds for each byte of one shard. All links work at once, so the slower kind counts.
            far = world.num_ranks - local
            gather = others / max(others / gather, far / local / network)
            scatter = others / max((local - 1) / scatter, far / network)

        # A GPU has a link of its own, but cannot move more than the rank's share of the bandwidth of RAM.
        return dataclasses.replace(
            self.times(1 / local),
            to_gpu_bytes_per_s=min(self.to_gpu_bytes_per_s, memory),
            to_ram_bytes_per_s=min(self.to_ram_bytes_per_s, memory),
            update_parameters_per_s=self.update_parameters_per_s / local,
            memory_bytes_per_s=memory,
            locked_bytes=None if self.locked_bytes is None else self.locked_bytes / local,
            gather_bytes_per_s=gather,
            scatter_bytes_per_s=scatter,
            network_bytes_per_s=network,
            ranks_slowdown=slowdown,
            ranks_way=self.ranks_way if world.num_hosts == 1 else None,
        )

    @property
    def io_threads(self) -> int | None:
        """Native I/O threads in each direction that keep all drives busy; None if those of one drive are not known."""
        total = 0
        for drive in self.drives:
            # Threads for the other drives alone would leave this one without work.
            if drive.io_threads is None:
                return None
            total += drive.io_threads
        return total or None

    def times(self, factor: float) -> Rates:
        """Return the machine with the rates of its drives multiplied by a factor."""
        return dataclasses.replace(self, drives=tuple(drive.times(factor) for drive in self.drives))

    @property
    def slowest(self) -> Rates:
        """The machine with every drive at the slowest mixed rate that was measured."""
        return self._with_mixed([drive.mixed_low_bytes_per_s for drive in self.drives])

    @property
    def fastest(self) -> Rates:
        """The machine with every drive at the fastest mixed rate that was measured."""
        return self._with_mixed([drive.mixed_high_bytes_per_s for drive in self.drives])

    def _with_mixed(self, mixed: Sequence[float | None]) -> Rates:
        """Return the machine with each drive scaled to a mixed rate; None leaves a drive as it is."""
        drives = []
        for drive, rate in zip(self.drives, mixed, strict=True):
            if rate is None:
                drives.append(drive)
            else:
                # Only the mixed rate has a measured range. Reads and writes are assumed to vary with it.
                factor = rate / drive.mixed_bytes_per_s
                drives.append(drive.times(factor))
        return dataclasses.replace(self, drives=tuple(drives))


ASSUMED = {
    "gather_bytes_per_s": 25e9,
    "scatter_bytes_per_s": 25e9,
    "network_bytes_per_s": 12.5e9,
    "ranks_slowdown": 1.0,
}
"""Rates between GPUs that were not measured: of PCIe 4 with 16 lanes, and a network of 100 Gbit/s for each GPU, whose
bytes kernels move. They are rather low: NVLink is ten times as fast."""

RANK_RATES = ("ranks_way", *ASSUMED)
"""The fields that only several ranks can measure."""
