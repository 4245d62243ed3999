"""The budgets of a run: bytes of each tier, of a host and of a rank. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Self

from megatier.schedule.policy import Policy
from megatier.schedule.world import World
from megatier.tier import SHARED_STAGES

SHARED_BUFFER_SHARE = 256
SHARED_BUFFER_BYTES_MIN = 256 << 10
SHARED_BUFFER_BYTES_MAX = 16 << 20
"""A buffer of shared RAM is a power of two between these limits, and at most one 256th of a rank's RAM. Larger ones
would not be faster."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes that each tier may use."""

    gpu: int
    ram: int
    nvme: int
    shared_ram: int = 0
    """Bytes of a rank's share of RAM that are not in `ram`, because they are buffers that the host's ranks share."""

    def of_rank(self, world: World) -> Budgets:
        """Return a rank's share of the budgets of a host, without shared RAM. Each rank has a GPU of its own."""
        ram = self.ram // world.num_host_ranks
        nvme = self.nvme // world.num_host_ranks
        shared = 0
        if shares_ram(world.num_ranks, world.num_host_ranks):
            buffers = SHARED_STAGES * shared_buffer_bytes(ram)
            shared = min(ram, buffers)
        return Budgets(self.gpu, ram - shared, nvme, shared)

    @classmethod
    def least(cls, budgets: Sequence[Budgets]) -> Self:
        """Return the smallest budget of each tier of several ranks or hosts."""
        by_tier = zip(*map(astuple, budgets), strict=True)
        return cls(*map(min, by_tier))


def shares_ram(num_ranks: int, num_host_ranks: int) -> bool:
    """Return whether ranks may use shared RAM for collectives, because all are on one host."""
    return 1 < num_ranks == num_host_ranks


def shared_buffer_bytes(ram: int) -> int:
    """Return the bytes of a buffer of shared RAM, for a rank with so much of the host's RAM."""
    # A power of two, so that no buffer crosses the end of a pinned piece (`ranks.shared_ram`).
    largest = max(SHARED_BUFFER_BYTES_MIN, min(SHARED_BUFFER_BYTES_MAX, ram // SHARED_BUFFER_SHARE))
    return 1 << largest.bit_length() - 1


def host_ram(ram: int, policy: Policy) -> int:
    """Return the least RAM of a host that gives each rank so many bytes for itself."""
    if not shares_ram(policy.num_ranks, policy.num_host_ranks):
        return ram * policy.num_host_ranks

    # More RAM has larger buffers, so the first buffer that is large enough is the smallest.
    buffer = SHARED_BUFFER_BYTES_MIN
    while shared_buffer_bytes(ram + SHARED_STAGES * buffer) > buffer:
        buffer *= 2

    # The host needs the buffers in addition to the bytes that ranks have for themselves.
    rank_ram = ram + SHARED_STAGES * buffer
    return rank_ram * policy.num_host_ranks
