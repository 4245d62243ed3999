"""The vocabulary of the memory hierarchy: tiers, kinds, blocks, policies, queues, transports. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

PAGE_BYTES = 4096
"""The alignment of every slot, extent and file offset. O_DIRECT asks for no more than this on any drive."""


class Tier(StrEnum):
    """A place with a byte budget."""

    GPU = "gpu"
    RAM = "ram"
    NVME = "nvme"


class Kind(StrEnum):
    """The kind of bytes in a block. The first five are the state of a unit."""

    WEIGHT = "weight"
    REMAINDER = "remainder"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    MOMENTUM = "momentum"
    GRAD = "grad"
    ACTIVATION = "activation"
    GATHERED = "gathered"
    """The whole weights of a unit on a rank's GPU, after an all-gather."""
    GROUP_GRAD = "group_grad"
    """The whole gradient of a unit that a rank has made of one group, before the reduce-scatter."""
    RECEIVED = "received"
    """The gradients of a rank's own shard, one from each rank, before they are added."""
    MOMENTS = "moments"
    """Moments, and remainders, of so many elements side by side (`tiered_adamw`)."""


class Phase(StrEnum):
    """The part of a step for which a unit is used."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Leg(StrEnum):
    """A forward or a backward of a whole pass. The legs of a training pass, in order, are its course."""

    FORWARD = "F"
    """The first forward of a group."""
    FURTHER = "f"
    """Another forward of the group, before its backward."""
    ASIDE = "a"
    """A forward without gradients before the group's backward, in a step that has begun."""
    INPUTS = "i"
    """A backward for gradients of inputs alone, before the group's own. It uses weights as a forward does."""
    BACKWARD = "B"


ActivationsName = Literal["keep", "recompute", "offload"]
"""The names of the policies for activations, as types have them."""


class Activations(StrEnum):
    """The policy for a unit's activations between forward and backward.

    `engine.activation` carries it out. A policy never changes a number. It costs memory, compute or bandwidth.
    """

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"

    @property
    def keeps_graph(self) -> bool:
        """Whether the saved tensors of the forward stay until the backward, without recomputation."""
        return self is Activations.KEEP

    @property
    def offloads_input(self) -> bool:
        """Whether the unit's input waits in RAM, so that nothing of the unit stays on the GPU."""
        return self is Activations.OFFLOAD

    @property
    def without_offload(self) -> Activations:
        """The policy of a unit that has no single input to offload, in a run with this policy."""
        # Offload is recompute with the input in RAM, so without that it is recompute.
        return Activations.RECOMPUTE if self.offloads_input else self


QUEUES = ("nvme_to_ram", "nvme_to_gpu", "ram_to_gpu", "gpu_to_ram", "ram_to_nvme", "state_to_gpu", "state_to_ram")
"""The names of the queues. State for which compute does not wait has its own two between RAM and the GPU."""

COPY_QUEUES = ("ram_to_gpu", "gpu_to_ram", "state_to_gpu", "state_to_ram")
"""The queues that copy between RAM and the GPU."""
RING_BYTES = 192 << 20
"""The bytes of all rings: pinned pieces through which RAM is copied that is not pinned."""


class Transport(StrEnum):
    """What moves weights and gradients between ranks."""

    COPIES = "copy engines"
    """Copies from the memory of other GPUs."""
    RAM = "shared RAM"
    """Copies to RAM that the ranks of a host share, and from there."""
    KERNELS = "NCCL's kernels"
    GLOO = "gloo"


SHARED_STAGES = 2
"""The number of buffers of each rank in shared RAM. One is written while the other is read."""

STATE_KINDS = (Kind.WEIGHT, Kind.REMAINDER, Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.MOMENTUM)
"""All kinds of state that any schema has (`megatier.state`)."""


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """The bytes that move together: all tensors of one kind of one unit, side by side."""

    key: str
    """The name of the block, which no other block of the store has."""
    num_bytes: int
    """Its size, which need not be in whole pages."""
    home: Tier | None
    """The tier where the block always lies. None: it is a scratch block, which exists as long as it has a copy."""
    kind: Kind = Kind.WEIGHT
    """The kind, which decides through which slots and queues it passes."""
    elsewhere: int = 0
    """For a home on NVMe, the bytes at its end that are in the user's own files instead of on the mounts."""


def round_up(num_bytes: int, multiple: int = PAGE_BYTES) -> int:
    """Return the least multiple that is not smaller."""
    # In whole numbers, because floats lose bits of sizes past 2**53.
    return -(-num_bytes // multiple) * multiple


def cut_at_addresses(address: int, num_bytes: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield runs [start, stop), counted from an address, that end wherever an address is a multiple of a size."""
    start = 0
    while start < num_bytes:
        stop = min(num_bytes, start + piece_bytes - (address + start) % piece_bytes)
        yield start, stop
        start = stop
