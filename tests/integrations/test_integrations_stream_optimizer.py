"""The optimizer of a streamed model: settings are those of the step, and steps that cannot be taken are refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from streamed_loops import PEAK, loop, same, streamed_on, train_config
from tiny_runs import outcome, random_groups

from megatier.errors import ConfigError, StreamedModelError
from megatier.integrations.streamed import Streamed


def test_loop_settings_changed_after_the_backward_are_those_of_the_step(tmp_path: Path) -> None:
    """Also where a unit was updated speculatively, by other settings: that update is void."""
    train = train_config("tied", groups=1, clip=None)
    outcomes = []
    for changes_late in (False, True):
        with streamed_on("nvme_twice", tmp_path, train) as (session, streamed):
            torch.manual_seed(5)
            results = []
            for step in (1, 2, 3):
                if not changes_late:
                    set_all(streamed, lr=PEAK / step, weight_decay=0.2)
                [batch] = random_groups(train, 160, step)
                streamed.model(**batch).loss.backward()
                if changes_late:
                    set_all(streamed, lr=PEAK / step, weight_decay=0.2)
                streamed.optimizer.step()
                set_all(streamed, lr=77.0, weight_decay=0.0)
                assert streamed.last is not None
                results.append(replace(streamed.last, loss=0.0))
            assert session.speculation.outcomes["void" if changes_late else "confirmed"] >= 1
            outcomes.append(outcome(session, results))
    assert outcomes[0] == outcomes[1]


def test_loop_with_muon_follows_the_momentum_of_its_groups(tmp_path: Path) -> None:
    def losses(opened_with: float, then: float) -> list[float]:
        train = replace(train_config("untied", groups=1), optimizer="muon", momentum=opened_with)
        with streamed_on("ram", tmp_path, train, model="untied") as (_, streamed):
            for group in streamed.optimizer.param_groups:
                group["momentum"] = then
            torch.manual_seed(5)
            return [result.loss for result in loop(streamed, train, 2112, last=3)]

    expected = losses(0.5, 0.5)
    assert losses(0.95, 0.5) == expected
    assert losses(0.95, 0.95) != expected


def set_all(streamed: Streamed, *, lr: float, weight_decay: float) -> None:
    for group in streamed.optimizer.param_groups:
        group["lr"] = lr
    streamed.optimizer.param_groups[0]["weight_decay"] = weight_decay


@pytest.fixture
def two_groups(tmp_path: Path) -> Iterator[tuple[Streamed, Any]]:
    """A streamed model of two backwards a step, and a batch."""
    train = train_config("tied")
    with streamed_on("ram", tmp_path, train) as (_, streamed):
        yield streamed, random_groups(train, 160, 1)[0]


def test_step_without_a_backward_is_refused(two_groups: tuple[Streamed, Any]) -> None:
    streamed, batch = two_groups
    with pytest.raises(StreamedModelError, match="0 of 2 backwards"):
        streamed.optimizer.step()
    streamed.model(**batch)
    with pytest.raises(StreamedModelError, match="0 of 2 backwards"):
        streamed.optimizer.step()


def test_step_after_fewer_backwards_than_declared_is_refused_and_may_be_dropped(
    two_groups: tuple[Streamed, Any],
) -> None:
    streamed, batch = two_groups
    before = streamed.state_dict()
    streamed.model(**batch).loss.backward()
    with pytest.raises(StreamedModelError, match="1 of 2 backwards"):
        streamed.optimizer.step()
    streamed.optimizer.zero_grad()
    assert same(streamed.state_dict(), before)
    assert streamed.steps == 0
    loop(streamed, train_config("tied"), 160, last=2)
    assert streamed.steps == 2


def test_zero_grad_between_forward_and_backward_drops_nothing(two_groups: tuple[Streamed, Any]) -> None:
    streamed, batch = two_groups
    loss = streamed.model(**batch).loss
    streamed.optimizer.zero_grad()
    loss.backward()
    streamed.model(**batch).loss.backward()
    streamed.optimizer.step()
    assert streamed.steps == 1


def test_groups_that_differ_where_they_cannot_are_refused(two_groups: tuple[Streamed, Any]) -> None:
    streamed, batch = two_groups
    streamed.optimizer.param_groups[1]["lr"] = 1.0
    with pytest.raises(StreamedModelError, match="share lr"):
        streamed.model(**batch)
    streamed.optimizer.param_groups[1].update(lr=PEAK, weight_decay=0.1)
    with pytest.raises(StreamedModelError, match="do not decay"):
        streamed.model(**batch)
    with pytest.raises(StreamedModelError, match="no group can be added"):
        streamed.optimizer.add_param_group({"params": []})


@pytest.mark.parametrize("norm", [-1.0, 0.0, float("nan"), "1", True])
def test_norm_to_clip_to_that_cannot_be_one_is_refused_when_it_is_set(
    norm: Any, two_groups: tuple[Streamed, Any]
) -> None:
    streamed, _ = two_groups
    before = streamed.clip
    with pytest.raises(ConfigError, match="clip is"):
        streamed.clip = norm
    assert streamed.clip == before
