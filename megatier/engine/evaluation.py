"""Runs one forward of a model without gradients, as a pass of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatier.engine.stage import UnitPlayer
from megatier.engine.unit_model import UnitModel


@contextmanager
def evaluating(model: UnitModel, player: UnitPlayer, name: str) -> Iterator[None]:
    """Run one forward without gradients inside, whatever the grad mode is outside.

    Args:
        model: the model.
        player: plays the pass. Pending updates must be drained before.
        name: the name of the pass. All passes of one name use the units in the same order.
    """
    # The recorded order of units includes their group.
    model.stage.gradients.group = 0

    # Not in inference mode: cached views of weights that are made in it could not be used in a backward later.
    with torch.inference_mode(mode=False), torch.no_grad():
        player.begin(name)
        # Anything that ends the forward early, even an interrupt, must give back the weights in use.
        try:
            with model.running():
                yield
        except BaseException:
            player.cancel()
            raise

        player.end()
