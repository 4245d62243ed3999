"""The vocabulary of the memory hierarchy: tiers, kinds, blocks, policies. Pure: no torch, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

PAGE_BYTES = 4096
"""Alignment of every slot, extent and file offset: what O_DIRECT asks for everywhere."""


class Tier(StrEnum):
    """A place with a byte budget."""

    GPU = "gpu"
    RAM = "ram"
    NVME = "nvme"


class Kind(StrEnum):
    """What a block holds. The first four are the state of a unit."""

    WEIGHT = "weight"
    REMAINDER = "remainder"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    GRAD = "grad"
    ACTIVATION = "activation"
    GATHERED = "gathered"
    """The weights of a whole unit on a rank's GPU, gathered from the shards of all ranks."""
    GROUP_GRAD = "group_grad"
    """The gradient of a whole unit that a rank has made of one group, before its shards go to their owners."""
    RECEIVED = "received"
    """Gradients of a rank's own shard, one from each rank, before they are added."""
    MOMENTS = "moments"
    """Moments, and remainders, of so many elements side by side (`integrations`)."""


class Phase(StrEnum):
    """Why a unit is used."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Activations(StrEnum):
    """What happens to a unit's activations between forward and backward: the policy, as everyone but the node sees it.

    `engine.activation` carries it out. A policy never changes a number; it costs memory, or compute, or a link.
    """

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"

    @property
    def keeps_graph(self) -> bool:
        """What the forward saved stays until the backward, which repeats nothing that was saved."""
        return self is Activations.KEEP

    @property
    def offloads_input(self) -> bool:
        """The unit's input waits in RAM, so that nothing of the unit stays on the GPU."""
        return self is Activations.OFFLOAD

    @property
    def without_offload(self) -> Activations:
        """The policy of units that have no single input to offload."""
        return Activations.RECOMPUTE if self.offloads_input else self


class Way(StrEnum):
    """What moves weights and gradients between ranks."""

    COPIES = "copy engines"
    """Copies from the memory of other GPUs."""
    RAM = "shared RAM"
    """Copies to RAM that the ranks of a host share, and from there."""
    KERNELS = "NCCL's kernels"
    GLOO = "gloo"


SHARED_STAGES = 2
"""Regions that each rank of a host has in shared RAM. One is written while the other is read."""

STATE_KINDS = (Kind.WEIGHT, Kind.REMAINDER, Kind.EXP_AVG, Kind.EXP_AVG_SQ)


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """What moves at once: one unit's tensors of one kind, contiguous."""

    key: str
    num_bytes: int
    home: Tier | None
    """Where the block lives between uses; None: scratch, alive only while a copy is resident."""
    kind: Kind = Kind.WEIGHT


def round_up(num_bytes: int, multiple: int = PAGE_BYTES) -> int:
    """The next multiple."""
    return -(-num_bytes // multiple) * multiple
