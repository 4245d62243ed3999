"""Sizes: bytes of a unit's blocks, in whole pages, the choices that they depend on, and the tiers' budgets. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatier.state import ADAMW_BF16, StateSchema
from megatier.tier import Kind, Tier, round_up


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes that each tier may use."""

    gpu: int
    ram: int
    nvme: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSpec:
    """What placement needs to know of a unit."""

    name: str
    num_elements: int
    """Padded parameters of the unit."""
    activation_bytes: int = 0
    """Boundary activation of one group, where it is offloaded to RAM."""
    frozen_elements: int = 0
    """Of the elements, the last ones, which have a weight and no more: no update, no gradient."""

    @property
    def num_trained(self) -> int:
        """Elements with a gradient and a whole state; 0: the unit is never updated."""
        return self.num_elements - self.frozen_elements

    def elements_of(self, kind: Kind) -> int:
        """Elements of a block of state."""
        return self.num_elements if kind is Kind.WEIGHT else self.num_trained


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Choices that are not placement but decide how many bytes there are."""

    state: tuple[Tier, ...] = (Tier.GPU, Tier.RAM, Tier.NVME)
    """Tiers that may hold state."""
    schema: StateSchema = ADAMW_BF16
    """The planes of state that the optimizer keeps of a parameter."""
    deferred: bool = True
    """Updates wait for the global norm, so every gradient is held; False: they run inside the backward."""
    groups: int = 1
    slices: int = 1
    chunk_elements: int | None = None
    """Elements of one update chunk; None: chosen from the RAM budget."""
    streamed_share: float = 0.0
    """Share of the parameters outside the GPU whose state passes through it to be updated there, 0 to 1 (deferred)."""
    generations: int = 1
    """Places on NVMe for the state of a unit that spills (deferred)."""
    savepoints: bool = False
    """One of the generations may be kept, so that updates do without it."""
    gpu_direct: bool = False
    """Weights on NVMe that no update feeds go to the GPU past RAM."""
    align_elements: int = 32 << 10
    """Update chunks are multiples of this (one checksummed chunk of the narrowest plane)."""

    @property
    def speculates(self) -> bool:
        """Whether there is a generation to update into, beside the one that holds and the one that is kept."""
        return self.deferred and self.generations > 1 + self.savepoints


def trained(units: Iterable[UnitSpec]) -> list[UnitSpec]:
    """Those of which something is trained."""
    return [unit for unit in units if unit.num_trained]


def kinds_of(unit: UnitSpec, policy: Policy) -> tuple[Kind, ...]:
    """The kinds of state that a unit has: weights alone if it is frozen."""
    return policy.schema.kinds if unit.num_trained else (Kind.WEIGHT,)


def block_bytes(unit: UnitSpec, kind: Kind, policy: Policy) -> int:
    """Bytes of a unit's block of state, in whole pages."""
    return round_up(unit.elements_of(kind) * policy.schema.width(kind))


def trained_bytes(unit: UnitSpec, kind: Kind, policy: Policy) -> int:
    """Bytes of a unit's block of state that its update changes: all but frozen weights."""
    return round_up(unit.num_trained * policy.schema.width(kind))


def state_bytes(unit: UnitSpec, policy: Policy) -> int:
    """Bytes of a unit's state, all kinds."""
    return sum(block_bytes(unit, kind, policy) for kind in kinds_of(unit, policy))


def grad_bytes(unit: UnitSpec, policy: Policy) -> int:
    """Bytes of a unit's gradient on its way: a summand of an fp32 sum over groups, else the compute dtype."""
    return round_up(unit.num_trained * (4 if policy.groups > 1 else policy.schema.grad_width))


def final_grad_bytes(unit: UnitSpec, policy: Policy) -> int:
    """Bytes of its final gradient: the front of such a sum, in whole checksummed chunks."""
    width = policy.schema.grad_width
    return min(round_up(width * unit.num_trained, width * policy.align_elements), grad_bytes(unit, policy))
