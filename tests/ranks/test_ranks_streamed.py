"""Somebody else's loop over a streamed model on several ranks: the numbers of one process, and errors, no hangs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from crossed import some
from rank_loops import group_loss, open_streamed, rows, train
from rank_pool import POOL
from small_commands import files_of

from megatier.errors import CheckpointError, ConfigError, MegatierError, StreamedModelError


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
