"""A streamed model: a plain loop takes the engine's own steps, bit by bit, and says what it cannot take."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from crossed import crossed
from from_outside import check_invariants
from streamed_loops import GUARDED, VOCAB, loop, reference, same, streamed_on, train_config
from tiny_runs import (
    PLACES,
    ModelWeights,
    Outcome,
    exactness_config,
    opened,
    outcome,
    plain_model,
    random_groups,
)
from torch import Tensor

from megatier.engine.gradient import Gradients
from megatier.errors import NonFiniteError, StreamedModelError, UnknownTokenError
from megatier.integrations.streamed import Streamed


@pytest.fixture(scope="module")
def of_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Outcome]:
    """What the engine's own steps come to, by the number of groups."""

    @functools.cache
    def run(groups: int) -> Outcome:
        train, folder = train_config("tied", groups=groups), tmp_path_factory.mktemp("engine")
        config = exactness_config("tied")
        with opened(config, folder, PLACES["gpu"], train, numerics=GUARDED, seed=None, fused_loss=True) as session:
            torch.manual_seed(5)
            return outcome(session, reference(session, train, 160))

    return run


@pytest.mark.parametrize(("place", "groups"), crossed(PLACES, [1, 2], by=2))
def test_loop_any_place_takes_the_steps_of_the_engine_bit_by_bit(
    place: str, groups: int, tmp_path: Path, of_engine: Callable[[int], Outcome]
) -> None:
    if place == "nvme_grads" and groups > 1:
        pytest.skip("gradients of several groups do not go to NVMe")
    train = train_config("tied", groups=groups)
    with streamed_on(place, tmp_path, train) as (session, streamed):
        torch.manual_seed(5)
        results = loop(streamed, train, 160)
        assert any(result.clip_coefficient < 1 for result in results)
        assert outcome(session, results) == of_engine(groups)


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("place", ["gpu", "ram", "ram_streamed", "gpu_ram_nvme", "nvme_twice"])
def test_loop_on_a_gpu_takes_the_steps_of_the_engine_bit_by_bit(place: str, groups: int, tmp_path: Path) -> None:
    train = train_config("tied", groups=groups)
    options: dict[str, Any] = {"device": "cuda", "compile": False, "fused_loss": True, "seed": None}
    with opened(exactness_config("tied"), tmp_path, PLACES["gpu_ram"], train, numerics=GUARDED, **options) as session:
        torch.manual_seed(5)
        expected = outcome(session, reference(session, train, 160))
    with streamed_on(place, tmp_path, train, **options) as (session, streamed):
        torch.manual_seed(5)
        assert outcome(session, loop(streamed, train, 160)) == expected


@pytest.mark.parametrize(
    ("model", "fused_loss", "activations"), crossed(["untied", "moe"], [True, False], ["keep", "recompute"], by=2)
)
def test_loop_any_model_and_policy_takes_the_steps_of_the_engine(
    model: str, fused_loss: bool, activations: str, tmp_path: Path
) -> None:
    groups = 1 if model == "moe" else 2  # a router's loss is whole in each backward of a loop
    train, config = train_config(model, groups=groups, activations=activations), exactness_config(model)
    with opened(config, tmp_path, PLACES["ram"], train, numerics=GUARDED, seed=None, fused_loss=fused_loss) as session:
        torch.manual_seed(5)
        expected = outcome(session, reference(session, train, VOCAB[model]))
    with streamed_on("ram", tmp_path, train, model=model, fused_loss=fused_loss) as (session, streamed):
        torch.manual_seed(5)
        assert outcome(session, loop(streamed, train, VOCAB[model])) == expected


def test_loop_on_a_cpu_without_bf16_instructions_takes_the_steps_of_the_engine(tmp_path: Path) -> None:
    train = train_config("tied")
    with patch("megatier.setup.machine.cpu_has_bf16", return_value=False):
        with opened(exactness_config("tied"), tmp_path, PLACES["ram"], train, numerics=GUARDED, seed=None) as session:
            torch.manual_seed(5)
            expected = outcome(session, reference(session, train, 160))
        with streamed_on("ram", tmp_path, train, fused_loss=False) as (session, streamed):
            torch.manual_seed(5)
            assert outcome(session, loop(streamed, train, 160)) == expected


@pytest.mark.parametrize("model", ["tied", "untied"])
@patch("megatier.setup.machine.cpu_has_bf16", return_value=True)
def test_lent_head_gives_the_gradients_of_the_head_itself(_: object, model: str, tmp_path: Path) -> None:
    train = train_config(model, groups=1)
    outcomes = []
    for is_lent in (False, True):
        with streamed_on("ram_nvme", tmp_path, train, model=model, fused_loss=False) as (session, streamed):
            torch.manual_seed(5)
            results = []
            for step in (1, 2, 3):
                [batch] = random_groups(train, VOCAB[model], step)
                loss = loss_past_the_head(streamed, batch) if is_lent else streamed.model(**batch).loss
                loss.backward()
                streamed.optimizer.step()
                assert streamed.last is not None
                results.append(replace(streamed.last, loss=loss.item()))
            outcomes.append(outcome(session, results))
    assert outcomes[0] == outcomes[1]


def test_lent_head_in_evaluations_among_others_gives_the_same_loss(tmp_path: Path) -> None:
    train = train_config("untied", groups=1)
    with streamed_on("ram_nvme", tmp_path, train, model="untied", fused_loss=False) as (_, streamed), torch.no_grad():
        streamed.model.eval()
        [batch] = random_groups(train, 2112, 1)
        losses = {
            loss.item()
            for _ in range(2)
            for loss in (loss_past_the_head(streamed, batch), streamed.model(**batch).loss)
        }
        assert len(losses) == 1


@pytest.mark.parametrize(("place", "fused_loss"), crossed(["gpu", "ram_nvme"], [True, False], by=2))
def test_evaluations_in_inference_mode_leave_no_trace_in_the_steps(
    place: str, fused_loss: bool, tmp_path: Path
) -> None:
    """Lightning validates in it; what is made there could be in no backward."""
    train = train_config("tied", groups=1)
    outcomes = []
    for evaluates in (False, True):
        with streamed_on(place, tmp_path, train, fused_loss=fused_loss) as (session, streamed):
            torch.manual_seed(5)
            results = []
            for step in (1, 2, 3):
                if evaluates:
                    streamed.model.eval()
                    with torch.inference_mode():
                        assert streamed.model(**random_groups(train, 160, 99)[0]).loss.isfinite()
                    streamed.model.train()
                results += loop(streamed, train, 160, first=step, last=step)
            outcomes.append(outcome(session, results))
    assert outcomes[0] == outcomes[1]


def loss_past_the_head(streamed: Streamed, batch: Any) -> Tensor:
    """A forward that multiplies by the head's weight itself."""
    model: Any = streamed.model
    with streamed.one_forward("lent"), streamed.lent_head():
        hidden = model.base_model(input_ids=batch["input_ids"]).last_hidden_state
        logits = torch.nn.functional.linear(hidden, model.get_output_embeddings().weight)
        loss: Tensor = model.loss_function(logits, batch["labels"], vocab_size=logits.shape[-1])
        return loss


def test_write_trace_has_the_last_steps(tmp_path: Path) -> None:
    train = train_config("tied", groups=1)
    with streamed_on("ram", tmp_path, train) as (_, streamed):
        loop(streamed, train, 160)
        streamed.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {3, 4, 5}


@pytest.fixture
def two_groups(tmp_path: Path) -> Iterator[tuple[Streamed, Any]]:
    """A streamed model of two backwards a step, and a batch."""
    train = train_config("tied")
    with streamed_on("ram", tmp_path, train) as (_, streamed):
        yield streamed, random_groups(train, 160, 1)[0]


def test_dropped_groups_leave_no_trace_in_the_steps_that_follow(tmp_path: Path) -> None:
    train = train_config("tied")
    outcomes = []
    for drops in (False, True):
        with streamed_on("ram_nvme", tmp_path, train) as (session, streamed):
            if drops:
                streamed.model(**random_groups(train, 160, 50)[0]).loss.backward()
                streamed.optimizer.zero_grad()
            torch.manual_seed(5)
            results = loop(streamed, train, 160, last=2)
            if drops:
                streamed.model(**random_groups(train, 160, 51)[0]).loss.backward()
                streamed.model(**random_groups(train, 160, 52)[0])
                streamed.abandon()
            torch.manual_seed(6)
            outcomes.append(outcome(session, [*results, *loop(streamed, train, 160, first=3)]))
    assert outcomes[0] == outcomes[1]


def test_more_backwards_than_declared_are_refused(two_groups: tuple[Streamed, Any]) -> None:
    streamed, batch = two_groups
    for _ in range(2):
        streamed.model(**batch).loss.backward()
    with pytest.raises(StreamedModelError, match="accumulation_steps is 2"):
        streamed.model(**batch)
    streamed.optimizer.step()


@pytest.mark.parametrize("call", ["read", "state_dict", "save", "export"])
def test_weights_in_the_middle_of_a_step_are_refused(
    call: str, two_groups: tuple[Streamed, Any], tmp_path: Path
) -> None:
    streamed, batch = two_groups
    calls: dict[str, Any] = {
        "read": lambda: streamed.read("model.norm.weight"),
        "state_dict": streamed.state_dict,
        "save": lambda: streamed.save(tmp_path / "saved"),
        "export": lambda: streamed.export(tmp_path / "model"),
    }
    streamed.model(**batch).loss.backward()
    with pytest.raises(StreamedModelError, match="in the middle of a step"):
        calls[call]()


def test_evaluation_after_the_last_backward_of_a_step_is_refused(two_groups: tuple[Streamed, Any]) -> None:
    streamed, batch = two_groups
    for _ in range(2):
        streamed.model(**batch).loss.backward()
    with torch.no_grad(), pytest.raises(StreamedModelError, match="in the middle of a step"):
        streamed.model(**batch)
    streamed.optimizer.step()


def test_forward_that_fails_abandons_its_step(two_groups: tuple[Streamed, Any]) -> None:
    streamed, batch = two_groups
    streamed.model(**batch).loss.backward()
    with pytest.raises(UnknownTokenError, match=r"^input_ids has the token 1\d+, and .* for 0 to 159"):
        streamed.model(input_ids=batch["input_ids"] + 1000, labels=batch["labels"])
    loop(streamed, train_config("tied"), 160, last=2)


@pytest.mark.parametrize("place", ["ram", "gpu_ram_nvme"])
@pytest.mark.parametrize("step", [1, 3])
def test_backward_that_fails_may_be_dropped(
    place: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the step that records, and in one that is played, beside updates."""
    train = train_config("tied")
    with streamed_on(place, tmp_path, train) as (_, streamed):
        loop(streamed, train, 160, last=step - 1)
        loss = streamed.model(**random_groups(train, 160, step)[0]).loss
        with monkeypatch.context() as patch:
            patch.setattr(Gradients, "end_use", fail)
            with pytest.raises(ArithmeticError, match="planted"):
                loss.backward()
        with pytest.raises(StreamedModelError, match=r"abandon\(\)"):
            streamed.model(**random_groups(train, 160, step)[0])
        streamed.abandon()
        loop(streamed, train, 160, first=step, last=step + 1)
        assert streamed.steps == step + 1


@pytest.mark.parametrize(("place", "groups"), crossed(["ram", "ram_nvme", "nvme_grads_some"], [1, 2], by=2))
def test_memory_that_ends_while_gradients_are_written_loses_no_slot(
    place: str, groups: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At another unit each time, more often than there are slots."""
    train = train_config("tied", groups=groups)
    outcomes = []
    for failures in (0, 4):
        with streamed_on(place, tmp_path, train) as (session, streamed):
            torch.manual_seed(5)
            results = loop(streamed, train, 160, last=2)
            for unit in range(failures):
                with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError, match="planted"):
                    run_out_of_memory(patch, unit)
                    for batch in random_groups(train, 160, 9):
                        streamed.model(**batch).loss.backward()
                streamed.abandon()
                check_invariants(session.store)
            torch.manual_seed(6)
            outcomes.append(outcome(session, [*results, *loop(streamed, train, 160, first=3)]))
    assert outcomes[0] == outcomes[1]


def run_out_of_memory(patch: pytest.MonkeyPatch, unit: int) -> None:
    """As the so-manieth unit of a backward writes its gradient, between taking the slot and handing it over."""
    send, left = Gradients._send, iter(range(unit, -1, -1))

    def sent(self: Gradients, name: str, group: int, buffer: torch.Tensor) -> None:
        if not next(left):
            raise torch.OutOfMemoryError("planted")
        send(self, name, group, buffer)

    patch.setattr(Gradients, "_send", sent)


def fail(*_: object) -> None:
    raise ArithmeticError("planted")


def test_fused_loss_without_labels_is_refused_and_gives_no_logits(two_groups: tuple[Streamed, Any]) -> None:
    streamed, batch = two_groups
    with pytest.raises(StreamedModelError, match="fused_loss=False"):
        streamed.model(input_ids=batch["input_ids"])
    with torch.no_grad():
        assert streamed.model(**batch).logits is None


def test_step_that_is_not_finite_is_left_out_and_too_many_end_the_run(tmp_path: Path) -> None:
    plain = plain_model(exactness_config("tied"))
    plain.get_parameter("model.layers.1.mlp.down_proj.weight").data[3, 4] = float("inf")
    train = train_config("tied", groups=1)
    with streamed_on("ram", tmp_path, train, source=ModelWeights(plain)) as (_, streamed):
        before = streamed.state_dict()
        [batch] = random_groups(train, 160, 1)
        for _ in range(GUARDED.max_skips):
            streamed.model(**batch).loss.backward()
            streamed.optimizer.step()
            assert streamed.last is not None
            assert streamed.last.skipped
        streamed.model(**batch).loss.backward()
        with pytest.raises(NonFiniteError, match="3 steps before it were skipped"):
            streamed.optimizer.step()
        assert same(streamed.state_dict(), before)

        # The loop may go on. Its forwards do not look at each unit's numbers, as the one that finds the unit does.
        streamed.model(**batch).loss.backward()
        with pytest.raises(NonFiniteError, match="4 steps before it were skipped"):
            streamed.optimizer.step()
