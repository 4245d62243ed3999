"""The sizes of one unit, by which it is placed. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from megatier.state import ADAMW_BF16, StateSchema
from megatier.tier import Kind


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
