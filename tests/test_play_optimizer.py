"""What is updated by matrix in RAM is carried run by run, and no move outlives an update that fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megatier.errors import TransferError
from megatier.play.optimizer import Optimizer, in_ram
from megatier.store.lanes import Lanes
from megatier.store.store import TieredStore
from megatier.store.transfer import Transfer
from megatier.tier import Kind, Tier

RUNS = [(0, 5), (5, 8), (8, 12)]


class Carriage:
    """The part of a store that carries."""

    def __init__(self) -> None:
        self.lanes = Lanes(torch.device("cpu"))
        self.device = torch.device("cpu")
        self.clock = None
        self.moves: list[Transfer] = []

    def carry(self, key: str, target: Tensor, source: Tensor, *, to_gpu: bool) -> Transfer:
        self.moves.append(self.lanes.carry(key, target, source, to_gpu=to_gpu))
        return self.moves[-1]


class Matrices:
    """Has matrices in one unit and none in others."""

    def matrices(self, unit: str) -> list[tuple[int, int]]:
        return RUNS if unit == "layer" else []


@contextmanager
def carriage() -> Iterator[Carriage]:
    made = Carriage()
    yield made
    made.lanes.close()


def planes() -> dict[Kind, Tensor]:
    """Two bytes of weight and four of momentum for each element."""
    weight = torch.arange(12, dtype=torch.int16)
    momentum = torch.arange(12, dtype=torch.int32) * 1000
    return {Kind.WEIGHT: weight.view(torch.uint8), Kind.MOMENTUM: momentum.view(torch.uint8)}


def add(unit: str, elements: tuple[int, int], found: Any, grad: Tensor, before: Any) -> None:
    assert not before
    found[Kind.WEIGHT].view(torch.int16).add_(grad.view(torch.int16))
    found[Kind.MOMENTUM].view(torch.int32).sub_(1)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_update_in_ram_is_carried_run_by_run(elsewhere: bool) -> None:
    grad = torch.full((12,), 7, dtype=torch.int16).view(torch.uint8)
    target = planes()
    before = {}
    if elsewhere:
        before = {Kind.MOMENTUM: target[Kind.MOMENTUM].clone()}
        target[Kind.MOMENTUM].zero_()
    with carriage() as store:
        apply = in_ram(cast("TieredStore", store), cast("Optimizer", Matrices()), add)
        assert apply("layer", (0, 12), target, grad, before) is None
        assert store.lanes.moved_bytes == {"state_to_gpu": 12 * 8, "state_to_ram": 12 * 6}
    assert torch.equal(target[Kind.WEIGHT].view(torch.int16), torch.arange(12, dtype=torch.int16) + 7)
    assert torch.equal(target[Kind.MOMENTUM].view(torch.int32), torch.arange(12, dtype=torch.int32) * 1000 - 1)


def test_update_in_ram_of_a_unit_that_is_not_by_matrix_is_done_where_it_lies() -> None:
    target = planes()
    with carriage() as store:
        apply = in_ram(cast("TieredStore", store), cast("Optimizer", Matrices()), add)
        apply("head", (0, 12), target, torch.zeros(24, dtype=torch.uint8), {})
        assert not store.moves
    assert target[Kind.MOMENTUM].view(torch.int32)[1] == 999


def test_update_in_ram_that_fails_leaves_no_move_under_way() -> None:
    def fail(unit: str, elements: tuple[int, int], found: Any, grad: Tensor, before: Any) -> None:
        if elements == RUNS[1]:
            raise ArithmeticError

    with carriage() as store:
        apply = in_ram(cast("TieredStore", store), cast("Optimizer", Matrices()), fail)
        with pytest.raises(ArithmeticError):
            apply("layer", (0, 12), planes(), torch.zeros(24, dtype=torch.uint8), {})
        assert len(store.moves) == 3 + 2 + 3
        assert all(move.done() for move in store.moves)


class Broken:
    """A move that has failed, or one that ends well when somebody waits for it."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
        self.is_over = False

    def over(self) -> bool:
        self.is_over = True
        return not self.fails

    def wait(self) -> None:
        assert self.fails
        raise TransferError("layer", Tier.RAM, "a slot", 0, 0)


def test_update_in_ram_whose_first_move_fails_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with carriage() as store:
        moves = [Broken(fails=True), Broken(fails=False), Broken(fails=False)]
        coming = iter(moves)
        monkeypatch.setattr(store, "carry", lambda *_, **__: next(coming))
        apply = in_ram(cast("TieredStore", store), cast("Optimizer", Matrices()), add)
        with pytest.raises(TransferError):
            apply("layer", (0, 12), planes(), torch.zeros(24, dtype=torch.uint8), {})
    assert [move.is_over for move in moves] == [True] * 3
