"""Estimates the memory that images take in a step: pixels, and what vision towers save until their backward.

The tower was measured on shapes, with the conversation that has most pixels among the first ones (`setup.tower`). Each
row of a group counts as that one, so a plan has room for a group of the largest. Where conversations share sequences, a
row has as many patches as it may have.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megatier.data.image_chats import STEPS_AHEAD
from megatier.models.decoder import Unit
from megatier.planner.layer_sizes import is_of_layer
from megatier.setup.setup import Setup
from megatier.setup.tower import TowerUnit, union
from megatier.setup.workload import without_input_gradient
from megatier.tier import Tier

WIDEST_GRADIENTS = 2
"""Gradients as wide as the widest activation in the backward of a unit: those of the output and input of a function."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerBytes:
    """Bytes of a group on the GPU, but for pixels."""

    saved: int = 0
    """What the units outside of layers save from the forward to their backward."""
    in_unit: int = 0
    """The most that the backward of one of them makes besides."""


def tower_bytes(setup: Setup) -> TowerBytes:
    """Return the bytes that images take of activations; none if the run reads no images, or nothing is known of them.

    A unit that keeps its graph saves what autograd does, and any other its inputs, from which it computes the rest
    again. Compiled ones save less.
    """
    tower = setup.tower
    lower = without_input_gradient(setup.work.units)
    saved = [tower.beside]
    in_unit = 0
    for unit in setup.work.units:
        found = tower.units.get(unit.name)
        if found is None or not _has_backward(unit, lower):
            continue
        keeps = setup.work.activations[unit.name].keeps_graph
        saved.append(found.saved if keeps else found.inputs)

        # Backwards come one after the other, so the largest of them counts. Its weights have a gradient meanwhile.
        made = bytes_in_backward(found) - (union([found.saved]) if keeps else 0)
        weights = setup.item_bytes * unit.layout.num_trained
        in_unit = max(in_unit, round(_largest_rows(setup) * made) + weights)
    return TowerBytes(saved=round(_largest_rows(setup) * union(saved)), in_unit=in_unit)


def bytes_in_backward(unit: TowerUnit) -> int:
    """Return the bytes of one conversation in the backward of a unit, with all that the forward saves."""
    widest_input = max(unit.inputs.values(), default=0)
    widest_saved = max(unit.saved.values(), default=0)
    widest = max(widest_input, widest_saved)

    # The output is as wide as the widest input. Its gradient stays to the end, because a residual needs it as well.
    output_gradient = widest_input
    return union([unit.saved]) + output_gradient + WIDEST_GRADIENTS * widest


def pixel_bytes(setup: Setup) -> dict[Tier, int]:
    """Return the bytes of pixels that are outside of all budgets, by tier; none without images.

    All groups of a rank go to its GPU before the step. RAM has those of the step, and of the steps that are made ahead.
    """
    group = round(_largest_rows(setup) * setup.tower.pixel_bytes)
    if not group:
        return {}
    steps = STEPS_AHEAD + 1
    return {
        Tier.GPU: group * setup.work.policy.groups,
        Tier.RAM: round(steps * num_conversations(setup) * setup.tower.pixel_bytes * setup.tower.mean_share),
    }


def tower_flops(setup: Setup, unit: Unit) -> float:
    """Return the FLOPs of products in which a group's images go through a unit that is no layer."""
    found = setup.tower.units.get(unit.name)
    if found is None or is_of_layer(unit):
        return 0.0
    of_step = found.flops * num_conversations(setup) * setup.tower.mean_share
    return of_step / setup.config.train.groups


def num_conversations(setup: Setup) -> float:
    """Return the conversations of a step, on the mean."""
    data, tower = setup.config.data, setup.tower
    rows = setup.config.train.batch
    if data.max_patches is None or not tower.mean_tokens:
        return rows

    # A sequence is full of tokens, or of patches.
    by_tokens = data.sequence_length / tower.mean_tokens
    by_patches = data.max_patches / (tower.num_patches * tower.mean_share)

    # One at least, since a conversation that is larger than a sequence is refused.
    return rows * max(1.0, min(by_tokens, by_patches))


def _largest_rows(setup: Setup) -> float:
    """Return the rows of a group, in conversations as large as the one that was measured."""
    rows = setup.work.rows
    max_patches = setup.config.data.max_patches
    num_patches = setup.tower.num_patches
    if max_patches is None or not num_patches:
        return rows
    return rows * max(1.0, max_patches / num_patches)


def _has_backward(unit: Unit, lower: Collection[str]) -> bool:
    """Return whether a unit is trained, or lies behind one that is."""
    return unit.layout.num_trained > 0 or unit.name not in lower
