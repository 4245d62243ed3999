"""Somebody else's loop over a streamed model on several ranks: the numbers of one process, and errors, no hangs."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from crossed import some
from rank_pool import POOL
from test_train_shared import files_of
from tiny_runs import exactness_config, plain_model
from torch import Tensor

import megatier
from megatier.config.schema import TiersConfig
from megatier.errors import (
    CheckpointError,
    ConfigError,
    MegatierError,
    StepDroppedError,
    StreamedModelError,
    TimelineError,
)
from megatier.integrations.streamed import Streamed

GROUPS = 4
TIERS = TiersConfig(device="cpu", gpu=8 << 20, ram=32 << 20, update_threads=2, io_threads=2)


def open_streamed(nvme: tuple[str, ...] = (), **options: Any) -> Streamed:
    """A tiny model on this rank, of the steps of GROUPS backwards on all ranks."""
    size = int(os.environ["WORLD_SIZE"])
    tiers = replace(TIERS, nvme=nvme, state=("nvme",) if nvme else TIERS.state)
    chosen = {"accumulation_steps": GROUPS // size, "lr": 1e-2, "clip": 0.5, **options}
    return megatier.stream(plain_model(exactness_config("plain")), tiers=tiers, **chosen)


def rows(step: int, group: int) -> Tensor:
    """The rows of a group."""
    return torch.randint(3, 160, (2, 16), generator=torch.Generator().manual_seed(100 * step + group))


def train(streamed: Streamed, first: int, last: int) -> list[tuple[float, float]]:
    """Loss and norm of some steps."""
    figures = []
    for step in range(first, last + 1):
        losses = []
        for group in range(streamed.rank, streamed.groups, streamed.num_ranks):
            tokens = rows(step, group)
            loss = streamed.model(input_ids=tokens, labels=tokens).loss / streamed.groups
            loss.backward()
            losses.append(loss.item())
        streamed.optimizer.step()
        assert streamed.last is not None
        figures.append((math.fsum(chain(*streamed.all_of(losses))), streamed.last.grad_norm))
    # None is an object too, and keeps its place among those of the ranks.
    assert streamed.all_of(streamed.rank or None) == [number or None for number in range(streamed.num_ranks)]
    return figures


def run_loop(folder: Path, options: dict[str, Any]) -> tuple[list[tuple[float, float]], float, dict[str, Any]]:
    """Train, evaluate, save and export on this rank; the figures, an evaluation and the weights."""
    with open_streamed(**options) as streamed:
        figures = train(streamed, 1, 3)
        with torch.no_grad():
            held_out = streamed.model(input_ids=rows(0, 0), labels=rows(0, 0)).loss.item()
        streamed.save(folder / "saved")
        streamed.export(folder / "model")
        weights = {name: value.numpy() for name, value in streamed.state_dict().items()}
        assert (streamed.read("model.norm.weight").numpy() == weights["model.norm.weight"]).all()
        return figures, held_out, weights


def go_on(folder: Path) -> list[tuple[float, float]]:
    """Train two more steps from what was saved, on this rank."""
    with open_streamed() as streamed:
        streamed.restore(folder / "saved")
        assert streamed.steps == 3
        return train(streamed, 4, 5)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, (4,)),
        pytest.param({"clip": None, "tile_tokens": 20}, (2,), marks=pytest.mark.slow),
        pytest.param({}, (2,), marks=pytest.mark.slow),
        pytest.param({"clip": None, "tile_tokens": 20}, (4,), marks=pytest.mark.slow),
        pytest.param({"fused_loss": False, "compute_dtype": "fp32"}, (2, 4), marks=pytest.mark.slow),
    ],
)
def test_loop_on_ranks_has_the_numbers_and_files_of_one_process(
    options: dict[str, Any], sizes: Sequence[int], tmp_path: Path
) -> None:
    (alone,) = POOL.run(run_loop, 1, tmp_path / "1", options)
    files = files_of(tmp_path / "1")
    for size in sizes:
        for figures, held_out, weights in POOL.run(run_loop, size, tmp_path / str(size), options):
            assert (figures, held_out) == alone[:2]
            assert [name for name in alone[2] if (weights[name] != alone[2][name]).any()] == []
        found = files_of(tmp_path / str(size))
        assert found.keys() == files.keys()
        assert [name for name in files if found[name] != files[name]] == []


def train_in_course(course: str, options: dict[str, Any]) -> tuple[list[float], list[float], dict[str, Any]]:
    """Steps whose every group has these forwards, with gradients (F) and without (a), before one backward."""
    norms, sums = [], []
    with open_streamed(fused_loss=False, **options) as streamed:
        for step in range(1, 4):
            losses = []
            for group in range(streamed.rank, streamed.groups, streamed.num_ranks):
                total = torch.zeros(())
                for number, leg in enumerate(course):
                    tokens = rows(step, 10 * group + number)
                    with torch.set_grad_enabled(leg == "F"):
                        loss = streamed.model(input_ids=tokens, labels=tokens).loss
                    total = 0.7 * total + loss if leg == "F" else total * (1 + loss)
                (total / streamed.groups).backward()
                losses.append(total.item())
            streamed.optimizer.step()
            assert streamed.last is not None
            norms.append(streamed.last.grad_norm)
            sums.append(math.fsum(chain(*streamed.all_of(losses))))
        return sums, norms, {name: value.numpy() for name, value in streamed.state_dict().items()}


@pytest.mark.parametrize(
    ("course", "size", "options"),
    [
        ("FaF", 2, {}),
        pytest.param("FF", 4, {"clip": None}, marks=pytest.mark.slow),
        pytest.param("aFF", 2, {}, marks=pytest.mark.slow),
        pytest.param("aF", 4, {"compute_dtype": "fp32"}, marks=pytest.mark.slow),
    ],
)
def test_forwards_of_one_backward_on_ranks_have_the_bits_of_one_process(
    course: str, size: int, options: dict[str, Any], tmp_path: Path
) -> None:
    options = {**options, "nvme": (f"{tmp_path}:64MiB",)}
    (alone,) = POOL.run(train_in_course, 1, course, options)
    for sums, norms, weights in POOL.run(train_in_course, size, course, options):
        assert (sums, norms) == alone[:2]
        assert [name for name in weights if (weights[name] != alone[2][name]).any()] == []


def group_loss(streamed: Streamed, step: int, group: int, course: str) -> Tensor:
    """The loss of the forwards of a group."""
    total = torch.zeros(())
    for number, leg in enumerate(course):
        tokens = rows(step, 10 * group + number)
        with torch.set_grad_enabled(leg == "F"):
            total = total + streamed.model(input_ids=tokens, labels=tokens).loss
    return total / streamed.groups


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


def take_another_first_course() -> str:
    """What a rank is told if the first step of one has a further forward."""
    try:
        with open_streamed() as streamed:
            group_loss(streamed, 1, 0, "FF" if streamed.rank else "F").backward()
    except MegatierError as error:
        return str(error)
    return ""


def test_ranks_whose_first_steps_take_different_courses_are_told() -> None:
    told = POOL.run(take_another_first_course, 2)
    POOL.close()
    assert all("Ranks need the same order of units" in message for message in told)


def generate_some(lengths: Sequence[int]) -> list[list[int]]:
    """Tokens that this rank generates, each rank so many, with a step before."""
    with open_streamed(fused_loss=False) as streamed:
        figures = train(streamed, 1, 1)
        model: Any = streamed.model
        found = [
            model.generate(rows(step, 0)[:1, :4], do_sample=False, min_new_tokens=length, max_new_tokens=length)
            for step, length in enumerate((lengths[streamed.rank], 3))
        ]
        assert train(streamed, 2, 2) != figures
        return [tokens[0].tolist() for tokens in found]


def test_texts_of_ranks_that_end_at_different_places_are_those_of_one_process() -> None:
    expected = [POOL.run(generate_some, 1, [length])[0] for length in (5, 9)]
    assert POOL.run(generate_some, 2, [5, 9]) == expected


def take_weights(folder: Path) -> dict[str, Any]:
    """The weights by the names of the model's folder, after a step. The first rank has broken off once."""
    with open_streamed((f"{folder}:64MiB",)) as streamed:
        for step in (1, 2):
            train(streamed, step, step)
            for number, _ in enumerate(streamed.weights()):
                if streamed.rank == 0 and number == 12:
                    break
        return {name: tensor.float().numpy() for name, tensor in streamed.weights()}


def test_hub_weights_on_ranks_are_those_of_one_process_though_one_rank_breaks_off(tmp_path: Path) -> None:
    (alone,) = POOL.run(take_weights, 1, tmp_path)
    for weights in POOL.run(take_weights, 2, tmp_path):
        assert weights.keys() == alone.keys()
        assert [name for name in alone if (weights[name] != alone[name]).any()] == []


def test_loop_on_ranks_goes_on_from_what_another_number_of_ranks_saved(tmp_path: Path) -> None:
    POOL.run(run_loop, 2, tmp_path, {"nvme": (f"{tmp_path}:64MiB",)})
    (alone,) = POOL.run(go_on, 1, tmp_path)
    assert POOL.run(go_on, 4, tmp_path) == [alone] * 4


def open_twice() -> list[float]:
    """Open a model on this rank, and another one when it is closed."""
    found = []
    for _ in range(2):
        with open_streamed() as streamed:
            found.append(train(streamed, 1, 1)[0][1])
    return found


def test_model_is_opened_on_ranks_again_after_another_was_closed() -> None:
    first, second = POOL.run(open_twice, 2)
    assert first == second == [first[0]] * 2


def join_program() -> bool:
    """Open a model in a program that uses torch.distributed itself, on this rank; whether the program still can."""
    dist: Any = torch.distributed
    dist.init_process_group("gloo")
    told: list[Any] = [None, None]
    with open_streamed() as streamed:
        train(streamed, 1, 1)
        dist.all_gather_object(told, dist.get_rank())
    dist.all_gather_object([None, None], "still")
    return told == [0, 1]


def test_loop_leaves_the_process_group_of_the_program_around_it_alone() -> None:
    assert POOL.run(join_program, 2) == [True, True]


# ---------------------------------------------------------------------- misuse


def use_alone(call: str) -> str:
    """Make a call on the first rank alone; return what ends this rank."""
    try:
        with open_streamed() as streamed:
            train(streamed, 1, 2)
            if streamed.rank == 0:
                {  # type: ignore[no-untyped-call]
                    "read": lambda: streamed.read("model.norm.weight"),
                    "state_dict": streamed.state_dict,
                    "export": lambda: streamed.export("nowhere"),
                    "save": lambda: streamed.save("nowhere"),
                    "train": lambda: train(streamed, 3, 3),
                }[call]()
    except MegatierError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("call", some(["train", "save", "read", "export", "state_dict"], by=4))
def test_call_that_one_rank_makes_alone_is_an_error_on_all(call: str) -> None:
    first, second = POOL.run(use_alone, 2, call)
    POOL.close()
    assert "and rank 1 to close()" in first
    assert "rank 1 has come to close(), and rank 0 to " in second
    assert ("forward" if call == "train" else call) in first


def leave_step(way: str) -> str:
    """Leave a step half-way on the second rank; return what ends this rank."""
    try:
        with open_streamed() as streamed:
            if way != "first":
                train(streamed, 1, 2)
            loss = streamed.model(input_ids=rows(3, 0), labels=rows(3, 0)).loss
            if streamed.rank == 1:
                if way == "first":
                    streamed.abandon()
                if way == "break":
                    int("my own")
                if way != "close":
                    streamed.model(input_ids=rows(3, 0), labels=rows(3, 0))
            else:
                loss.backward()
                streamed.model(input_ids=rows(3, 0), labels=rows(3, 0))
    except (MegatierError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("way", "cause"),
    [
        ("first", "this rank has left a step half-way"),
        ("break", "my own"),
        pytest.param("close", "Closing in the middle of a step", marks=pytest.mark.slow),
        pytest.param("forward", "this step takes another course (Ff) than the one before", marks=pytest.mark.slow),
    ],
)
def test_rank_that_leaves_a_step_ends_all_with_its_cause(way: str, cause: str) -> None:
    first, second = POOL.run(leave_step, 2, way)
    POOL.close()
    assert "rank 1 on " in first
    assert cause in first
    assert cause in second


# ---------------------------------------------------------------------- steps that are dropped


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


def fail_together(folder: Path) -> list[str]:
    """Calls that fail on all ranks alike, after which training goes on."""
    (folder / "full").mkdir(exist_ok=True)
    (folder / "full/file").touch()
    with open_streamed() as streamed:
        with pytest.raises(ConfigError) as no_export:
            streamed.export(folder / "full")
        with pytest.raises(CheckpointError) as no_restore:
            streamed.restore(folder / "full")
        refused = [str(no_export.value), str(no_restore.value)]
        with pytest.raises(StreamedModelError, match="after 0 of 2 backwards"):
            streamed.optimizer.step()
        train(streamed, 1, 2)
    return refused


def test_call_that_fails_on_the_first_rank_fails_on_all_and_training_goes_on(tmp_path: Path) -> None:
    first, second = POOL.run(fail_together, 2, tmp_path)
    assert first == second
    assert "is not empty" in first[0]
    assert "holds no checkpoint" in first[1]
