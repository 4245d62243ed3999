"""Knows which arguments of a module are cut into slices of a batch, and which results are concatenated again.

This is learnt by calling the model with one row and then with two (`stage.learning`), never guessed from sizes. Each
node has a `Rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatier.engine.call_arguments import Written
from megatier.errors import ConfigError

_Shape = tuple[int, ...] | None
"""The shape of a value; None if it is not a tensor or has no dimensions."""
_Shapes = list[_Shape]
"""The shapes of values, in order."""


class Rows:
    """The arguments and results of one module that have a batch dimension in front."""

    def __init__(self, module_name: str) -> None:
        """Begin with nothing learnt."""
        self._module_name = module_name
        self.batched: list[bool | None] | None = None
        """Whether each flat argument is cut (None: it was not a tensor while learning); None: not learnt yet."""
        self._one: dict[str, _Shapes] = {}
        """The shapes of arguments, results and written tensors in the run with one row."""
        self._joins = False
        """Whether everything written into containers has a batch dimension in front."""

    def learn(self, flat: Sequence[Any]) -> None:
        """Learn from the arguments of a call. The first call has one row, the second has two.

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

        # In the first call both are the same, so nothing counts as batched before the second call.
        self.batched = []
        for before, now in zip(one, shapes, strict=True):
            self.batched.append(None if before is None or now is None else before[0] != now[0])

    def learn_outputs(self, outputs: Sequence[Tensor | None]) -> None:
        """Learn from the results of such a call, including what hooks captured.

        Raises:
            ConfigError: slices of them cannot be concatenated.
        """
        shapes = [None if x is None else tuple(x.shape) for x in outputs]
        one = self._one.setdefault("returns", shapes)
        if one == shapes:
            # The module ignores its batched argument (BioGPT's mask, for positions), so it runs uncut.
            self.batched = [False] * len(self.batched or ())
            return

        for before, now in zip(one, shapes, strict=True):
            if now is None:
                continue
            # Two rows give twice the rows of one. A scalar has no rows, so slices of it cannot be concatenated.
            if not before or now != (2 * before[0], *before[1:]):
                raise ConfigError(
                    f"train.slices: the outputs of {self._module_name} cannot be joined along the batch; set it to 1."
                )

    def learn_written(self, tensors: Sequence[Tensor | None]) -> None:
        """Learn from what such a call wrote into containers."""
        shapes = _shapes(tensors)
        one = self._one.setdefault("writes", shapes)

        # Refused only when slices have to be concatenated (`check_joined`). A run in one slice may write anything.
        is_same_number = len(one) == len(shapes)
        self._joins = is_same_number and all(map(_are_batched, one, shapes))

    def are_cut(self, position: int) -> bool | None:
        """Return whether an argument is cut; None: it was missing while the module learnt."""
        if self.batched is None:
            return False
        if position >= len(self.batched):
            return None
        return self.batched[position]

    def check_joined(self, written: Written) -> None:
        """Check that slices of what was written can be concatenated.

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
    """Return whether two shapes differ in exactly the first dimension."""
    if one is None or other is None:
        return False
    return one[0] != other[0] and one[1:] == other[1:]


def _shapes(values: Sequence[Any]) -> _Shapes:
    return [tuple(x.shape) if torch.is_tensor(x) and x.dim() else None for x in values]
