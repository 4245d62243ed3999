"""The state of a parameter: the planes that an optimizer keeps of it, their widths, their names in a checkpoint. Pure.

Each unit has a `StateSchema`, from which placement, blocks, queues, checkpoints and the arithmetic take kinds and
bytes, so that plans and queues never name an optimizer. A new optimizer needs a schema here, and the arithmetic that
reads and writes its planes (`optim.optimizer`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megatier.tier import STATE_KINDS, Kind

MASTERS = "params"
"""The name of the group of fp32 masters in a checkpoint."""


WIDTHS = {"float32": 4, "bfloat16": 2, "int16": 2, "uint8": 1}
"""Bytes of an element, by the name of its torch dtype, because this module does not import torch."""
IN_MASTER = (Kind.WEIGHT, Kind.REMAINDER)
"""The kinds that form the fp32 master together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plane:
    """One kind of state of all elements of a unit."""

    kind: Kind
    dtype: str
    """Name of the torch dtype of an element."""

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return WIDTHS[self.dtype]

    @property
    def array(self) -> str:
        """The group of the plane in a checkpoint. The planes of the master share one."""
        return MASTERS if self.kind in IN_MASTER else str(self.kind)


# Without slots, so that what a plan asks for thousands of times is found once.
@dataclass(frozen=True, kw_only=True)
class StateSchema:
    """All planes of a parameter that is trained. A frozen parameter has a weight and no other plane."""

    planes: tuple[Plane, ...]
    """The weight, which is the copy that computes, comes first."""
    rule: str = "adamw"
    """The name of the arithmetic by which it is updated (`optim.rules.RULES`, and `optim.muon` by matrix)."""
    by_matrix: bool = False
    """Whether an update needs whole matrices, on the device that computes. Else each element is updated by itself, so
    any run of them is, wherever it lies."""

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of state that there are, in the order of the planes."""
        return tuple(plane.kind for plane in self.planes)

    @cached_property
    def passing_kinds(self) -> tuple[Kind, ...]:
        """The kinds that have GPU slots of their own if a unit is streamed; weights pass through those of all units."""
        return tuple(kind for kind in self.kinds if kind is not Kind.WEIGHT)

    @property
    def master_kinds(self) -> tuple[Kind, ...]:
        """The planes that together are the fp32 master."""
        return self.arrays[MASTERS]

    @cached_property
    def arrays(self) -> dict[str, tuple[Kind, ...]]:
        """The groups of a checkpoint, and the planes from which each of them is written."""
        groups: dict[str, tuple[Kind, ...]] = {}
        for plane in self.planes:
            # Weight and remainder go to one group, because a checkpoint holds the fp32 master that they make.
            before = groups.get(plane.array, ())
            groups[plane.array] = (*before, plane.kind)
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
        return self._by_kind[kind].width

    def dtype(self, kind: Kind) -> str:
        """Return the name of the torch dtype of an element of this kind."""
        return self._by_kind[kind].dtype

    @cached_property
    def _by_kind(self) -> dict[Kind, Plane]:
        return {plane.kind: plane for plane in self.planes}


MASTER_PLANES = {
    "bf16": (Plane(kind=Kind.WEIGHT, dtype="bfloat16"), Plane(kind=Kind.REMAINDER, dtype="int16")),
    "fp32": (Plane(kind=Kind.WEIGHT, dtype="float32"),),
}
"""The master by compute dtype: split into the bf16 weight that computes and the 16 bits that it lacks, or as the weight
that computes, in fp32."""

Moments = Literal["fp32", "bf16", "fp8"]
"""The formats in which AdamW's moments are stored, the widest first."""

MOMENT_DTYPES: Mapping[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp8": "uint8"}
"""The dtype of a plane of moments.

A step changes the second one by about 1 - beta2 of its value, such as 0.001. Rounded to nearest, bf16 with its 8 bits
would lose that, so moments in bf16 and in 8 bits are rounded stochastically (`optim.optimizer`)."""


def state_of(rule: str, *planes: Plane, by_matrix: bool = False) -> dict[str, StateSchema]:
    """Return the state of an optimizer by compute dtype: the master, and the planes that it keeps besides."""
    return {
        compute: StateSchema(planes=(*master, *planes), rule=rule, by_matrix=by_matrix)
        for compute, master in MASTER_PLANES.items()
    }


ADAMW = {
    (compute, moments): schema
    for moments, dtype in MOMENT_DTYPES.items()
    for compute, schema in state_of(
        "adamw", Plane(kind=Kind.EXP_AVG, dtype=dtype), Plane(kind=Kind.EXP_AVG_SQ, dtype=dtype)
    ).items()
}
"""AdamW's state by compute dtype and by that of the moments, as `model.compute_dtype` and `train.moments` name them."""

ADAMW_BF16 = ADAMW["bf16", "fp32"]
"""AdamW with bf16 compute and fp32 moments, in 12 bytes a parameter: the default."""

ADAMW_FP32 = ADAMW["fp32", "fp32"]
"""AdamW with fp32 compute and fp32 moments."""

MOMENTUM = Plane(kind=Kind.MOMENTUM, dtype="float32")
LION = state_of("lion", MOMENTUM)
"""Lion's state by compute dtype: 8 bytes a parameter."""

MUON = state_of("muon", MOMENTUM, by_matrix=True)
"""Muon's state by compute dtype: that of Lion, updated by matrix."""

ARRAYS = (MASTERS, *(str(kind) for kind in STATE_KINDS if kind not in IN_MASTER))
"""The groups that a checkpoint may have, each once."""
