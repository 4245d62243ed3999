"""A run whose first steps have no gradient is remarked on once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny_runs import PLACES, Run, exactness_config, opened

from megatier.guards.no_gradient import FIRST_STEPS, REMARK, FirstNorms, learns_nothing

NAN = float("nan")


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ([0.0] * FIRST_STEPS, True),
        ([0.0] * FIRST_STEPS + [1.0], True),
        ([0.0] * (FIRST_STEPS - 1), False),
        ([0.0] * (FIRST_STEPS - 1) + [1e-30, 0.0], False),
        ([NAN, 0.0, 0.0, 0.0], False),
        ([None, 0.0, 0.0, 0.0], False),
    ],
    ids=str,
)
def test_learns_nothing_is_said_of_norms_that_all_are_0(norms: Sequence[float | None], expected: bool) -> None:
    assert learns_nothing(norms) is expected


def test_first_norms_warn_once_and_never_of_later_steps() -> None:
    norms = FirstNorms()
    with pytest.warns(UserWarning, match="the norm of the gradients was 0") as warned:
        for _ in range(3 * FIRST_STEPS):
            norms.add(0.0)
    assert [str(found.message) for found in warned] == [REMARK]
    norms = FirstNorms()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for norm in [1.0] + [0.0] * 3 * FIRST_STEPS:
            norms.add(norm)


def test_steps_with_no_label_to_learn_are_remarked_on_once(tmp_path: Path) -> None:
    run = Run(model="untied", place="gpu")
    ids = torch.arange(3, 35).view(2, 16)
    batch = {"input_ids": ids, "labels": torch.full_like(ids, -100)}
    with opened(exactness_config("untied"), tmp_path, PLACES["gpu"], run.train) as session:
        with pytest.warns(UserWarning, match=r"are all of them -100\?") as warned:
            for step in range(1, FIRST_STEPS + 3):
                session.engine.train_step(step, 1e-2, [batch])
        assert len(warned) == 1
