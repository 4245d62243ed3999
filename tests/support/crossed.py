"""Settings that cross each other: the default tests meet every value of each, the slow ones every combination."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def crossed(*axes: Iterable[Any], by: int) -> list[ParameterSet]:
    """Every combination, of which one in `by` is not slow.

    Args:
        axes: the values of each setting.
        by: at most the size of the smallest axis but one, so that each value of every axis is met without the slow
            tests.
    """
    listed = [list(axis) for axis in axes]
    assert by <= sorted(len(axis) for axis in listed)[1], "some value would be met by slow tests alone"
    cases = []
    for places in itertools.product(*(range(len(axis)) for axis in listed)):
        values = [axis[place] for axis, place in zip(listed, places, strict=True)]
        cases.append(pytest.param(*values, marks=[] if sum(places) % by == 0 else [pytest.mark.slow]))
    return cases
