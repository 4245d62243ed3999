"""What is updated by matrix in RAM is carried run by run, three at once, and no move outlives an update that fails."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megatier.errors import TransferError
from megatier.layout import Layout
from megatier.optim.adamw import Scalars
from megatier.optim.muon import Muon
from megatier.planes import Apply, Planes
from megatier.play.matrix_carrier import MatrixCarrier
from megatier.play.optimizer_protocol import Optimizer
from megatier.state import MUON
from megatier.store.store import TieredStore
from megatier.store.tier_queues import TierQueues
from megatier.store.transfer import Transfer
from megatier.tier import Kind, Tier

RUNS = [(0, 5), (5, 8), (8, 10), (10, 12)]


class Carriage:
    """The part of a store that carries."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.queues = TierQueues(self.device)
        self.clock = self.queues.clock
        self.moves: list[Transfer] = []

    def carry(self, key: str, target: Tensor, source: Tensor, *, to_gpu: bool) -> Transfer:
        self.moves.append(self.queues.carry(key, target, source, to_gpu=to_gpu))
        return self.moves[-1]


class Matrices:
    """Has matrices in one unit and none in others."""

    def matrices(self, unit: str) -> list[tuple[int, int]]:
        return RUNS if unit == "layer" else []


@contextmanager
def carriage(device: str = "cpu") -> Iterator[Carriage]:
    made = Carriage(device)
    yield made
    made.queues.close()


def in_ram(store: Any, apply: Apply, optimizer: Any = None) -> Apply:
    return MatrixCarrier(cast("TieredStore", store), cast("Optimizer", optimizer or Matrices())).in_ram(apply)


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
        apply = in_ram(store, add)
        assert apply("layer", (0, 12), target, grad, before) is None
        assert store.queues.moved_bytes == {"state_to_gpu": 12 * 8, "state_to_ram": 12 * 6}
    assert torch.equal(target[Kind.WEIGHT].view(torch.int16), torch.arange(12, dtype=torch.int16) + 7)
    assert torch.equal(target[Kind.MOMENTUM].view(torch.int32), torch.arange(12, dtype=torch.int32) * 1000 - 1)


def test_update_in_ram_of_a_unit_that_is_not_by_matrix_is_done_where_it_lies() -> None:
    target = planes()
    with carriage() as store:
        apply = in_ram(store, add)
        apply("head", (0, 12), target, torch.zeros(24, dtype=torch.uint8), {})
        assert not store.moves
    assert target[Kind.MOMENTUM].view(torch.int32)[1] == 999


def test_update_in_ram_that_fails_leaves_no_move_under_way() -> None:
    def fail(unit: str, elements: tuple[int, int], found: Any, grad: Tensor, before: Any) -> None:
        if elements == RUNS[1]:
            raise ArithmeticError

    with carriage() as store:
        apply = in_ram(store, fail)
        with pytest.raises(ArithmeticError):
            apply("layer", (0, 12), planes(), torch.zeros(24, dtype=torch.uint8), {})
        assert len(store.moves) == 3 + 3 + 2 + 3
        assert all(move.done() for move in store.moves)


class Broken:
    """A move that has failed, or one that ends well when somebody waits for it."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
        self.is_over = False

    def wait_for_end(self) -> bool:
        self.is_over = True
        return not self.fails

    def wait(self) -> None:
        assert self.fails
        raise TransferError("layer", Tier.RAM, "a slot", 0, 0)


def test_update_in_ram_whose_first_move_fails_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with carriage() as store:
        moves = [Broken(fails=n == 0) for n in range(6)]
        coming = iter(moves)
        monkeypatch.setattr(store, "carry", lambda *_, **__: next(coming))
        apply = in_ram(store, add)
        with pytest.raises(TransferError):
            apply("layer", (0, 12), planes(), torch.zeros(24, dtype=torch.uint8), {})
    assert [move.is_over for move in moves] == [True] * 6


class Late:
    """A store whose copies are made when somebody waits for them, so what they need has to last until then."""

    device = torch.device("cpu")
    clock = None

    def __init__(self) -> None:
        self.on_device: list[weakref.ref[Tensor]] = []
        self.most_alive = 0

    def carry(self, key: str, target: Tensor, source: Tensor, *, to_gpu: bool) -> LateCopy:
        self.on_device.append(weakref.ref(target if to_gpu else source))
        self.most_alive = max(
            self.most_alive, len({id(found) for end in self.on_device if (found := end()) is not None})
        )
        return LateCopy(weakref.ref(target), weakref.ref(source))


class LateCopy:
    """One of its copies."""

    def __init__(self, target: weakref.ref[Tensor], source: weakref.ref[Tensor]) -> None:
        self.target, self.source = target, source
        self.is_over = False

    def wait_for_end(self) -> bool:
        if not self.is_over:
            target, source = self.target(), self.source()
            assert target is not None, "memory was given back before a copy to it was over"
            assert source is not None, "memory was given back before a copy from it was over"
            target.copy_(source)
            self.is_over = True
        return True


def test_update_in_ram_has_three_matrices_at_once_and_keeps_their_memory_until_copies_are_over() -> None:
    store, target = Late(), planes()
    in_ram(store, add)("layer", (0, 12), target, torch.full((12,), 7, dtype=torch.int16).view(torch.uint8), {})
    assert torch.equal(target[Kind.WEIGHT].view(torch.int16), torch.arange(12, dtype=torch.int16) + 7)
    assert torch.equal(target[Kind.MOMENTUM].view(torch.int32), torch.arange(12, dtype=torch.int32) * 1000 - 1)

    # Three planes of each, but for the gradient of the one that leaves.
    assert store.most_alive == 3 * 3 - 1


class MuonAlone:
    """Muon as the carrier knows the optimizer."""

    def __init__(self, layout: Layout) -> None:
        self.muon = Muon({"layer": layout})
        self.matrices = self.muon.runs

    def apply(self, unit: str, elements: tuple[int, int], found: Planes, grad: Tensor, before: Planes) -> None:
        self.muon.apply(unit, elements, found, grad, Scalars(0.9, 1, 0.02, 0.95, (0.0,) * 7 + (0.5,)))


@pytest.mark.gpu
def test_update_in_ram_of_matrices_on_a_gpu_has_the_bits_of_one_at_home_there() -> None:
    """Matrices are large and of several shapes, so that copies and products overlap, and memory is used again."""
    torch.manual_seed(0)
    shapes = [(512, 2048), (2048, 512), (1024, 1024), (256, 1024), (4096, 1024), (1024, 4096), (64, 64)]
    layout = replace(Layout.of([(str(n), shape) for n, shape in enumerate(shapes)]), schema=MUON["bf16"])
    elements = 0, layout.num_elements
    optimizer = MuonAlone(layout)
    weight = torch.randn(layout.num_elements).bfloat16()
    made = {
        Kind.WEIGHT: weight,
        Kind.REMAINDER: torch.zeros(layout.num_elements, dtype=torch.int16),
        Kind.MOMENTUM: torch.zeros(layout.num_elements),
    }
    in_host = {kind: plane.view(torch.uint8).pin_memory() for kind, plane in made.items()}
    at_home = {kind: plane.cuda() for kind, plane in in_host.items()}

    with carriage("cuda") as store:
        apply = in_ram(store, optimizer.apply, optimizer)
        for _ in range(10):
            grad = torch.randn(layout.num_elements).bfloat16().view(torch.uint8).pin_memory()
            apply("layer", elements, in_host, grad, {})
            optimizer.apply("layer", elements, at_home, grad.cuda(), {})
    assert {kind: torch.equal(at_home[kind].cpu(), in_host[kind]) for kind in made} == dict.fromkeys(made, True)
