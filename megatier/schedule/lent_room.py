"""The room for generating text in lent GPU memory. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megatier.schedule.placement import Placement
from megatier.schedule.policy import Policy
from megatier.schedule.sizes import block_bytes, gathered_bytes
from megatier.schedule.unit_spec import UnitSpec
from megatier.tier import Kind, Tier


@dataclass(frozen=True, kw_only=True, slots=True)
class LentRoom:
    """Bytes of one GPU while text is generated in lent memory with all weights held, and of RAM meanwhile."""

    weight_bytes: int
    """Bytes of all weights."""
    left_bytes: int
    """Bytes for the KV cache and the forward. If it is below 0, the weights do not fit by so much."""
    state_bytes: int
    """Bytes of state at home on the GPU, which is in RAM meanwhile, beside `tiers.ram`."""


def shard_bytes(units: Collection[UnitSpec], policy: Policy) -> int:
    """Return the bytes that an all-gather of weights needs beside the result: the largest shard of a unit."""
    # A single rank has nothing to gather.
    return max(block_bytes(spec, Kind.WEIGHT) for spec in units) if policy.num_ranks > 1 else 0


def lent_room(
    units: Collection[UnitSpec], placement: Placement, policy: Policy, gpu_bytes: int, *, is_unified: bool = False
) -> LentRoom:
    """Count the bytes of one rank.

    Args:
        units: all units.
        placement: homes and slots of training.
        policy: choices of the run.
        gpu_bytes: the GPU memory of the process, without the driver and libraries.
        is_unified: whether GPU memory is RAM, so that moving state to RAM frees nothing.
    """
    weight_bytes = sum(gathered_bytes(spec, policy) for spec in units)
    state_bytes = placement.state_bytes.get(Tier.GPU, 0)
    held_bytes = weight_bytes + shard_bytes(units, policy)
    if is_unified:
        held_bytes += state_bytes
    return LentRoom(weight_bytes=weight_bytes, left_bytes=gpu_bytes - held_bytes, state_bytes=state_bytes)
