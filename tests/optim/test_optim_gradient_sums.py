from __future__ import annotations

import gc
import math
import random
import signal
import threading
import weakref
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
import torch
from interrupts import python_locks
from torch import Tensor

from megatier import _native
from megatier.errors import NonFiniteError
from megatier.layout import Layout, TensorSlice
from megatier.optim.gradient_sums import GradientSums
from megatier.optim.norm_tiles import TILE_ELEMENTS
from megatier.state import MUON

LAYOUT = Layout.of([("norm", (70,)), ("weight", (5, 13)), ("bias", (3,)), ("other", (200,))])
"""Padding lies between all of them and behind the last."""


def measuring(layouts: Mapping[str, Layout], groups: int = 1) -> GradientSums:
    return GradientSums(layouts, groups=groups, num_threads=2, ranks=None)


def random_layout(draw: random.Random) -> Layout:
    """Tensors within a tile, over several tiles, and of more than one native call; some that are whole tiles."""
    sizes = [draw.choice([draw.randint(1, 3_000), draw.randint(1, 300_000), 65_536, 131_072]) for _ in range(9)]
    return Layout.of([(f"weight{number}", (size,)) for number, size in enumerate([*sizes, 65 * TILE_ELEMENTS + 77])])


def clipped(layout: Layout, first: int, last: int) -> Layout:
    """What a rank that owns elements [first, last) has of each tensor, counted from the first."""
    tensors = []
    for tensor in layout.tensors:
        start = max(tensor.start, first)
        stop = min(tensor.stop, last)
        if start < stop:
            place = TensorSlice(tensor.name, (stop - start,), start - first, tensor.shape, start - tensor.start)
            tensors.append(place)
    return Layout(tuple(tensors), last - first, last - first)


def sums_of(sums: GradientSums, unit: str) -> Tensor:
    """The partial sums that were noted of a unit."""
    return torch.cat(sums._sums[unit])


@pytest.mark.parametrize("seed", range(12))
def test_measure_of_the_parts_of_a_unit_gives_the_sums_of_the_whole(seed: int) -> None:
    draw = random.Random(seed)
    dtype = draw.choice([torch.bfloat16, torch.float32])
    layout = random_layout(draw)
    size = draw.randint(1, 20) * TILE_ELEMENTS
    borders = [*range(0, layout.num_elements, size), layout.num_elements]
    parts = {f"part{first}": clipped(layout, first, last) for first, last in pairwise(borders)}
    sums = measuring({"whole": layout, **parts})

    grad = torch.randn(layout.num_elements, generator=torch.Generator().manual_seed(seed)).to(dtype)
    sums.measure("whole", grad)
    for first, (name, part) in zip(borders, parts.items(), strict=False):
        sums.measure(name, grad[first : first + part.num_elements].clone())

    found = torch.cat([sums_of(sums, name) for name in parts])
    sums.close()
    assert torch.equal(found.sort().values, sums_of(sums, "whole").sort().values)


def test_measure_of_matrices_does_not_depend_on_where_they_lie_in_their_unit() -> None:
    shapes = [("a", (3, 100)), ("b", (300, 500)), ("c", (2, 200, 300)), ("d", (70, 7))]
    alone = replace(Layout.of(shapes), schema=MUON["fp32"])
    layouts = {"alone": alone, **{f"{ranks} ranks": alone.padded(ranks) for ranks in (2, 3)}}
    sums = measuring(layouts)
    values = {name: torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) for name, shape in shapes}
    found = []
    for unit, layout in layouts.items():
        grad = torch.zeros(layout.num_elements)
        for tensor in layout.tensors:
            grad[tensor.start : tensor.stop] = values[tensor.name].flatten()
        sums.measure(unit, grad)
        found.append(sums_of(sums, unit).sort().values)
    sums.close()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_measure_sums_what_a_tensor_has_of_each_tile_of_its_unit() -> None:
    layout = Layout.of([("short", (100,)), ("long", (2, TILE_ELEMENTS)), ("last", (5,))])
    sums = measuring({"unit": layout})
    grad = torch.randn(layout.num_elements, generator=torch.Generator().manual_seed(1))
    sums.measure("unit", grad)

    start = layout.tensors[1].start
    runs = [(0, 100), (start, 65_536), (65_536, 131_072), (131_072, start + 131_072)]
    expected = torch.empty(5, dtype=torch.float64)
    for number, (first, last) in enumerate([*runs, (layout.tensors[2].start, layout.tensors[2].stop)]):
        _native.sum_squares(grad[first:last].data_ptr(), last - first, False, expected[number:].data_ptr())
    sums.close()
    assert torch.equal(sums_of(sums, "unit"), expected)
    assert sums.norm() == math.sqrt(math.fsum(expected.tolist()))


@pytest.mark.parametrize("number", range(10))
def test_first_non_finite_of_tensors_that_share_spans_is_the_right_one(number: int) -> None:
    layout = random_layout(random.Random(number))
    sums = measuring({"unit": layout})
    grad = torch.ones(layout.num_elements)
    sums.measure("unit", grad)
    assert sums.first_non_finite() is None

    tensor = layout.tensors[number]
    for place in (tensor.start, tensor.stop - 1):
        grad[place] = math.inf
        sums.measure("unit", grad)
        assert sums.first_non_finite() == tensor.name
        grad[place] = 1
    sums.close()


def test_measure_takes_no_lock_by_python_code_in_the_thread_that_trains() -> None:
    layout = random_layout(random.Random(1))
    sums = measuring({"unit": layout})
    with python_locks() as called:
        sums.measure("unit", torch.ones(layout.num_elements))
    sums.close()
    assert called == []


def test_measure_that_is_interrupted_leaves_the_threads_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They work on addresses, and the interrupt drops the tensors of the call."""
    layout = random_layout(random.Random(1))
    sums = measuring({"unit": layout})
    begun, go = threading.Event(), threading.Event()
    made = list[weakref.ref[Tensor]]()
    empty, alarm = torch.empty, signal.getsignal(signal.SIGALRM)

    def noted(*arguments: Any, **named: Any) -> Tensor:
        tensor = empty(*arguments, **named)
        made.append(weakref.ref(tensor))
        return tensor

    def slow(*arguments: object) -> None:
        begun.set()
        go.wait(20)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        signal.signal(signal.SIGALRM, interrupt)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(_native, "sum_squares", slow)
            patch.setattr(torch, "empty", noted)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            sums.measure("unit", torch.ones(layout.num_elements))
        assert begun.is_set()
        gc.collect()
        assert made
        assert all(tensor() is not None for tensor in made)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
        go.set()
        sums.close()


def test_refusal_by_one_lane_stays_where_another_lane_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = measuring({"unit": LAYOUT})

    def find(unit: str) -> str | None:
        if unit == "bad":
            return "bad.weight"
        with pytest.raises(NonFiniteError):
            sums.check("bad")  # of another queue, meanwhile
        return None

    monkeypatch.setattr(sums, "_non_finite_in", find)
    for _ in range(2):
        with pytest.raises(NonFiniteError, match=r"bad\.weight"):
            sums.check("good")
    sums.close()


def test_sum_of_groups_is_rounded_once_after_the_last() -> None:
    """Rounded after the second, half of a bf16's last digit would be lost."""
    sums = measuring({"unit": LAYOUT}, groups=3)
    total = torch.zeros(LAYOUT.num_elements)
    for group, value in enumerate((1.0, 2**-8, -1.0)):
        part = torch.full_like(total, value)
        sums.accumulate("unit", total.view(torch.uint8), part.view(torch.uint8), group=group)
    assert total.view(torch.bfloat16)[: LAYOUT.num_elements].unique().tolist() == [2**-8]
    sums.close()


def test_groups_of_several_ranks_are_added_in_their_order() -> None:
    """In fp32 the ones are lost beside the large number, unless that has gone before they come."""
    sums = measuring({"unit": LAYOUT})
    pieces = torch.tensor([2.0**24, 1, 1, -(2.0**24)]).repeat_interleave(LAYOUT.num_elements).view(4, -1)
    total = torch.full((LAYOUT.num_elements,), 77.0)
    options = {"adds": False, "is_last": True}
    sums.sum_groups("unit", total.view(torch.uint8), pieces.view(torch.uint8), torch.empty(0), **options)
    assert total.view(torch.bfloat16)[: LAYOUT.num_elements].unique().tolist() == [0]
    sums.close()
