"""Rows of a batch: which arguments of a module are cut into slices, and which results are joined again.

That is learnt by calling the model with one row and with two (`stage.learning`), and never guessed from sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatier.engine.carried import Written
from megatier.errors import ConfigError

Shapes = list[tuple[int, ...] | None]
"""The shapes of values, in order; None for a value that is no tensor, or has no dimension."""


class Rows:
    """The arguments and results of one module that have the batch in front."""

    def __init__(self, module_name: str) -> None:
        """Nothing is known yet."""
        self._module_name = module_name
        self.batched: list[bool | None] | None = None
        """Whether each flat argument is cut (None: it was no tensor while learning); None: not learnt yet."""
        self._one: dict[str, Shapes] = {}
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
        pairs = list(zip(one, shapes, strict=False))
        if len(one) != len(shapes) or any(a and b and a[1:] != b[1:] for a, b in pairs):
            raise ConfigError(
                f"train.slices: the arguments of {self._module_name} cannot be cut along the batch; set it to 1."
            )

        self.batched = [None if a is None or b is None else a[0] != b[0] for a, b in pairs]

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

        doubled = [(2 * shape[0], *shape[1:]) if shape else shape for shape in one]
        if not all(shape and shape == found for shape, found in zip(doubled, shapes, strict=True) if found is not None):
            raise ConfigError(
                f"train.slices: the outputs of {self._module_name} cannot be joined along the batch; set it to 1."
            )

    def learn_written(self, tensors: Sequence[Tensor | None]) -> None:
        """Learn from what such a call wrote into containers."""
        shapes = _shapes(tensors)
        one = self._one.setdefault("writes", shapes)
        pairs = zip(one, shapes, strict=False)
        self._joins = len(one) == len(shapes) and all(a and b and a[0] != b[0] and a[1:] == b[1:] for a, b in pairs)

    def are_cut(self, position: int) -> bool | None:
        """Whether an argument is cut; None: it was not there while the module learnt."""
        if self.batched is None:
            return False
        return self.batched[position] if position < len(self.batched) else None

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


def _shapes(values: Sequence[Any]) -> Shapes:
    return [tuple(x.shape) if torch.is_tensor(x) and x.dim() else None for x in values]
