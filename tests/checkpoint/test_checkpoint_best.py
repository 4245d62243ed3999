"""The best evaluation of a run, and how long none was better."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pytest

from megatier.checkpoint.best import Best
from megatier.errors import CheckpointError


def after(losses: list[float], threshold: float = 0.0) -> Best:
    found = Best()
    for step, loss in enumerate(losses, 1):
        found = found.after(step, loss, threshold)
    return found


@pytest.mark.parametrize(
    ("losses", "threshold", "step", "loss", "num_worse"),
    [
        ([], 0.0, None, None, 0),
        ([3.0], 0.0, 1, 3.0, 0),
        ([3.0, 2.0, 2.0], 0.0, 2, 2.0, 1),
        ([3.0, 2.0, 2.5, 2.1], 0.0, 2, 2.0, 2),
        ([3.0, 3.5, 2.5], 0.0, 3, 2.5, 0),
        ([3.0, 2.9, 2.85], 0.5, 3, 2.85, 2),  # lower, but by less than the threshold
        ([3.0, 2.0], 0.5, 2, 2.0, 0),
        ([math.nan, math.inf], 0.0, None, None, 2),
        ([3.0, math.nan, 2.0], 0.0, 3, 2.0, 0),
    ],
)
def test_best_after_evaluations_is_the_lowest_and_counts_those_that_were_not_better(
    losses: list[float], threshold: float, step: int | None, loss: float | None, num_worse: int
) -> None:
    assert after(losses, threshold) == Best(step=step, loss=loss, num_worse=num_worse)


def test_best_is_over_when_its_patience_is() -> None:
    found = after([2.0, 3.0, 3.0])
    assert not found.is_over(None)
    assert not found.is_over(3)
    assert found.is_over(2)
    assert found.why_over() == "2 evaluations did not lower the held-out loss enough: the lowest is 2.0000, of step 1"
    assert after([math.nan]).why_over() == "1 evaluation gave no loss that is a number"


def test_best_read_back_from_json_is_the_same_and_of_an_older_version_none() -> None:
    found = after([2.0 / 3, 3.0])
    assert Best.read({"best": json.loads(json.dumps(asdict(found)))}) == found
    assert Best.read({}) == Best()


@pytest.mark.parametrize(
    "noted",
    [
        [],
        3,
        {"step": True, "loss": 1.0},
        {"step": 1, "loss": None},
        {"step": 1, "loss": "low"},
        {"num_worse": None},
        {"more": 1},
    ],
    ids=str,
)
def test_best_of_another_type_is_damage(noted: Any) -> None:
    with pytest.raises(CheckpointError, match="the checkpoint is damaged: best is"):
        Best.read({"best": noted})
