"""Counts the bytes of units' blocks in whole pages, and the tiers' budgets, by the choices of a run. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Self

from megatier.schedule.rates import World
from megatier.state import ADAMW_BF16, StateSchema
from megatier.tier import SHARED_STAGES, Kind, Tier, round_up

SHARED_BUFFER_SHARE = 256
SHARED_BUFFER_BYTES_MIN = 256 << 10
SHARED_BUFFER_BYTES_MAX = 16 << 20
"""A buffer of shared RAM is a power of two: at most this part of a rank's RAM, at least the one figure, and at most the
other. Larger ones would not be faster."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes that each tier may use."""

    gpu: int
    ram: int
    nvme: int
    shared_ram: int = 0
    """Bytes of a rank's part of RAM that `ram` leaves out, since the ranks of the host share them."""

    def of_rank(self, world: World) -> Budgets:
        """Return a rank's part of the budgets of a host, without what ranks share. Each rank has a GPU of its own."""
        ram = self.ram // world.host_ranks
        nvme = self.nvme // world.host_ranks
        shared = 0
        if shares_ram(world.ranks, world.host_ranks):
            buffers = SHARED_STAGES * shared_buffer_bytes(ram)
            shared = min(ram, buffers)
        return Budgets(self.gpu, ram - shared, nvme, shared)

    @classmethod
    def least(cls, found: Sequence[Budgets]) -> Self:
        """Return the least budgets of several ranks or hosts, which every one of them has."""
        by_tier = zip(*map(astuple, found), strict=True)
        return cls(*map(min, by_tier))


def shares_ram(ranks: int, host_ranks: int) -> bool:
    """Return whether ranks may send weights and gradients through RAM that all of them share: those of one host."""
    return 1 < ranks == host_ranks


def shared_buffer_bytes(ram: int) -> int:
    """Return the bytes of a buffer of shared RAM, for a rank with such a part of a host's RAM."""
    # A power of two, so that no buffer crosses the end of what one call page-locks (`ranks.shared_ram`).
    largest = max(SHARED_BUFFER_BYTES_MIN, min(SHARED_BUFFER_BYTES_MAX, ram // SHARED_BUFFER_SHARE))
    return 1 << largest.bit_length() - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSpec:
    """The sizes of a unit from which its place is chosen."""

    name: str
    num_elements: int
    """Elements of the unit's weights, padding included."""
    activation_bytes: int = 0
    """Bytes of the boundary activation of one group, if it is offloaded to RAM or NVMe."""
    frozen_elements: int = 0
    """How many of the elements, counted from the last, are frozen. They have a weight, but no other state and no
    gradient."""
    schema: StateSchema = ADAMW_BF16
    """The planes of state that the optimizer keeps of an element that is trained."""
    is_in_place: bool = False
    """Whether the frozen elements, if their home is NVMe, are read where they lie in the user's own files."""
    update_flops: float = 0.0
    """Floating-point operations of products of matrices in one update."""
    is_layer: bool = False
    """Whether it is a layer of the decoder, or a part of one."""

    @property
    def num_trained(self) -> int:
        """Elements with a gradient and a whole state. If there are none, the unit is never updated."""
        return self.num_elements - self.frozen_elements

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of state that the unit has: weights alone if it is frozen."""
        return self.schema.kinds if self.num_trained else (Kind.WEIGHT,)

    def elements_of(self, kind: Kind) -> int:
        """Return the elements of the unit's block of one kind of state."""
        return self.num_elements if kind is Kind.WEIGHT else self.num_trained


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Choices that decide how many bytes there are, and where they may lie."""

    state: tuple[Tier, ...] = (Tier.GPU, Tier.RAM, Tier.NVME)
    """Tiers that may hold state."""
    deferred: bool = True
    """Whether updates wait for the global norm, so that every gradient is held. Else they run inside the backward."""
    groups: int = 1
    """Groups of a step that one rank computes."""
    ranks: int = 1
    """Ranks that share the state. Sizes of units are those of a shard."""
    host_ranks: int = 1
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


def host_ram(ram: int, policy: Policy) -> int:
    """Return the least RAM of a host of which each rank has so many bytes for itself."""
    if not shares_ram(policy.ranks, policy.host_ranks):
        return ram * policy.host_ranks

    # A larger part of the host has larger buffers, so the first one that is large enough is the least.
    buffer = SHARED_BUFFER_BYTES_MIN
    while shared_buffer_bytes(ram + SHARED_STAGES * buffer) > buffer:
        buffer *= 2
    # Buffers are taken from what a rank has, so the host needs them in addition to what ranks use for themselves.
    rank_ram = ram + SHARED_STAGES * buffer
    return rank_ram * policy.host_ranks


def updated_at_once(spec: UnitSpec, chunk_elements: int) -> int:
    """Return the elements that an update of a unit that spills takes at once: a chunk, or all if it is by matrix."""
    # A chunk might cut a matrix.
    if spec.schema.by_matrix:
        return spec.num_trained
    return min(chunk_elements, spec.num_trained)


def trained(units: Iterable[UnitSpec]) -> list[UnitSpec]:
    """Return the units of which at least a part is trained."""
    return [spec for spec in units if spec.num_trained]


def passing_kinds_of(units: Iterable[UnitSpec]) -> tuple[Kind, ...]:
    """Return the kinds of state, except weights, that any of these trained units has, each once."""
    return tuple(dict.fromkeys(kind for spec in units for kind in spec.schema.passing_kinds))


def block_bytes(spec: UnitSpec, kind: Kind) -> int:
    """Return the bytes of a unit's block of state, in whole pages."""
    return round_up(spec.elements_of(kind) * spec.schema.width(kind))


def home_bytes(spec: UnitSpec, kind: Kind, home: Tier) -> int:
    """Return the bytes that a unit's block of state takes at home."""
    # Frozen weights that are read where the user's files have them take none on NVMe.
    reads_in_place = spec.is_in_place and home is Tier.NVME
    if reads_in_place and kind is Kind.WEIGHT:
        return trained_bytes(spec, kind)
    return block_bytes(spec, kind)


def trained_bytes(spec: UnitSpec, kind: Kind) -> int:
    """Return the bytes of a unit's block of state that its update changes: all but frozen weights."""
    return round_up(spec.num_trained * spec.schema.width(kind))


def state_bytes(spec: UnitSpec) -> int:
    """Return the bytes of all kinds of a unit's state."""
    return sum(block_bytes(spec, kind) for kind in spec.kinds)


def gathered_bytes(spec: UnitSpec, policy: Policy) -> int:
    """Return the bytes of a whole unit's weights, gathered from the shards of all ranks."""
    return policy.ranks * block_bytes(spec, Kind.WEIGHT)


def group_grad_bytes(spec: UnitSpec, policy: Policy) -> int:
    """Return the bytes of a whole unit's gradient of one group, in fp32, as it leaves for the owners of its shards."""
    # Slots take the widest that may come: of several slices or uses it is a sum, which the compute dtype would round.
    return policy.ranks * round_up(spec.num_trained * 4)


def grad_bytes(spec: UnitSpec, policy: Policy) -> int:
    """Return the bytes of a unit's gradient on its way.

    With several groups it is a summand of an fp32 sum; else it has the compute dtype.
    """
    # A summand that was rounded before it is added would make the sum depend on how a step is cut into groups.
    width = 4 if policy.groups > 1 else spec.schema.grad_width
    return round_up(spec.num_trained * width)


def final_grad_bytes(spec: UnitSpec, policy: Policy) -> int:
    """Return the bytes of a unit's final gradient: the front of such a sum, in whole granules."""
    # Whole granules, since a drive verifies a checksum for each; but no more than its block has.
    num_elements = round_up(spec.num_trained, policy.align_elements)
    granules = num_elements * spec.schema.grad_width
    return min(granules, grad_bytes(spec, policy))
