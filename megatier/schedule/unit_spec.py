"""The sizes of a unit, from which placement, moves and forecasts are computed. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from megatier.state import ADAMW_BF16, StateSchema
from megatier.tier import Kind


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSpec:
    """The sizes of a unit."""

    name: str
    num_elements: int
    """Elements of the unit's weights, padding included."""
    activation_bytes: int = 0
    """Bytes of the unit's input for one group, if it is offloaded to RAM or NVMe; else 0."""
    frozen_elements: int = 0
    """The number of frozen elements, which come last. They have a weight, but no other state and no gradient."""
    schema: StateSchema = ADAMW_BF16
    """The planes of state of a trained element."""
    is_in_place: bool = False
    """Whether frozen elements with a home on NVMe are read from the user's own files."""
    update_flops: float = 0.0
    """Floating-point operations of products of matrices in one update."""
    is_layer: bool = False
    """Whether it is a layer of the decoder, or a part of one."""

    @property
    def num_trained(self) -> int:
        """The number of trained elements. If it is 0, the unit is never updated."""
        return self.num_elements - self.frozen_elements

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of state of the unit. A frozen unit has only weights."""
        # Frozen weights never change, so they need neither moments nor the rest of a master.
        return self.schema.kinds if self.num_trained else (Kind.WEIGHT,)

    def elements_of(self, kind: Kind) -> int:
        """Return the elements of the unit's block of one kind of state."""
        return self.num_elements if kind is Kind.WEIGHT else self.num_trained
