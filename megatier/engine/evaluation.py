"""Runs one forward of a model without gradients, as a pass of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatier.engine.stage import UnitPlayer
from megatier.engine.unit_model import UnitModel


@contextmanager
def evaluating(model: UnitModel, player: UnitPlayer, name: str) -> Iterator[None]:
    """Run one forward without gradients inside, in whatever mode.

    Args:
        model: the model.
        player: plays the pass. Updates that are due are drained before.
        name: of the pass. All that have the same name use the units in the same order.
    """
    # The order of units is recorded with their group.
    model.stage.gradients.group = 0

    # Inference mode is left. Views of homes that are made in it stay cached, and no backward could use them later.
    with torch.inference_mode(mode=False), torch.no_grad():
        player.begin(name)
        # Whatever ends the forward early, an interrupt too: weights in use have to be given back.
        try:
            with model.running():
                yield
        except BaseException:
            player.cancel()
            raise

        player.end()
