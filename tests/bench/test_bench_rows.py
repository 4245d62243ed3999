"""The rows of the benchmarks: their settings are taken, and their models are as large as their shapes say."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from peers.shapes import SHAPES
from rows import ROWS, Run, config_of, skeleton

from megatier.models.expert_units import cut_units


@cache
def num_parameters(shape: str, sequence: int) -> int:
    """Parameters of a shape's skeleton."""
    model = skeleton(Run(shape=shape, batch=1, sequence=sequence, what="", tiers={}), "sdpa")
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("number", ROWS)
def test_row_has_settings_that_are_taken_and_a_model_as_large_as_its_shape_says(number: int) -> None:
    run = ROWS[number]
    config = config_of(run, True, Path("drive"))
    assert config.train.batch == run.batch
    assert config.model.config == SHAPES[run.shape].settings(run.sequence)
    assert num_parameters(run.shape, 4096) == SHAPES[run.shape].num_parameters


def test_row_of_experts_in_parts_cuts_each_layer_into_as_many() -> None:
    run = ROWS[38]
    units = cut_units(skeleton(run, "sdpa"), run.model["expert_parts"])
    assert sum(unit.experts is not None for unit in units) == 36 * 16
