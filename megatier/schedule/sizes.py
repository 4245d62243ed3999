"""Sizes: the bytes of units' blocks in whole pages, by the choices of a run. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from megatier.schedule.policy import Policy
from megatier.schedule.unit_spec import UnitSpec
from megatier.tier import Kind, Tier, round_up


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
    return policy.num_ranks * block_bytes(spec, Kind.WEIGHT)


def group_grad_bytes(spec: UnitSpec, policy: Policy) -> int:
    """Return the bytes of a whole unit's gradient of one group, in fp32, as it leaves for the owners of its shards."""
    # Slots take the widest that may come: of several slices or uses it is a sum, which the compute dtype would round.
    return policy.num_ranks * round_up(spec.num_trained * 4)


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
