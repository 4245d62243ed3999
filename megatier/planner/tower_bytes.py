"""Estimates the memory that images take in a step: pixels, and the activations of vision towers.

`setup.tower` has measured the tower on the meta device, with the conversation that has the most pixels among the first
ones. Each row of a group counts as that conversation, so a plan has room for a group of the largest. If conversations
share sequences, each row counts with `data.max_patches`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megatier.data.image_chats import STEPS_AHEAD
from megatier.models.decoder import Unit
from megatier.planner.layer_sizes import is_of_layer
from megatier.setup.setup import Setup
from megatier.setup.tower import Sizes, TowerUnit, union
from megatier.setup.workload import without_input_gradient
from megatier.tier import Tier

WIDEST_GRADIENTS = 2
"""Gradients as wide as the widest activation in the backward of a unit: of a function's output and of its input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerBytes:
    """Bytes that a group's images take on the GPU, without pixels."""

    saved: int = 0
    """Activations that units outside of decoder layers save for their backward."""
    in_unit: int = 0
    """The largest amount that the backward of one of them makes in addition."""


def tower_bytes(setup: Setup) -> TowerBytes:
    """Return the bytes of activations that images take; 0 if the run reads no images, or nothing is known of them.

    A unit that keeps its graph saves what autograd saves, or a share of that if it is compiled. Any other saves its
    inputs, and recomputes the rest. The backward holds about as much either way, compiled or not.
    """
    tower = setup.tower
    lower = without_input_gradient(setup.work.units)
    saved = [tower.beside]
    in_unit = 0
    for unit in setup.work.units:
        sizes = tower.units.get(unit.name)
        if sizes is None or not _has_backward(unit, lower):
            continue
        of_unit = _saved_sizes(setup, unit, sizes)
        saved.append(of_unit)

        # Units run their backwards one after the other, so the largest counts, with the gradient of its weights.
        unsaved_bytes = max(0, bytes_in_backward(sizes) - union([of_unit]))
        weights = setup.item_bytes * unit.layout.num_trained
        in_unit = max(in_unit, round(_largest_rows(setup) * unsaved_bytes) + weights)
    return TowerBytes(saved=round(_largest_rows(setup) * union(saved)), in_unit=in_unit)


def _saved_sizes(setup: Setup, unit: Unit, sizes: TowerUnit) -> Sizes:
    """Return what a unit saves in one conversation."""
    if not setup.work.activations[unit.name].keeps_graph:
        return sizes.inputs
    if not setup.compiles:
        return sizes.saved

    # The compiler picks whole tensors, so it saves no more than this.
    chosen = {number: round(setup.saved_share * size) for number, size in sizes.saved.items()}
    return chosen | sizes.inputs


def bytes_in_backward(unit: TowerUnit) -> int:
    """Return the bytes of one conversation in the backward of a unit, including what the forward has saved."""
    widest_input = max(unit.inputs.values(), default=0)
    widest_saved = max(unit.saved.values(), default=0)
    widest = max(widest_input, widest_saved)

    # The output is as wide as the widest input. Its gradient stays to the end, because a residual needs it as well.
    output_gradient = widest_input
    return union([unit.saved]) + output_gradient + WIDEST_GRADIENTS * widest


def pixel_bytes(setup: Setup) -> dict[Tier, int]:
    """Return the bytes of pixels by tier, which no budget counts; an empty mapping without images.

    The pixels of all groups of a rank go to its GPU before the step. RAM has those of this step and of the next ones,
    which are made ahead.
    """
    group = round(_largest_rows(setup) * setup.tower.pixel_bytes)
    if not group:
        return {}
    # The GPU needs room for the largest conversations. RAM holds many at once, so there the mean counts.
    steps = STEPS_AHEAD + 1
    return {
        Tier.GPU: group * setup.work.policy.groups,
        Tier.RAM: round(steps * num_conversations(setup) * setup.tower.pixel_bytes * setup.tower.mean_share),
    }


def tower_flops(setup: Setup, unit: Unit) -> float:
    """Return the FLOPs that a group's images take in the products of a unit outside of decoder layers."""
    sizes = setup.tower.units.get(unit.name)
    if sizes is None or is_of_layer(unit):
        return 0.0
    of_step = sizes.flops * num_conversations(setup) * setup.tower.mean_share
    return of_step / setup.config.train.groups


def num_conversations(setup: Setup) -> float:
    """Return the mean number of conversations in a step."""
    data, tower = setup.config.data, setup.tower
    rows = setup.config.train.batch
    if data.max_patches is None or not tower.mean_tokens:
        return rows

    # A sequence is full when it has all of its tokens, or all of its patches.
    by_tokens = data.sequence_length / tower.mean_tokens
    by_patches = data.max_patches / (tower.num_patches * tower.mean_share)

    # There is at least one in a row, since conversations larger than a sequence are refused.
    return rows * max(1.0, min(by_tokens, by_patches))


def _largest_rows(setup: Setup) -> float:
    """Return the rows of a group, counted in conversations as large as the measured one."""
    rows = setup.work.rows
    max_patches = setup.config.data.max_patches
    num_patches = setup.tower.num_patches
    if max_patches is None or not num_patches:
        return rows
    return rows * max(1.0, max_patches / num_patches)


def _has_backward(unit: Unit, lower: Collection[str]) -> bool:
    """Return whether a unit is trained, or comes after one that is."""
    return unit.layout.num_trained > 0 or unit.name not in lower
