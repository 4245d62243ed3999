"""The choices of a run that decide how many bytes there are, and where they may lie. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from megatier.tier import Tier


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Choices that decide how many bytes there are, and where they may lie."""

    state: tuple[Tier, ...] = (Tier.GPU, Tier.RAM, Tier.NVME)
    """Tiers that may hold state."""
    deferred: bool = True
    """Whether updates wait for the global norm, so that every gradient is held. Else they run inside the backward."""
    groups: int = 1
    """Groups of a step that one rank computes."""
    num_ranks: int = 1
    """Ranks that share the state. Sizes of units are those of a shard."""
    num_host_ranks: int = 1
    """Ranks of one host. Budgets are a rank's part of those of the host, which a refusal names."""
    slices: int = 1
    """Slices of a group."""
    chunk_elements: int | None = None
    """Elements of one update chunk; None: chosen from the RAM budget."""
    streamed_share: float = 0.0
    """Share of the parameters outside the GPU whose state passes through it to be updated there, 0 to 1. In the
    immediate mode none are streamed."""
    generations: int = 1
    """Places on NVMe for the state of a unit that spills; above 1, units in RAM may have two. In the immediate mode
    there is one."""
    savepoints: bool = False
    """Whether one of the generations may be kept, so that updates must do without it."""
    gpu_direct: bool = False
    """Whether weights on NVMe that no update feeds go to the GPU past RAM."""
    align_elements: int = 32 << 10
    """Elements of which update chunks are multiples: one granule of the narrowest plane."""
    narrowest: int = 2
    """Bytes of an element of that plane."""

    @property
    def granule_bytes(self) -> int:
        """Bytes under one checksum on NVMe."""
        return self.narrowest * self.align_elements

    @property
    def speculates(self) -> bool:
        """Whether there is a generation to update into, other than the one that holds and the one that is kept."""
        return self.deferred and self.generations > 1 + self.savepoints
