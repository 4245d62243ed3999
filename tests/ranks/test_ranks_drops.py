"""Steps of a loop that one rank drops: nothing has changed on any rank, the others are told, and all go on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rank_loops import group_loss, open_streamed, rows, train
from rank_pool import POOL
from torch import Tensor

from megatier.errors import StepDroppedError, TimelineError
from megatier.integrations.streamed import Streamed


def take_another_course(course: str | None) -> tuple[str, dict[str, Any]]:
    """Steps of two forwards a group, between which one rank takes another course; what the others were told."""
    told = ""
    with open_streamed() as streamed:
        for step in (1, 2, 3, 4):
            is_odd = step == 3 and streamed.rank == 1
            if step == 3 and course is None:
                continue
            for group in range(streamed.rank, streamed.groups, streamed.num_ranks):
                if is_odd and course is not None:
                    with pytest.raises(TimelineError, match="this step takes another course"):
                        group_loss(streamed, step, group, course).backward()
                    streamed.optimizer.zero_grad()
                    break
                group_loss(streamed, step, group, "FF").backward()
            if step == 3 and not is_odd:
                with pytest.raises(StepDroppedError) as dropped:
                    streamed.optimizer.step()
                told = str(dropped.value)
            elif step != 3:
                streamed.optimizer.step()
        return told, {name: value.numpy() for name, value in streamed.state_dict().items()}


@pytest.mark.parametrize(
    "course",
    ["FFF", pytest.param("F", marks=pytest.mark.slow), pytest.param("FaF", marks=pytest.mark.slow)],
)
def test_rank_that_takes_another_course_drops_its_step_and_all_go_on(course: str) -> None:
    expected = POOL.run(take_another_course, 2, None)
    found = POOL.run(take_another_course, 2, course)
    assert "step 3 was dropped" in found[0][0]
    for (_, weights), (_, others) in zip(found, expected, strict=True):
        assert [name for name in weights if (weights[name] != others[name]).any()] == []


@contextlib.contextmanager
def failing(streamed: Streamed, place: str) -> Iterator[None]:
    """Inside, a layer fails half-way in its forward or backward."""
    model: Any = streamed.model
    mlp = model.model.layers[1].mlp

    def fail(*_: object) -> None:
        raise ValueError(f"odd in {place}")

    def fail_backward(_: object, __: object, output: Tensor) -> None:
        output.register_hook(fail)

    hook = mlp.register_forward_pre_hook(fail) if place == "forward" else mlp.register_forward_hook(fail_backward)
    with hook, pytest.raises(ValueError, match=f"odd in {place}"):
        yield


def leave(streamed: Streamed, way: str, group: int) -> None:
    """Begin a group, and fail in it or drop its step."""
    with failing(streamed, way) if way in ("forward", "backward") else contextlib.nullcontext():
        loss = streamed.model(input_ids=rows(9, group), labels=rows(9, group)).loss
        if way != "call":
            loss.backward()
    if way == "norm":
        assert streamed.grad_norm() > 0
    if way == "norm" or way == "backward":
        streamed.optimizer.zero_grad()
    if way == "call":
        streamed.abandon()


def drop_steps(way: str, at: int, options: dict[str, Any]) -> tuple[list[Any], str, dict[str, Any]]:
    """Train, with a step in between that is dropped in the group `at`; by all ranks, or by the last one alone.

    Returns:
        The figures, what the others were told, and the weights.
    """
    told = ""
    with open_streamed(**options) as streamed:
        figures = train(streamed, 1, 2)
        is_last = streamed.rank == streamed.num_ranks - 1
        for number, group in enumerate(range(streamed.rank, streamed.groups, streamed.num_ranks)):
            if number == at and (is_last or way in ("call", "norm")):
                leave(streamed, way, group)
                break
            streamed.model(input_ids=rows(9, group), labels=rows(9, group)).loss.backward()
        else:
            with pytest.raises(StepDroppedError) as dropped:
                streamed.optimizer.step()
            told = str(dropped.value)
        figures += train(streamed, 3, 4)
        return figures, told, {name: value.numpy() for name, value in streamed.state_dict().items()}


def train_undisturbed() -> tuple[list[Any], dict[str, Any]]:
    """The figures and weights of the same steps without the one that is dropped."""
    with open_streamed() as streamed:
        return train(streamed, 1, 4), {name: value.numpy() for name, value in streamed.state_dict().items()}


@cache
def undisturbed() -> tuple[list[Any], dict[str, Any]]:
    """The same of one process."""
    (found,) = POOL.run(train_undisturbed, 1)
    figures, weights = found
    return figures, weights


@pytest.mark.parametrize(
    ("way", "at", "size", "nvme"),
    [
        ("forward", 0, 2, True),
        ("norm", 1, 2, False),
        pytest.param("norm", 0, 4, False, marks=pytest.mark.slow),
        pytest.param("backward", 1, 2, False, marks=pytest.mark.slow),
        pytest.param("call", 0, 2, False, marks=pytest.mark.slow),
        pytest.param("forward", 0, 4, False, marks=pytest.mark.slow),
        pytest.param("call", 1, 2, True, marks=pytest.mark.slow),
        pytest.param("backward", 0, 2, True, marks=pytest.mark.slow),
    ],
)
def test_step_that_ranks_drop_changes_nothing_and_all_go_on(
    way: str, at: int, size: int, nvme: bool, tmp_path: Path
) -> None:
    figures, weights = undisturbed()
    options = {"nvme": (f"{tmp_path}:64MiB",)} if nvme else {}
    *others, last = POOL.run(drop_steps, size, way, at, options)
    for found, _, has in (*others, last):
        assert found == figures
        assert [name for name in weights if (has[name] != weights[name]).any()] == []

    cause = {"forward": "ValueError: odd in forward.", "backward": "it called abandon() or zero_grad()."}.get(way)
    assert last[1] == ""
    for _, told, _ in others:
        assert (f"step 3 was dropped, and no weight has changed on any rank. Rank {size - 1}: {cause}" in told) is bool(
            cause
        )
