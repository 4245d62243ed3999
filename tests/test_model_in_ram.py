"""A model in RAM is trained as it is, whatever was changed on it, or refused by the name of what was changed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from changed_models import CHANGES, FAMILIES, Change, check_same_or_refused, make, some_changes
from tiny_runs import one_thread

SEEDS = 24
SLOW_SEEDS = 400


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize("number", range(len(CHANGES)), ids=[change.name for change in CHANGES])
def test_changed_model_is_trained_as_it_is_or_refused_by_name(number: int) -> None:
    change = CHANGES[number]
    family = list(FAMILIES)[number % len(FAMILIES)]
    model = make(family)
    change.apply(model)
    check_same_or_refused(model, change.named)


def check_seed(seed: int) -> None:
    family, changes = some_changes(seed)
    model = make(family, seed)
    made: list[Change] = []
    for change in changes:
        change.apply(model)
        made.append(change)
    check_same_or_refused(model, [name for change in made for name in change.named])


@pytest.mark.parametrize("seed", range(SEEDS))
def test_model_with_several_changes_is_trained_as_it_is_or_refused_by_name(seed: int) -> None:
    check_seed(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS, SLOW_SEEDS))
def test_model_with_many_changes_is_trained_as_it_is_or_refused_by_name(seed: int) -> None:
    check_seed(seed)
