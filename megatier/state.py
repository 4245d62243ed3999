"""The state of a parameter: the planes that an optimizer keeps of it, their widths, their names in a checkpoint. Pure.

A `StateSchema` is what placement, blocks, queues, checkpoints and the arithmetic have to agree on, written once. Each
unit has one. Plans and lanes take kinds and bytes from it, and never name an optimizer. Another optimizer is another
schema, and the arithmetic that reads and writes its planes (`numerics.optimizer`).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatier.tier import Kind

MASTERS = "params"
"""The group of a checkpoint that holds the fp32 masters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plane:
    """One kind of state, side by side for all elements of a unit."""

    kind: Kind
    dtype: str
    """Name of the torch dtype of an element."""
    width: int
    """Bytes of an element."""
    array: str
    """The group of a checkpoint's fp32 arrays to which it goes. The planes of the master share theirs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSchema:
    """All planes of a parameter that is trained. A frozen parameter has a weight and no other plane."""

    planes: tuple[Plane, ...]
    """The weight, which is the copy that computes, comes first."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of state that there are, in the order of the planes."""
        return tuple(plane.kind for plane in self.planes)

    @property
    def passing_kinds(self) -> tuple[Kind, ...]:
        """The kinds that have GPU slots of their own if a unit is streamed; weights pass through those of all units."""
        return tuple(kind for kind in self.kinds if kind is not Kind.WEIGHT)

    @property
    def master_kinds(self) -> tuple[Kind, ...]:
        """The planes that together are the fp32 master."""
        return self.arrays[MASTERS]

    @property
    def arrays(self) -> dict[str, tuple[Kind, ...]]:
        """The groups of a checkpoint, and the planes from which each of them is written."""
        groups: dict[str, tuple[Kind, ...]] = {}
        for plane in self.planes:
            groups[plane.array] = (*groups.get(plane.array, ()), plane.kind)
        return groups

    @property
    def bytes_per_parameter(self) -> int:
        """State of one parameter that is trained. AdamW writes this much, and reads a gradient more."""
        return sum(plane.width for plane in self.planes)

    @property
    def grad_width(self) -> int:
        """Bytes of an element of a gradient, which has the dtype of the weights."""
        return self.planes[0].width

    def width(self, kind: Kind) -> int:
        """Return the bytes of an element of this kind."""
        return self._plane(kind).width

    def dtype(self, kind: Kind) -> str:
        """Return the name of the torch dtype of an element of this kind."""
        return self._plane(kind).dtype

    def _plane(self, kind: Kind) -> Plane:
        return next(plane for plane in self.planes if plane.kind is kind)


# The moments are fp32 whatever the compute dtype is. A step changes the second one by about 1 - beta2 of its value,
# such as 0.001, and bf16 with its 8 bits would round that away.
MOMENTS = (
    Plane(kind=Kind.EXP_AVG, dtype="float32", width=4, array="exp_avg"),
    Plane(kind=Kind.EXP_AVG_SQ, dtype="float32", width=4, array="exp_avg_sq"),
)

ADAMW_BF16 = StateSchema(
    planes=(
        Plane(kind=Kind.WEIGHT, dtype="bfloat16", width=2, array=MASTERS),
        Plane(kind=Kind.REMAINDER, dtype="int16", width=2, array=MASTERS),
        *MOMENTS,
    )
)
"""AdamW with the master split into the bf16 weight that computes and the 16 bits that it lacks."""

ADAMW_FP32 = StateSchema(planes=(Plane(kind=Kind.WEIGHT, dtype="float32", width=4, array=MASTERS), *MOMENTS))
"""AdamW with fp32 compute: the weight is the master."""

ADAMW = {"bf16": ADAMW_BF16, "fp32": ADAMW_FP32}
"""AdamW's state by compute dtype, as `model.compute_dtype` names it."""
