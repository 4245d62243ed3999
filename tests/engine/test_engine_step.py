"""Groups share a step's loss; steps that are not finite are skipped, named, and too many in a row end the run."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tiny_gradients import far
from tiny_models import tiny_config
from tiny_runs import (
    PLACES,
    ModelWeights,
    Outcome,
    Run,
    exactness_config,
    opened,
    outcome,
    plain_model,
    random_groups,
    read_parameters,
)
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from megatier.config.schema import NumericsConfig, TrainConfig
from megatier.engine.step import Engine, StepResult
from megatier.engine.unit_model import Batch
from megatier.errors import NonFiniteError, UnsupportedModelError
from megatier.session.session import Session
from megatier.tier import Kind

POISON = {
    1: "model.layers.0.self_attn.k_proj.weight",
    4: "loss",
    5: "lm_head.weight",
    7: "model.layers.1.mlp.down_proj.weight",
}
"""Step -> what is not finite in it, or in one of its groups."""
STEPS = 8
ACTIVATIONS = itertools.cycle(("keep", "recompute", "offload"))
GUARDED = [
    pytest.param(
        place,
        activations,
        clip,
        groups,
        id=f"{place}-{activations}-{'clip' if clip else 'off'}-{groups}",
        marks=[] if (number + 2 * (clip is None) + (groups == 3)) % 4 == 0 else [pytest.mark.slow],
    )
    for clip, groups, (number, place) in itertools.product((0.5, None), (1, 3), enumerate(PLACES))
    for activations in (next(ACTIVATIONS),)
    if groups == 1 or not PLACES[place].spills_grads
]
"""By default a quarter, in which each place is met once."""


@contextlib.contextmanager
def poisoned(engine: Engine, what: str | None) -> Iterator[None]:
    """The loss of the next group is NaN, or an element of its gradient of a parameter is infinite."""
    gradients, once = engine.model.stage.gradients, iter([True])
    add, loss = gradients.add, engine.model.loss

    def spoilt_add(unit: str, parts: Sequence[tuple[str, Tensor | None]]) -> None:
        spoilt = [
            (name, grad.clone().index_fill(0, torch.tensor([2], device=grad.device), float("inf")))
            if grad is not None and name == what and next(once, False)
            else (name, grad)
            for name, grad in parts
        ]
        add(unit, spoilt)

    def spoilt_loss(batch: Batch, counted: int | None, share: float = 1.0) -> Tensor:
        return loss(batch, counted, share) * (float("nan") if what == "loss" and next(once, False) else 1)

    with patch.object(gradients, "add", spoilt_add), patch.object(engine.model, "loss", spoilt_loss):
        yield


def take_steps(session: Session, run: Run, numbers: Sequence[int]) -> list[StepResult]:
    """Each with the tokens, the dropout and the poison of its number."""
    results = []
    for step in numbers:
        with poisoned(session.engine, POISON.get(step)):
            results.append(session.engine.train_step(step, 1e-2, random_groups(run.train, 2112, step)))
    return results


@functools.cache
def unpoisoned(clip: float | None, groups: int, device: str) -> Outcome:
    """Of the same run on the GPU without the poisoned steps; where nothing is clipped, updated in the backward."""
    run = Run(model="untied", place="gpu", clip=clip, groups=groups)
    options: dict[str, Any] = {"device": device, "compile": False}
    with opened(exactness_config("untied"), Path(), PLACES["gpu"], run.train, **options) as session:
        good = [step for step in range(1, STEPS + 1) if step not in POISON]
        return outcome(session, take_steps(session, run, good))


@pytest.mark.parametrize(("place", "activations", "clip", "groups"), GUARDED)
def test_guard_a_poisoned_step_changes_no_bit(
    place: str, activations: str, clip: float | None, groups: int, tmp_path: Path
) -> None:
    check_poisoned(Run(model="untied", place=place, activations=activations, clip=clip, groups=groups), tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["gpu", "ram_streamed", "nvme_twice", "gpu_ram_nvme"])
def test_guard_a_poisoned_step_on_a_gpu_changes_no_bit(place: str, tmp_path: Path) -> None:
    check_poisoned(Run(model="untied", place=place, activations="recompute", groups=3, device="cuda"), tmp_path)


def check_poisoned(run: Run, mount: Path) -> None:
    place = PLACES[run.place]
    options: dict[str, Any] = {"numerics": NumericsConfig(guard=True), "device": run.device, "compile": False}
    with opened(exactness_config("untied"), mount, place, run.train, **options) as session:
        assert bool(session.placement.streamed) is bool(place.streamed)
        before = session.store.moved_bytes.copy()
        results = take_steps(session, run, range(1, STEPS + 1))
        session.player.drain()
        assert session.store.moved_bytes - before == session.player.demanded
        found = outcome(session, [result for result in results if result.skipped is None])
        assert bool(session.speculation.outcomes["void"]) is (place.generations == 2)
    named = POISON | {4: "lm_head.weight"}  # what a loss that is NaN reaches first
    assert [result.skipped for result in results] == [named.get(step) for step in range(1, STEPS + 1)]
    assert found == unpoisoned(run.clip, run.groups, run.device)


def test_guard_more_steps_in_a_row_than_may_be_left_out_end_the_run(tmp_path: Path) -> None:
    run, numerics = Run(model="untied", clip=None, place="ram"), NumericsConfig(max_skips=1)
    with opened(exactness_config("untied"), tmp_path, PLACES["ram"], run.train, numerics=numerics) as session:
        take_steps(session, run, range(1, 5))  # no two of them in a row
        with pytest.raises(NonFiniteError) as caught:
            take_steps(session, run, [5])
        found = outcome(session, [])
    assert str(caught.value) == (
        "the gradient norm of step 5 is not finite, and 1 steps before it were skipped; first in the gradient of "
        "lm_head.weight. No update of this step was written. Lower the learning rate, clip gradients to a norm, or "
        "look at the data of this step."
    )
    with opened(exactness_config("untied"), tmp_path, PLACES["ram"], run.train) as session:
        take_steps(session, run, [2, 3])
        assert outcome(session, []) == found


def test_guard_an_error_leaves_every_module_in_its_mode(tmp_path: Path) -> None:
    run, numerics = Run(model="untied", clip=None, place="ram"), NumericsConfig(max_skips=0)
    with opened(exactness_config("untied"), tmp_path, PLACES["ram"], run.train, numerics=numerics) as session:
        model = session.model
        model.train()
        frozen = next(module for module in model.modules() if not list(module.children()))
        frozen.eval()  # as whoever trains may want it
        with pytest.raises(NonFiniteError):
            take_steps(session, run, [1])
        assert [module for module in model.modules() if not module.training] == [frozen]
        session.engine.evaluate(random_groups(run.train, 160, 3))
        assert [module for module in model.modules() if not module.training] == [frozen]
        model.eval()
        session.engine.evaluate(random_groups(run.train, 160, 3))
        assert not any(module.training for module in model.modules())


def test_guard_a_loss_that_is_not_finite_alone_is_called_the_loss(tmp_path: Path) -> None:
    run = Run(model="untied", guard=True)
    with opened(exactness_config("untied"), tmp_path, PLACES["ram"], run.train, numerics=run.numerics) as session:
        loss = session.engine.model.loss
        with patch.object(session.engine.model, "loss", lambda *arguments: loss(*arguments) + float("inf")):
            [result] = take_steps(session, run, [2])
    assert (result.skipped, result.loss, result.clip_coefficient) == ("loss", float("inf"), 0.0)


@pytest.mark.parametrize("fused", [True, False])
def test_train_step_with_nothing_to_learn_has_no_loss_and_no_gradient(fused: bool, tmp_path: Path) -> None:
    run = Run(model="untied", place="gpu")
    ids = torch.arange(3, 35).view(2, 16)
    batch = {"input_ids": ids, "labels": torch.full_like(ids, -100)}
    with opened(exactness_config("untied"), tmp_path, PLACES["gpu"], run.train, fused_loss=fused) as session:
        result = session.engine.train_step(1, 1e-2, [batch])
        assert (result.loss, result.grad_norm, result.skipped) == (0.0, 0.0, None)
        some = {"input_ids": ids, "labels": ids}
        assert session.engine.evaluate([batch, some, batch]) == session.engine.evaluate([some])
        assert session.engine.evaluate([batch, batch]) is None


def test_evaluate_takes_a_batch_when_the_one_before_was_computed(tmp_path: Path) -> None:
    run = Run(model="untied", place="gpu")
    events = []

    def batches() -> Iterator[Batch]:
        for seed in range(3):
            events.append("taken")
            yield from random_groups(run.train, 160, seed)

    with opened(exactness_config("untied"), tmp_path, PLACES["gpu"], run.train) as session:
        loss = session.engine.model.loss

        def noted(*arguments: Any) -> Tensor:
            events.append("computed")
            return loss(*arguments)

        with patch.object(session.engine.model, "loss", noted):
            session.engine.evaluate(batches())
    assert events == ["taken", "computed"] * 3


def grouped_batch(rows: int = 8, tokens: int = 16) -> Batch:
    """Rows that count fewer and fewer tokens, the last none."""
    ids = torch.randint(3, 160, (rows, tokens), generator=torch.Generator().manual_seed(7))
    counts = torch.arange(tokens) < tokens - 2 * torch.arange(rows)[:, None]
    labels = ids.masked_fill(~counts, -100)
    labels[-1] = -100
    return {"input_ids": ids, "labels": labels}


def plain_step(model: Any, groups: Sequence[Batch]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of transformers' own, a router's loss weighted by each group's share of counted tokens."""
    counts = [int((group["labels"][:, 1:] != -100).sum()) for group in groups]
    model.zero_grad()
    total = 0.0
    for group, count in zip(groups, counts, strict=True):
        output = model(**group, num_items_in_batch=sum(counts), use_cache=False)
        balance = model.config.router_aux_loss_coef * output.aux_loss
        loss = output.loss - balance + balance * count / sum(counts)
        loss.backward()
        total += loss.item()
    return total, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("fused", [True, False])
def test_train_step_groups_have_a_share_of_a_routers_loss_by_their_tokens(fused: bool, tmp_path: Path) -> None:
    config = tiny_config("qwen3_moe", router_aux_loss_coef=0.5)
    plain, batch, losses = plain_model(config), grouped_batch(), []
    for count in (1, 2, 4, 8):
        parts = zip(*(value.chunk(count) for value in batch.values()), strict=True)
        groups = [dict(zip(batch, part, strict=True)) for part in parts]
        train = TrainConfig(batch=8, groups=count, beta1=0.0, clip=1e9)
        options: dict[str, Any] = {"compute_dtype": "fp32", "fused_loss": fused, "source": ModelWeights(plain)}
        with opened(config, tmp_path, PLACES["ram"], train, **options) as session:
            losses.append(session.engine.train_step(1, 0.0, groups).loss)
            found = read_parameters(session, Kind.EXP_AVG)
        expected_loss, expected = plain_step(plain, groups)
        assert losses[-1] == pytest.approx(expected_loss, rel=1e-6)
        assert far(found, expected, 1e-5) == {}
    assert losses == pytest.approx([losses[0]] * 4, rel=0.03)  # of another nonlinear mean in each


def test_train_step_with_a_loss_of_several_parts_and_more_refuses_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, batch = tiny_config("qwen3_moe"), grouped_batch(2)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    forward = kind.forward

    def twice(model: Any, **inputs: Any) -> Any:
        output = forward(model, **inputs)
        output.loss = output.loss + model.loss_function(output.logits, inputs["labels"], 160)
        return output

    monkeypatch.setattr(kind, "forward", twice)
    train = TrainConfig(batch=2, groups=2)
    with opened(config, tmp_path, PLACES["ram"], train, fused_loss=False) as session:
        groups = [{key: value[row : row + 1] for key, value in batch.items()} for row in range(2)]
        with pytest.raises(UnsupportedModelError, match=r"loss function 2 times .* set train\.groups to 1"):
            session.engine.train_step(1, 1e-3, groups)


def draws(session: Session, step: int, groups: Sequence[int]) -> dict[int, list[float]]:
    """The random numbers that each group of a step begins with, in the order in which they are computed."""
    found = {}
    session.engine.begin_step(step, 1e-2)
    for group in groups:
        session.engine.begin_group(group)
        found[group] = torch.rand(4).tolist()
    session.engine.abandon()
    return found


def test_begin_group_random_numbers_depend_on_seed_step_and_group_alone(tmp_path: Path) -> None:
    train = Run(model="untied", groups=3).train
    with opened(exactness_config("untied"), tmp_path, PLACES["ram"], train, seed=7) as session:
        first = draws(session, 2, (0, 1, 2))
        torch.rand(1)
        assert draws(session, 2, (2, 0, 1)) == first
        others = draws(session, 3, (0, 1, 2))
    with opened(exactness_config("untied"), tmp_path, PLACES["ram"], train, seed=8) as session:
        seeded = draws(session, 2, (0, 1, 2))
    numbers = [tuple(found) for step in (first, others, seeded) for found in step.values()]
    assert len(set(numbers)) == 9


def test_begin_group_without_a_seed_leaves_the_generators_alone(tmp_path: Path) -> None:
    train = Run(model="untied", groups=3).train
    with opened(exactness_config("untied"), tmp_path, PLACES["ram"], train, seed=None) as session:
        torch.manual_seed(5)
        found = draws(session, 1, (0, 1, 2))
        torch.manual_seed(5)
        assert list(found.values()) == [torch.rand(4).tolist() for _ in range(3)]
