"""Steps of several forwards before one backward: plain bits, on any place, in any course; and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_adamw import PlainAdamW
from streamed_loops import VOCAB, same, streamed_on, train_config
from tiny_runs import ModelWeights, exactness_config, plain_model, random_groups, read_parameters
from torch import Tensor, nn

from megatier.errors import StreamedModelError, TimelineError
from megatier.integrations.streamed import Streamed
from megatier.play.passes import Pass
from megatier.tier import Kind

COURSES = ("FfB", "FfB", "FB", "FfB", "FafB", "FB", "FfB", "FafB")
"""F and f: forwards with gradients; a: one without. Steps of each are recorded, planned, and met unexpectedly."""
RATE = 1e-2


def batch_of(number: int, model: str) -> dict[str, Tensor]:
    (batch,) = random_groups(train_config(model, groups=1), VOCAB[model], number)
    return dict(batch)


def loss_of(model: Any, course: str, step: int, kind: str, device: str | torch.device = "cpu") -> Tensor:
    """A loss over the forwards of one group, as a loop makes it; its backward is the last leg."""
    torch.manual_seed(step)
    total = torch.zeros((), device=device)
    for number, leg in enumerate(course.removesuffix("B")):
        batch = {name: values.to(device) for name, values in batch_of(10 * step + number, kind).items()}
        if leg == "a":
            with torch.no_grad():
                reference = model(**batch).loss
            total = total * (1 + reference)
        else:
            total = 0.7 * total + model(**batch).loss
    return total


def take(streamed: Streamed, courses: Sequence[str], kind: str) -> list[float]:
    """The losses of the groups of these steps, each of which has a course."""
    losses = []
    for step, course in enumerate(courses, 1):
        for group in streamed.optimizer.param_groups:
            group["lr"] = RATE
        for number, forwards in enumerate(course.removesuffix("B").split("B")):
            loss = loss_of(streamed.model, forwards, 7 * step + number, kind, streamed.device)
            loss.backward()
            losses.append(loss.item())
        streamed.optimizer.step()
    return losses


def check_same(found: Sequence[tuple[list[float], dict[str, Tensor]]]) -> None:
    """Losses and weights are those of the first run, bit by bit."""
    losses, weights = found[0]
    for other, others in found[1:]:
        assert other == losses
        assert same(others, weights)


@pytest.mark.parametrize(("place", "kind"), [("ram_streamed", "tied"), ("gpu", "untied"), ("nvme_twice", "untied")])
def test_forwards_of_one_backward_in_fp32_take_the_steps_of_a_plain_loop(place: str, kind: str, tmp_path: Path) -> None:
    model = plain_model(exactness_config(kind)).train()
    train = train_config(kind, groups=1)
    options: dict[str, Any] = {"source": ModelWeights(model), "compute_dtype": "fp32", "fused_loss": False}
    with streamed_on(place, tmp_path, train, model=kind, **options) as (_, streamed):
        losses, weights = take(streamed, COURSES[:3], kind), streamed.state_dict()
    optimizer = PlainAdamW(model, 0.5)
    for step, course in enumerate(COURSES[:3], 1):
        loss = loss_of(model, course, 7 * step, kind)
        loss.backward()
        optimizer.step(step, RATE)
        assert loss.item() == losses[step - 1]
    plain = dict(model.named_parameters())
    assert [name for name, value in weights.items() if name in plain and not torch.equal(plain[name], value)] == []


@pytest.mark.parametrize("fused_loss", [True, False])
def test_forwards_in_any_course_give_the_same_bits_on_any_place_and_move_what_is_demanded(
    fused_loss: bool, tmp_path: Path
) -> None:
    found = []
    for place, activations in (("gpu", "keep"), ("ram", "recompute"), ("nvme", "keep"), ("ram_streamed", "keep")):
        train = train_config("tied", groups=1, activations=activations)
        with streamed_on(place, tmp_path, train, fused_loss=fused_loss) as (session, streamed):
            before = Counter(session.store.moved_bytes)
            losses = take(streamed, COURSES, "tied")
            session.player.drain()
            moved = Counter(session.store.moved_bytes)
            moved.subtract(before)
            assert +moved == +session.player.demanded
            found.append((losses, streamed.state_dict()))
    check_same(found)


@pytest.mark.gpu
@pytest.mark.parametrize("compiles", [False, True])
def test_forwards_on_a_gpu_give_the_same_bits_on_any_place(compiles: bool, tmp_path: Path) -> None:
    found = []
    for place, activations in (("gpu", "keep"), ("nvme", "recompute"), ("ram_streamed", "keep")):
        train = train_config("tied", groups=1, activations=activations)
        with streamed_on(place, tmp_path, train, device="cuda", compile=compiles) as (_, streamed):
            found.append((take(streamed, COURSES, "tied"), streamed.state_dict()))
    check_same(found)


@pytest.mark.gpu
def test_forwards_on_a_gpu_in_fp32_have_the_gradients_of_a_plain_loop(tmp_path: Path) -> None:
    model = plain_model(exactness_config("untied")).train()
    nn.Module.to(model, "cuda")
    train = replace(train_config("untied", groups=1, clip=None), beta1=0.0)
    options: dict[str, Any] = {"source": ModelWeights(model), "compute_dtype": "fp32", "compile": False}
    with streamed_on("ram", tmp_path, train, model="untied", device="cuda", fused_loss=False, **options) as opened:
        session, streamed = opened
        losses = take(streamed, ("FafB",), "untied")
        # Without momentum and clipping, the first moment is the gradient.
        found = read_parameters(session, Kind.EXP_AVG)
    loss = loss_of(model, "FafB", 7, "untied", "cuda")
    loss.backward()
    assert [loss.item()] == losses
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert [name for name, grad in grads.items() if grad is None or not torch.equal(found[name], grad.cpu())] == []


def test_forwards_of_several_groups_give_the_same_bits_on_any_place(tmp_path: Path) -> None:
    courses = ("FfBFB", "FBaFafB", "FfBFB", "FBFB", "FBaFafB")
    found = []
    for place in ("gpu", "ram_nvme", "ram_streamed"):
        with streamed_on(place, tmp_path, train_config("tied")) as (_, streamed):
            found.append((take(streamed, courses, "tied"), streamed.state_dict()))
    check_same(found)


def test_forwards_are_planned_when_their_course_comes_again(tmp_path: Path) -> None:
    with streamed_on("ram", tmp_path, train_config("tied", groups=1)) as (session, streamed):
        planned = []
        for course in ("FB", "FfB", "FB", "FfB", "FB", "FfB"):
            take(streamed, (course,), "tied")
            played = session.player._pass
            planned.append(played.timeline is not None)
            assert played.course == course
        assert planned == [False, False, True, True, True, True]
        assert session.player._orders.expected("train") == "FB"


def test_backward_of_one_of_two_forwards_is_refused(tmp_path: Path) -> None:
    with streamed_on("ram", tmp_path, train_config("tied", groups=1)) as (_, streamed):
        first, second = (streamed.model(**batch_of(number, "tied")).loss for number in (1, 2))
        with pytest.raises(StreamedModelError, match="came to 1 of the 2 forwards"):
            second.backward()
        with pytest.raises(StreamedModelError, match="a backward has begun"):
            streamed.model(**batch_of(3, "tied"))
        with pytest.raises(StreamedModelError, match="after 0 of 1 backwards"):
            streamed.optimizer.step()
        streamed.abandon()
        assert take(streamed, ("FB",), "tied")
        with pytest.raises(StreamedModelError, match="has had its backward"):
            first.backward()


def test_second_backward_of_a_group_is_refused(tmp_path: Path) -> None:
    with streamed_on("ram", tmp_path, train_config("tied", groups=1)) as (_, streamed):
        loss = streamed.model(**batch_of(1, "tied")).loss
        loss.backward(retain_graph=True)
        with pytest.raises(StreamedModelError, match="has had its backward"):
            loss.backward()


def test_further_forward_that_fails_abandons_its_step(tmp_path: Path) -> None:
    with streamed_on("ram_nvme", tmp_path, train_config("tied", groups=1)) as (_, streamed):
        for grad in (True, False):
            take(streamed, ("FfB",), "tied")
            batch = batch_of(1, "tied")
            streamed.model(**batch)
            with pytest.raises(IndexError), torch.set_grad_enabled(grad):
                streamed.model(**{**batch, "input_ids": batch["input_ids"] + 1000})
            take(streamed, ("FfB", "FB"), "tied")


def test_step_that_may_not_take_another_course_is_abandoned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise TimelineError("another course")

    with streamed_on("ram", tmp_path, train_config("tied", groups=1)) as (_, streamed):
        take(streamed, ("FB",), "tied")
        with monkeypatch.context() as patched:
            patched.setattr(Pass, "check_can_replan", refuse)
            streamed.model(**batch_of(1, "tied"))
            with pytest.raises(TimelineError, match="another course"):
                streamed.model(**batch_of(2, "tied"))
        take(streamed, ("FB", "FfB"), "tied")
        assert streamed.steps == 3
