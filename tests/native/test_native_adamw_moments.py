"""Moments of AdamW that the native core rounds: to bf16, and to 8 bits."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from adamw_states import (
    BETA2,
    DECAY,
    EPS,
    LR,
    Floats,
    State,
    awkward_state,
    every_level,
    floats_of,
    numbers,
    ordinary_state,
    scalars_of,
    split_or_whole,
    update_by_definition,
)

from megatier import _native
from megatier.compute.seeds import rounding_key
from megatier.optim.masters import narrow, widen
from megatier.tier import Kind


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    yield
    _native.set_isa(_native.isa_levels()[0])


@pytest.fixture(scope="module")
def pool() -> Iterator[_native.ThreadPool]:
    pool = _native.ThreadPool(2, 64)
    yield pool
    pool.close()


every_width = pytest.mark.parametrize("width", [2, 1], ids=["bf16", "8 bits"])
KEY = 0xFEDC_BA98_7654_3210


def random_bits(key: int, first: int, count: int) -> npt.NDArray[np.uint32]:
    """By the definition of native/adamw.h."""
    low, high = np.uint32(key & 0xFFFF_FFFF), np.uint32(key >> 32)
    h = (np.arange(first, first + count, dtype=np.uint64) & np.uint64(0xFFFF_FFFF)).astype(np.uint32) ^ low
    h = (h ^ h >> np.uint32(16)) * np.uint32(0x7FEB352D)
    h = ((h ^ h >> np.uint32(15)) + high) * np.uint32(0x846CA68B)
    return h ^ h >> np.uint32(16)


def rounded(kind: Kind, moment: Floats, random: npt.NDArray[np.uint32], width: int) -> npt.NDArray[Any]:
    """By the definition of native/adamw.h: bits for bf16, values for 8 bits."""
    if width == 2:
        return (moment.view(np.uint32) + random >> np.uint32(16)).astype(np.uint16)

    has_sign = kind is Kind.EXP_AVG
    table = table_of(kind)
    size = np.abs(moment.astype(np.float64))
    lower = np.clip(np.searchsorted(table, size, side="right") - 1, 0, len(table) - 2)
    share = (size - table[lower]) / (table[lower + 1] - table[lower])
    code = lower + (share * 65_536 + random >= 65_536)

    # Below the range there is no exponent, so the share is that of the smallest number.
    smallest = table[1]
    below = size > random * smallest / 65_536 if has_sign else size > 0
    code = np.where(size < smallest, below, code)
    code = np.where(size >= table[-1], len(table) - 1, code)
    code = np.where(np.isfinite(moment), code, len(table))
    return (code | (np.signbit(moment) << 7 if has_sign else 0)).astype(np.uint8)


def table_of(kind: Kind) -> npt.NDArray[np.float64]:
    """The numbers that are not below zero, in order."""
    first, last = (400, 525) if kind is Kind.EXP_AVG else (292, 545)
    steps = np.arange(first, last + 1)
    return np.concatenate([[0.0], 2.0 ** (steps // 4 - 127) * (1 + steps % 4 / 4)])


@every_level
@split_or_whole
@every_width
@pytest.mark.parametrize("make", [ordinary_state, awkward_state])
@pytest.mark.parametrize("first", [0, (1 << 32) - 5_000])
def test_update_with_rounded_moments_follows_its_definition(
    pool: _native.ThreadPool, isa: str, split: bool, width: int, make: Any, first: int
) -> None:
    _native.set_isa(isa)
    count = 20_021
    state: State = make(count, split).narrow(width)
    grad = floats_of(state.grad) if split else state.grad
    for step in range(1, 4):
        scalars = scalars_of(step, 0.37)
        x, m, v = update_by_definition(state.master(), *state.moments(), grad, DECAY, scalars)
        expected = State.of(x, m, v, grad, split)
        random = random_bits(KEY + step, first, count)
        expected.exp_avg = rounded(Kind.EXP_AVG, m, random & np.uint32(0xFFFF), width)
        expected.exp_avg_sq = rounded(Kind.EXP_AVG_SQ, v, random >> np.uint32(16), width)
        state.update(pool, [(0, count, DECAY)], scalars, rounding=(width, KEY + step, first))
        assert state.same_bits(expected)


@split_or_whole
@every_width
@pytest.mark.parametrize("num_threads", [1, 3])
def test_update_with_rounded_moments_does_not_depend_on_level_threads_or_cut(
    split: bool, width: int, num_threads: int
) -> None:
    """Nor on whether the pieces of a unit lie in one memory: each knows the number of its first element."""
    pool, count = _native.ThreadPool(num_threads, 3), 300_123
    expected = ordinary_state(count, split).narrow(width)
    _native.set_isa("portable")
    expected.update(pool, [(0, count, DECAY)], scalars_of(3), rounding=(width, KEY, 0))
    for seed, isa in enumerate(_native.isa_levels()):
        _native.set_isa(isa)
        cuts = [0, *np.sort(np.random.default_rng(seed).integers(0, count, 9)).tolist(), count]
        state, pieces = (ordinary_state(count, split).narrow(width) for _ in range(2))
        segments = [(start, stop, DECAY) for start, stop in pairwise(cuts)]
        state.update(pool, segments, scalars_of(3), rounding=(width, KEY, 0))
        for start, stop in pairwise(cuts):
            piece = pieces.piece(start, stop)
            piece.update(pool, [(0, stop - start, DECAY)], scalars_of(3), rounding=(width, KEY, start))
        assert state.same_bits(expected)
        assert pieces.same_bits(expected)
    pool.close()


@every_level
@every_width
def test_update_into_other_planes_with_rounded_moments_stays_inside(
    pool: _native.ThreadPool, isa: str, width: int
) -> None:
    _native.set_isa(isa)
    for start, stop in [(0, 1), (3, 20), (129, 1_000), (1, 3_001)]:
        old, untouched, new, expected = (ordinary_state(3_001, split=True).narrow(width) for _ in range(4))
        segment = [(start, stop, DECAY)]
        expected.update(pool, segment, scalars_of(1), rounding=(width, KEY, 7))
        new.update(pool, segment, scalars_of(1), old.planes[:4], rounding=(width, KEY, 7))
        assert new.same_bits(expected)
        assert old.same_bits(untouched)
        outside = np.r_[0:start, stop:3_001]
        for name in ("weight", "remainder", "exp_avg", "exp_avg_sq"):
            assert np.array_equal(getattr(new, name)[outside], getattr(untouched, name)[outside])


@every_width
def test_rounding_of_moments_loses_nothing_on_average(pool: _native.ThreadPool, width: int) -> None:
    """Neither over the elements of a step nor over the steps of an element; and the two moments go their own ways."""
    # Without a past, the first moment is the gradient, and the second one its square.
    scalars = (0.0, 1.0, 0.0, 1.0, EPS, LR, 1.0, 1.0)
    small = {2: 1e-15, 1: 1e-8}[width]
    for grad in np.array([1 + 2.0**-9, -(1 + 2.0**-14), small * np.pi, 2 - 2.0**-10], np.float32):
        found = []
        for step in range(401):
            values = np.full(50_000 if step == 0 else 64, grad)
            state = State.of(values, values, values, values, split=False).narrow(width)
            state.update(pool, [(0, len(values), 1.0)], scalars, rounding=(width, rounding_key(0, step, "unit"), 0))
            found.append([moment.astype(np.float64) for moment in state.moments()])
        for moments in (found[0], np.concatenate(found[1:], axis=1)):
            for values, exact in zip(moments, (float(grad), float(grad * grad)), strict=True):
                low, high = values.min(), values.max()
                assert low <= exact <= high
                assert high - low <= abs(exact) / {2: 128, 1: 3.9}[width]
                assert abs(values.mean() - exact) <= 4.5 * (high - low) / 2 / len(values) ** 0.5
            varies = all(values.std() > 0 for values in moments)
            assert not varies or abs(np.corrcoef(*moments)[0, 1]) <= 4.5 / len(moments[0]) ** 0.5


@every_width
def test_second_moments_that_are_rounded_follow_gradients_that_shrink(pool: _native.ThreadPool, width: int) -> None:
    """Rounded to nearest they would not: a step takes a thousandth of them, less than half of bf16's last bit."""
    count = 4_096
    zeros, ones = np.zeros(count, np.float32), np.ones(count, np.float32)
    grad = np.full(count, 0.125, np.float32)
    state = State.of(zeros, zeros, ones, grad, split=False).narrow(width)
    exact, nearest = 1.0, torch.ones(())
    for step in range(1, 3_001):
        state.update(pool, [(0, count, 1.0)], scalars_of(step), rounding=(width, rounding_key(0, step, "unit"), 0))
        exact = BETA2 * exact + (1 - BETA2) / 64
        nearest = (BETA2 * nearest + (1 - BETA2) / 64).bfloat16().float()

    found = state.moments()[1].astype(np.float64)
    assert exact < 0.07
    assert abs(found.mean() - exact) <= 4.5 * found.std() / count**0.5
    assert nearest == 1


@split_or_whole
@every_width
def test_update_with_rounded_moments_keeps_padding_of_zeros(pool: _native.ThreadPool, split: bool, width: int) -> None:
    zeros = np.zeros(2048, np.float32)
    state = State.of(zeros, zeros, zeros, zeros, split).narrow(width)
    state.update(pool, [(0, 2048, DECAY)], scalars_of(1), rounding=(width, KEY, 0))
    assert not any(plane.any() for plane in (state.weight, state.remainder, state.exp_avg, state.exp_avg_sq))


@pytest.mark.parametrize("kind", [Kind.EXP_AVG, Kind.EXP_AVG_SQ])
def test_codes_of_8_bits_stand_for_the_numbers_of_their_definition(kind: Kind) -> None:
    every = np.arange(256, dtype=np.uint8)
    found = numbers(kind, every)
    table = table_of(kind)
    assert np.array_equal(found[: len(table)], table)
    assert np.isnan(found[len(table)])
    if kind is Kind.EXP_AVG:
        assert np.array_equal(found[128:255], -table)

    back = torch.empty(256, dtype=torch.uint8)
    narrow(kind, torch.from_numpy(found), back)
    again = torch.empty(256)
    widen(kind, back, again)
    assert np.array_equal(again.numpy(), found, equal_nan=True)


@pytest.mark.parametrize("kind", [Kind.EXP_AVG, Kind.EXP_AVG_SQ])
def test_narrow_to_8_bits_takes_the_nearest_number_in_the_range(kind: Kind) -> None:
    random = np.random.default_rng(0)
    table = table_of(kind)
    values = (10.0 ** random.uniform(np.log10(table[1]), np.log10(table[-1]), 10_000)).astype(np.float32)
    nearest = np.abs(values[:, None] - table[None]).min(axis=1)
    plane = torch.empty(len(values), dtype=torch.uint8)
    narrow(kind, torch.from_numpy(values), plane)
    assert np.array_equal(np.abs(numbers(kind, plane.numpy()) - values.astype(np.float64)), nearest)

    extremes = np.array([1e-30, 1e30, np.inf, np.nan, 0.0], np.float32)
    narrow(kind, torch.from_numpy(extremes), plane[:5])
    least = 0.0 if kind is Kind.EXP_AVG else table[1]
    assert np.array_equal(numbers(kind, plane[:5].numpy()), [least, table[-1], np.nan, np.nan, 0.0], equal_nan=True)


@pytest.mark.parametrize(
    ("planes", "rounding"),
    [
        ((64, 64, 65, 64, 64), (2, 0, 0)),
        ((64, 64, 66, 64, 64), None),
        ((64, 64, 64, 64, 64), (1, 0, -1)),
        ((64, 64, 64, 64, 64), (3, 0, 0)),
        ((64, 64, 64, 64, 64), (4, 0, 0)),
    ],
)
def test_update_of_impossible_moments_is_refused(
    pool: _native.ThreadPool, planes: tuple[int, int, int, int, int], rounding: tuple[int, int, int] | None
) -> None:
    with pytest.raises(ValueError, match=r"aligned|negative|1 or 2 bytes"):
        pool.submit_adamw(planes, True, [(0, 0, 1.0)], scalars_of(1), rounding=rounding)


def test_update_with_a_rounding_of_other_things_is_refused(pool: _native.ThreadPool) -> None:
    for rounding in (7, (1,), (1, 2), (1, 2, 3, 4), (1, "1", 2)):
        with pytest.raises(TypeError):
            pool.submit_adamw((64,) * 5, True, [(0, 0, 1.0)], scalars_of(1), rounding=rounding)  # type: ignore[arg-type]
