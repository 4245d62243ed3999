"""Counts what text that is generated has of a GPU whose memory training lends. Pure."""

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
    """All weights, as compute reads them."""
    left_bytes: int
    """What stays for keys and values and for the forward itself. Below 0 the weights do not fit, by so much."""
    state_bytes: int
    """State at home on the GPU, which lies in RAM meanwhile, beside `tiers.ram`."""


def shard_bytes(units: Collection[UnitSpec], policy: Policy) -> int:
    """Return what gathering the weights of all ranks takes beside them: the largest shard of a unit."""
    return max(block_bytes(spec, Kind.WEIGHT) for spec in units) if policy.num_ranks > 1 else 0


def lent_room(
    units: Collection[UnitSpec], placement: Placement, policy: Policy, gpu_bytes: int, *, is_unified: bool = False
) -> LentRoom:
    """Count the bytes of one rank.

    Args:
        units: all units.
        placement: homes and slots of training.
        policy: choices of the run.
        gpu_bytes: what the process has of the GPU, without the driver and libraries.
        is_unified: whether the GPU's memory is RAM, so that state which goes there leaves no room for anything else.
    """
    # A unit that is alone has one shard, which is all of it.
    weight_bytes = sum(gathered_bytes(spec, policy) for spec in units)
    state_bytes = placement.state_bytes.get(Tier.GPU, 0)
    held_bytes = weight_bytes + shard_bytes(units, policy)
    if is_unified:
        held_bytes += state_bytes
    return LentRoom(weight_bytes=weight_bytes, left_bytes=gpu_bytes - held_bytes, state_bytes=state_bytes)
