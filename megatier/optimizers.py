"""The optimizers that a run may have: their names, the state that each keeps, and its settings. Pure.

All code that names an optimizer uses this table. Plans, placements and checkpoints need only the schemas (`state`), and
the arithmetic is in `optim`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from megatier.state import ADAMW, LION, MUON, Moments, StateSchema

OptimizerName = Literal["adamw", "muon", "lion"]

OPTIMIZER_NAMES: tuple[str, ...] = get_args(OptimizerName)
MOMENT_FORMATS: tuple[Moments, ...] = get_args(Moments)
"""The formats of AdamW's moments, the widest first."""


def in_words(names: tuple[str, ...]) -> str:
    """Return names as a message lists them: "a, b or c"."""
    return f"{', '.join(names[:-1])} or {names[-1]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerKind:
    """The properties of an optimizer."""

    schemas: Mapping[tuple[str, str], StateSchema]
    """The state of a parameter, by the dtype that computes and by that of AdamW's moments."""
    matrices: Mapping[str, StateSchema] | None = None
    """The state of matrices in decoder layers by the dtype that computes; None: like that of all others."""
    settings: tuple[str, ...] = ("lr", "betas", "eps")
    """The settings that all parameters share, as groups of a torch optimizer name them."""
    narrows: bool = True
    """Whether it has AdamW's moments, which may be stored in fewer bits."""


OPTIMIZERS: Mapping[str, OptimizerKind] = {
    "adamw": OptimizerKind(schemas=ADAMW),
    "muon": OptimizerKind(schemas=ADAMW, matrices=MUON, settings=("lr", "betas", "eps", "momentum")),
    # Its momentum is fp32, whatever `train.moments` says, so there is one schema for each dtype that computes.
    "lion": OptimizerKind(schemas={(compute, "fp32"): LION[compute] for compute, _ in ADAMW}, narrows=False),
}
"""All there are, by name."""
