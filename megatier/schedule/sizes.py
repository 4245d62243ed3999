"""The sizes of units' blocks: bytes in whole pages, under the policy of a run. Pure.

The planner of this room takes all sizes from here, so that placement, slots and moves agree.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatier.schedule.policy import Policy
from megatier.schedule.unit_spec import UnitSpec
from megatier.tier import Kind, Tier, round_up


def updated_at_once(spec: UnitSpec, chunk_elements: int) -> int:
    """Return the elements that an update of a unit on NVMe works on at once: a chunk, or all if it is by matrix."""
    # A chunk could cut a matrix in two.
    if spec.schema.by_matrix:
        return spec.num_trained
    return min(chunk_elements, spec.num_trained)


def trained_units(units: Iterable[UnitSpec]) -> list[UnitSpec]:
    """Return the units with trained parameters."""
    return [spec for spec in units if spec.num_trained]


def passing_kinds_of(units: Iterable[UnitSpec]) -> tuple[Kind, ...]:
    """Return the kinds of state, except weights, of these trained units, each once."""
    return tuple(dict.fromkeys(kind for spec in units for kind in spec.schema.passing_kinds))


def block_bytes(spec: UnitSpec, kind: Kind) -> int:
    """Return the bytes of a unit's block of state, in whole pages."""
    return round_up(spec.elements_of(kind) * spec.schema.width(kind))


def home_bytes(spec: UnitSpec, kind: Kind, home: Tier) -> int:
    """Return the bytes that a unit's block of state takes at home."""
    # Frozen weights that are read from the user's own files take no bytes of NVMe.
    reads_in_place = spec.is_in_place and home is Tier.NVME
    if reads_in_place and kind is Kind.WEIGHT:
        return trained_bytes(spec, kind)
    return block_bytes(spec, kind)


def trained_bytes(spec: UnitSpec, kind: Kind) -> int:
    """Return the bytes of a unit's block of state that its update changes, which are all but frozen weights."""
    return round_up(spec.num_trained * spec.schema.width(kind))


def state_bytes(spec: UnitSpec) -> int:
    """Return the bytes of all kinds of a unit's state."""
    return sum(block_bytes(spec, kind) for kind in spec.kinds)


def gathered_bytes(spec: UnitSpec, policy: Policy) -> int:
    """Return the bytes of a unit's whole weights after an all-gather."""
    return policy.num_ranks * block_bytes(spec, Kind.WEIGHT)


def group_grad_bytes(spec: UnitSpec, policy: Policy) -> int:
    """Return the bytes of a unit's whole gradient of one group before the reduce-scatter, in fp32."""
    # With several slices or uses the gradient is a sum, which the compute dtype would round.
    return policy.num_ranks * round_up(spec.num_trained * 4)


def grad_bytes(spec: UnitSpec, policy: Policy) -> int:
    """Return the bytes of a unit's gradient while it moves: fp32 with several groups, otherwise the compute dtype."""
    # If gradients were rounded before they are added, the sum would depend on how a step is cut into groups.
    width = 4 if policy.groups > 1 else spec.schema.grad_width
    return round_up(spec.num_trained * width)


def final_grad_bytes(spec: UnitSpec, policy: Policy) -> int:
    """Return the bytes of a unit's final gradient, which fills the first granules of its block."""
    # Whole granules, because each has a checksum, but no more than the block has.
    num_elements = round_up(spec.num_trained, policy.align_elements)
    granules = num_elements * spec.schema.grad_width
    return min(granules, grad_bytes(spec, policy))
