"""Tells which arguments of a module are cut into slices of a batch, and which results are joined again.

That is learnt by calling the model with one row and with two (`stage.learning`), and never guessed from sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatier.engine.carried_tensors import Written
from megatier.errors import ConfigError

_Shape = tuple[int, ...] | None
"""The shape of a value; None for one that is no tensor, or has no dimension."""
_Shapes = list[_Shape]
"""The shapes of values, in order."""


class Rows:
    """The arguments and results of one module that have the batch in front."""

    def __init__(self, module_name: str) -> None:
        """Begin without knowing anything."""
        self._module_name = module_name
        self.batched: list[bool | None] | None = None
        """Whether each flat argument is cut (None: it was no tensor while learning); None: not learnt yet."""
        self._one: dict[str, _Shapes] = {}
        """The shapes that a run with one row takes, returns and writes."""
        self._joins = False
        """Whether all that is written into containers has the batch in front."""

    def learn(self, flat: Sequence[Any]) -> None:
        """Learn from the arguments of a call: the first one has one row, the second one has two.

        Args:
            flat: the arguments.

        Raises:
            ConfigError: an argument cannot be cut.
        """
        shapes = _shapes(flat)
        one = self._one.setdefault("takes", shapes)
        if len(one) != len(shapes) or not all(map(_differ_in_front, one, shapes)):
            raise ConfigError(
                f"train.slices: the arguments of {self._module_name} cannot be cut along the batch; set it to 1."
            )

        # In the first call the two are the same, so nothing counts as batched before the second one.
        self.batched = []
        for before, now in zip(one, shapes, strict=True):
            self.batched.append(None if before is None or now is None else before[0] != now[0])

    def learn_outputs(self, outputs: Sequence[Tensor | None]) -> None:
        """Learn from what such a call returned, and what was captured.

        Raises:
            ConfigError: slices of it cannot be joined.
        """
        shapes = [None if x is None else tuple(x.shape) for x in outputs]
        one = self._one.setdefault("returns", shapes)
        if one == shapes:
            # A batched argument that the module does not use (BioGPT's mask, for its positions): it runs uncut.
            self.batched = [False] * len(self.batched or ())
            return

        for before, now in zip(one, shapes, strict=True):
            if now is None:
                continue
            # Two rows give twice what one gives. A scalar has no rows, so slices of it cannot be laid end to end.
            if not before or now != (2 * before[0], *before[1:]):
                raise ConfigError(
                    f"train.slices: the outputs of {self._module_name} cannot be joined along the batch; set it to 1."
                )

    def learn_written(self, tensors: Sequence[Tensor | None]) -> None:
        """Learn from what such a call wrote into containers."""
        shapes = _shapes(tensors)
        one = self._one.setdefault("writes", shapes)

        # Refused only when slices have to be joined (`check_joined`): a run in one slice may write what it likes.
        is_same_number = len(one) == len(shapes)
        self._joins = is_same_number and all(map(_are_batched, one, shapes))

    def are_cut(self, position: int) -> bool | None:
        """Return whether an argument is cut; None: it was not there while the module learnt."""
        if self.batched is None:
            return False
        if position >= len(self.batched):
            return None
        return self.batched[position]

    def check_joined(self, written: Written) -> None:
        """Check that slices of what was written can be laid end to end.

        Raises:
            ConfigError: they have no batch dimension in front.
        """
        if written.places and not self._joins:
            raise ConfigError(
                f"train.slices: what {self._module_name} writes to {written.places[0][1]} cannot be cut along the "
                "batch; set it to 1."
            )


def _differ_in_front(one: _Shape, other: _Shape) -> bool:
    """Return whether two shapes differ in the first dimension at most, or one of the two is none."""
    return one is None or other is None or one[1:] == other[1:]


def _are_batched(one: _Shape, other: _Shape) -> bool:
    """Return whether two shapes differ in the first dimension, and in that alone."""
    if one is None or other is None:
        return False
    return one[0] != other[0] and one[1:] == other[1:]


def _shapes(values: Sequence[Any]) -> _Shapes:
    return [tuple(x.shape) if torch.is_tensor(x) and x.dim() else None for x in values]
