"""The policy of a placement: the choices of a run that decide sizes and allowed tiers. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from megatier.tier import Tier


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The choices of a run that decide how many bytes there are, and in which tiers they may be."""

    state: tuple[Tier, ...] = (Tier.GPU, Tier.RAM, Tier.NVME)
    """Tiers that may hold state."""
    deferred: bool = True
    """Whether updates wait for the global norm, so that every gradient is held. Otherwise they run in the backward."""
    groups: int = 1
    """Groups of a step on each rank."""
    num_ranks: int = 1
    """Ranks that share the state. Sizes of units are those of a shard."""
    num_host_ranks: int = 1
    """Ranks of one host. Budgets are a rank's share of the host's, and errors name those of the host."""
    slices: int = 1
    """Slices of a group."""
    chunk_elements: int | None = None
    """Elements of one update chunk; None: chosen from the RAM budget."""
    streamed_share: float = 0.0
    """Share of the parameters outside the GPU that are streamed to it for their updates, 0 to 1. The immediate mode
    streams none."""
    generations: int = 1
    """Places on NVMe for the state of a unit that spills. Above 1, units in RAM may have two. The immediate mode has
    one."""
    savepoints: bool = False
    """Whether a savepoint may keep one of the generations, which updates then cannot use."""
    gpu_direct: bool = False
    """Whether weights on NVMe that no update feeds go to the GPU past RAM."""
    align_elements: int = 32 << 10
    """Update chunks are multiples of so many elements, which are one granule of the narrowest plane."""
    narrowest: int = 2
    """Bytes of an element of that plane."""

    @property
    def granule_bytes(self) -> int:
        """Bytes under one checksum on NVMe."""
        return self.narrowest * self.align_elements

    @property
    def speculates(self) -> bool:
        """Whether there is a spare generation for speculative updates, beside the valid and the kept one."""
        # The immediate mode needs no speculation, because its updates wait for no norm.
        return self.deferred and self.generations > 1 + self.savepoints
