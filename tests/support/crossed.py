"""Cases of which the default tests meet some: of settings that cross each other, every value of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def some(cases: Iterable[Any], by: int, first: int = 0) -> list[ParameterSet]:
    """Every case, of which one in `by` is not slow. A case with several arguments is a tuple.

    Args:
        cases: tests of neighbours may take the same ones, each with another `first`.
        by: how many cases there are for each that is not slow.
        first: the place of the first one that is not.
    """
    listed = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*case, marks=[] if number % by == first else [pytest.mark.slow])
        for number, case in enumerate(listed)
    ]


def crossed(*axes: Iterable[Any], by: int) -> list[ParameterSet]:
    """Every combination, of which one in `by` is not slow.

    Args:
        axes: the values of each setting.
        by: of two axes at most the size of the smaller one, so that each value of every axis is met without the slow
            tests. In a case that is not slow, the places of its values add up to a multiple of it.
    """
    listed = [list(axis) for axis in axes]
    spans = [len(axis) - 1 for axis in listed]
    assert by <= 1 + sum(spans) - max(spans), "some value would be met by slow tests alone"
    cases = []
    for places in itertools.product(*(range(len(axis)) for axis in listed)):
        values = [axis[place] for axis, place in zip(listed, places, strict=True)]
        cases.append(pytest.param(*values, marks=[] if sum(places) % by == 0 else [pytest.mark.slow]))
    return cases
