"""AdamW of the native core: its definition bit for bit, its accuracy, its independence of levels, threads and cuts."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from megatier import _native
from megatier.numerics.adamw import lion_scalars
from megatier.numerics.seeds import rounding_key

Floats = npt.NDArray[np.float32]
Scalars = tuple[float, float, float, float, float, float, float, float]

BETA1, BETA2, EPS, LR, WEIGHT_DECAY = 0.9, 0.999, 1e-8, 1e-3, 0.1
NAN = np.uint32(0x7FC00000).view(np.float32)

every_level = pytest.mark.parametrize("isa", _native.isa_levels())
split_or_whole = pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    yield
    _native.set_isa(_native.isa_levels()[0])


@pytest.fixture(scope="module")
def pool() -> Iterator[_native.ThreadPool]:
    pool = _native.ThreadPool(2, 64)
    yield pool
    pool.close()


def scalars_of(step: int, grad_scale: float = 1.0) -> Scalars:
    step_size, sqrt_bias2 = LR / (1 - BETA1**step), (1 - BETA2**step) ** 0.5
    return (BETA1, 1 - BETA1, BETA2, 1 - BETA2, EPS, step_size, sqrt_bias2, grad_scale)


DECAY = 1 - LR * WEIGHT_DECAY


def address_of(array: npt.NDArray[Any]) -> int:
    return int(array.ctypes.data)


@dataclass
class State:
    """The planes of one unit. remainder is empty when not split; grad holds bf16 bits when split, else floats.

    Moments are floats, or the bits of bf16.
    """

    weight: npt.NDArray[Any]
    remainder: npt.NDArray[np.int16]
    exp_avg: npt.NDArray[Any]
    exp_avg_sq: npt.NDArray[Any]
    grad: npt.NDArray[Any]

    @staticmethod
    def of(master: Floats, exp_avg: Floats, exp_avg_sq: Floats, grad: Floats, split: bool) -> "State":
        """grad is rounded to bf16 when split."""
        count = len(master)
        if not split:
            return State(master.copy(), np.zeros(0, np.int16), exp_avg.copy(), exp_avg_sq.copy(), grad.copy())
        weight, remainder = np.zeros(count, np.uint16), np.zeros(count, np.int16)
        _native.split(address_of(master), address_of(weight), address_of(remainder), count)
        return State(weight, remainder, exp_avg.copy(), exp_avg_sq.copy(), bf16_bits(grad))

    @property
    def planes(self) -> tuple[int, int, int, int, int]:
        remainder = address_of(self.remainder) if len(self.remainder) else 0
        moments = address_of(self.exp_avg), address_of(self.exp_avg_sq)
        return (address_of(self.weight), remainder, *moments, address_of(self.grad))

    @property
    def is_split(self) -> bool:
        return self.weight.dtype == np.uint16

    def master(self) -> Floats:
        if not self.is_split:
            return self.weight
        master = np.zeros(len(self.weight), np.float32)
        _native.join(address_of(self.weight), address_of(self.remainder), address_of(master), len(master))
        return master

    def update(
        self,
        pool: _native.ThreadPool,
        segments: list[tuple[int, int, float]],
        scalars: Scalars,
        before: tuple[int, int, int, int] | None = None,
        rounding: tuple[int, int] | None = None,
    ) -> None:
        sources = before or self.planes[:4]
        batch = pool.submit_adamw(self.planes, self.is_split, segments, scalars, before=sources, rounding=rounding)
        assert batch.wait()
        assert batch.error() is None

    def narrow(self) -> "State":
        """The same with moments in bf16."""
        moments = bf16_bits(self.exp_avg), bf16_bits(self.exp_avg_sq)
        return State(self.weight, self.remainder, *moments, self.grad)

    def piece(self, start: int, stop: int) -> "State":
        """Elements of it, in place."""
        planes = (self.weight, self.remainder, self.exp_avg, self.exp_avg_sq, self.grad)
        return State(*(plane[start:stop] for plane in planes))

    def same_bits(self, other: "State") -> bool:
        names = ("weight", "remainder", "exp_avg", "exp_avg_sq")
        return all(getattr(self, name).tobytes() == getattr(other, name).tobytes() for name in names)


def bf16_bits(values: Floats) -> npt.NDArray[np.uint16]:
    bits = np.zeros(len(values), np.uint16)
    _native.round_bf16(address_of(values), address_of(bits), len(values))
    return bits


def floats_of(bits: npt.NDArray[np.uint16]) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def settle(moment: Floats) -> Floats:
    moment = np.where(np.abs(moment) < np.float32(2.0**-126), np.float32(0), moment)
    return np.where(np.isnan(moment), NAN, moment).astype(np.float32)


def update_by_definition(
    x: Floats, m: Floats, v: Floats, grad: Floats, decay: float, scalars: Scalars
) -> tuple[Floats, Floats, Floats]:
    """numpy rounds each fp32 operation on its own, as the definition asks."""
    beta1, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, sqrt_bias2, grad_scale = np.array(
        scalars, np.float32
    )
    with np.errstate(all="ignore"):
        g = grad * grad_scale
        m = settle(beta1 * m + one_minus_beta1 * g)
        v = settle(beta2 * v + one_minus_beta2 * (g * g))
        x = x * np.float32(decay) - step_size * (m / (np.sqrt(v) / sqrt_bias2 + eps))
    return np.where(np.isnan(x), NAN, x), m, v


def ordinary_state(num_elements: int, split: bool, seed: int = 0) -> State:
    random = np.random.default_rng(seed)
    x, m, v, g = (random.standard_normal(num_elements).astype(np.float32) for _ in range(4))
    return State.of(x, m, v * v, g, split)


def awkward_state(num_elements: int, split: bool, seed: int = 0) -> State:
    """Every meeting of zeros, subnormals, extremes, infinities and NaN in weight, moments and gradient."""
    random = np.random.default_rng(seed)
    special = np.array(
        [0.0, -0.0, 1e-45, -1e-40, 1.1754942e-38, 1.1754944e-38, -2e-38, 1e-30, 1e-20, -1e-10, 1.0, -3.5, 1e19, -1e30,
         3.4028235e38, -3.4028235e38, np.inf, -np.inf, np.nan, -np.nan],
        np.float32,
    )  # fmt: skip
    x, m, v, g = (random.choice(special, num_elements) for _ in range(4))
    return State.of(x, m, np.abs(v), g, split)


@every_level
@split_or_whole
@pytest.mark.parametrize("make", [ordinary_state, awkward_state])
@pytest.mark.parametrize("grad_scale", [1.0, 0.37])
def test_update_follows_its_definition(
    pool: _native.ThreadPool, isa: str, split: bool, make: Any, grad_scale: float
) -> None:
    _native.set_isa(isa)
    state: State = make(50_021, split)
    grad = floats_of(state.grad) if split else state.grad
    for step in range(1, 4):
        scalars = scalars_of(step, grad_scale)
        x, m, v = update_by_definition(state.master(), state.exp_avg, state.exp_avg_sq, grad, DECAY, scalars)
        state.update(pool, [(0, 50_021, DECAY)], scalars)
        assert state.same_bits(State.of(x, m, v, grad, split))


@every_level
@split_or_whole
@pytest.mark.parametrize("make", [ordinary_state, awkward_state])
def test_update_of_lion_follows_its_definition(pool: _native.ThreadPool, isa: str, split: bool, make: Any) -> None:
    _native.set_isa(isa)
    state: State = make(50_021, split)
    grad = floats_of(state.grad) if split else state.grad
    untouched = state.exp_avg_sq.copy()
    for scale in (1.0, 0.37):
        scalars = (*lion_scalars(LR, (BETA1, 0.99)), scale)
        beta1, one_minus_beta1, beta2, one_minus_beta2, _, rate, _, grad_scale = np.array(scalars, np.float32)
        with np.errstate(all="ignore"):
            g = grad * grad_scale
            mean = beta1 * state.exp_avg + one_minus_beta1 * g
            m = settle(beta2 * state.exp_avg + one_minus_beta2 * g)
            x = state.master() * np.float32(DECAY) - rate * np.where(np.isnan(mean), 0, np.sign(mean))
        weight, remainder, momentum, _, address = state.planes
        planes = (weight, remainder, momentum, 0, address)
        batch = pool.submit_adamw(planes, split, [(0, 17_003, DECAY), (17_003, 50_021, DECAY)], scalars)
        assert batch.wait()
        assert state.same_bits(State.of(np.where(np.isnan(x), NAN, x), m, untouched, grad, split))


def test_update_of_lion_with_a_moment_in_bf16_or_from_adamws_state_is_refused(pool: _native.ThreadPool) -> None:
    planes, scalars = ordinary_state(64, split=False).planes, scalars_of(1)
    lion = (*planes[:3], 0, planes[4])
    with pytest.raises(ValueError, match="exp_avg must be fp32"):
        pool.submit_adamw(lion, False, [(0, 64, 1.0)], scalars, rounding=(1, 0))
    with pytest.raises(ValueError, match="before and after, or neither"):
        pool.submit_adamw(lion, False, [(0, 64, 1.0)], scalars, before=planes[:4])


@every_level
@split_or_whole
def test_update_never_keeps_a_subnormal_moment(pool: _native.ThreadPool, isa: str, split: bool) -> None:
    _native.set_isa(isa)
    state = awkward_state(20_011, split, seed=4)
    state.update(pool, [(0, 20_011, DECAY)], scalars_of(1))
    for moment in (state.exp_avg, state.exp_avg_sq):
        magnitude = np.abs(moment[~np.isnan(moment)])
        assert ((magnitude == 0) | (magnitude >= 2.0**-126)).all()
        assert not np.signbit(moment[moment == 0]).any()


@split_or_whole
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_update_does_not_depend_on_level_threads_or_cut(split: bool, num_threads: int) -> None:
    pool, num_elements = _native.ThreadPool(num_threads, 3), 600_123  # several requests
    expected = awkward_state(num_elements, split)
    _native.set_isa("portable")
    expected.update(pool, [(0, num_elements, DECAY)], scalars_of(3))
    for seed, isa in enumerate(_native.isa_levels()):
        _native.set_isa(isa)
        cuts = np.sort(np.random.default_rng(seed).integers(0, num_elements, 25)).tolist()
        segments = [(start, stop, DECAY) for start, stop in zip([0, *cuts], [*cuts, num_elements], strict=True)]
        state = awkward_state(num_elements, split)
        state.update(pool, segments[::-1], scalars_of(3))
        assert state.same_bits(expected)
    pool.close()


@split_or_whole
def test_update_touches_only_its_segments_and_decays_each_apart(pool: _native.ThreadPool, split: bool) -> None:
    state, before, whole = (ordinary_state(1000, split) for _ in range(3))
    undecayed = ordinary_state(1000, split)
    state.update(pool, [(13, 500, DECAY), (501, 990, 1.0), (995, 995, 0.0)], scalars_of(2))
    whole.update(pool, [(0, 1000, DECAY)], scalars_of(2))
    undecayed.update(pool, [(0, 1000, 1.0)], scalars_of(2))
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        found, old = getattr(state, name), getattr(before, name)
        for span in (slice(0, 13), slice(500, 501), slice(990, 1000)):
            assert np.array_equal(found[span], old[span])
        assert np.array_equal(found[13:500], getattr(whole, name)[13:500])
        assert np.array_equal(found[501:990], getattr(undecayed, name)[501:990])


@every_level
@split_or_whole
@pytest.mark.parametrize("kept", [(), (0,), (1, 2, 3)], ids=["none", "weight", "others"])
def test_update_from_other_planes_equals_one_in_place_and_leaves_them_as_they_were(
    pool: _native.ThreadPool, isa: str, split: bool, kept: tuple[int, ...]
) -> None:
    """Kept: which of weight, remainder and moments are updated in place all the same."""
    _native.set_isa(isa)
    expected, old, untouched, new = (awkward_state(5000, split) for _ in range(4))
    names = ("weight", "remainder", "exp_avg", "exp_avg_sq")
    for name in (name for i, name in enumerate(names) if i not in kept):
        getattr(new, name).view(np.uint8).fill(0xFF)
    sources = [new.planes[i] if i in kept else old.planes[i] for i in range(4)]
    segments = [(0, 1234, DECAY), (1234, 5000, 1.0)]
    expected.update(pool, segments, scalars_of(3))
    new.update(pool, segments, scalars_of(3), (sources[0], sources[1], sources[2], sources[3]))
    assert new.same_bits(expected)
    assert old.same_bits(untouched)


KEY = 0xFEDC_BA98_7654_3210


def random_bits(key: int, first: int, count: int) -> npt.NDArray[np.uint32]:
    """By the definition of native/adamw.h."""
    low, high = np.uint32(key & 0xFFFF_FFFF), np.uint32(key >> 32)
    h = (np.arange(first, first + count, dtype=np.uint64) & np.uint64(0xFFFF_FFFF)).astype(np.uint32) ^ low
    h = (h ^ h >> np.uint32(16)) * np.uint32(0x7FEB352D)
    h = ((h ^ h >> np.uint32(15)) + high) * np.uint32(0x846CA68B)
    return h ^ h >> np.uint32(16)


def rounded(moment: Floats, random: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    return (moment.view(np.uint32) + random >> np.uint32(16)).astype(np.uint16)


@every_level
@split_or_whole
@pytest.mark.parametrize("make", [ordinary_state, awkward_state])
@pytest.mark.parametrize("first", [0, (1 << 32) - 5_000])
def test_update_with_bf16_moments_follows_its_definition(
    pool: _native.ThreadPool, isa: str, split: bool, make: Any, first: int
) -> None:
    _native.set_isa(isa)
    count = 20_021
    state: State = make(count, split).narrow()
    grad = floats_of(state.grad) if split else state.grad
    for step in range(1, 4):
        scalars = scalars_of(step, 0.37)
        moments = floats_of(state.exp_avg), floats_of(state.exp_avg_sq)
        x, m, v = update_by_definition(state.master(), *moments, grad, DECAY, scalars)
        expected = State.of(x, m, v, grad, split)
        random = random_bits(KEY + step, first, count)
        expected.exp_avg = rounded(m, random & np.uint32(0xFFFF))
        expected.exp_avg_sq = rounded(v, random >> np.uint32(16))
        state.update(pool, [(0, count, DECAY)], scalars, rounding=(KEY + step, first))
        assert state.same_bits(expected)


@split_or_whole
@pytest.mark.parametrize("num_threads", [1, 3])
def test_update_with_bf16_moments_does_not_depend_on_level_threads_or_cut(split: bool, num_threads: int) -> None:
    """Nor on whether the pieces of a unit lie in one memory: each knows the number of its first element."""
    pool, count = _native.ThreadPool(num_threads, 3), 300_123
    expected = ordinary_state(count, split).narrow()
    _native.set_isa("portable")
    expected.update(pool, [(0, count, DECAY)], scalars_of(3), rounding=(KEY, 0))
    for seed, isa in enumerate(_native.isa_levels()):
        _native.set_isa(isa)
        cuts = [0, *np.sort(np.random.default_rng(seed).integers(0, count, 9)).tolist(), count]
        state, pieces = (ordinary_state(count, split).narrow() for _ in range(2))
        segments = [(start, stop, DECAY) for start, stop in pairwise(cuts)]
        state.update(pool, segments, scalars_of(3), rounding=(KEY, 0))
        for start, stop in pairwise(cuts):
            piece = pieces.piece(start, stop)
            piece.update(pool, [(0, stop - start, DECAY)], scalars_of(3), rounding=(KEY, start))
        assert state.same_bits(expected)
        assert pieces.same_bits(expected)
    pool.close()


@every_level
def test_update_into_other_planes_with_bf16_moments_stays_inside(pool: _native.ThreadPool, isa: str) -> None:
    _native.set_isa(isa)
    for start, stop in [(0, 1), (3, 20), (129, 1_000), (1, 3_001)]:
        old, untouched, new, expected = (ordinary_state(3_001, split=True).narrow() for _ in range(4))
        segment = [(start, stop, DECAY)]
        expected.update(pool, segment, scalars_of(1), rounding=(KEY, 7))
        new.update(pool, segment, scalars_of(1), old.planes[:4], rounding=(KEY, 7))
        assert new.same_bits(expected)
        assert old.same_bits(untouched)
        outside = np.r_[0:start, stop:3_001]
        for name in ("weight", "remainder", "exp_avg", "exp_avg_sq"):
            assert np.array_equal(getattr(new, name)[outside], getattr(untouched, name)[outside])


def test_rounding_of_moments_loses_nothing_on_average(pool: _native.ThreadPool) -> None:
    """Neither over the elements of a step nor over the steps of an element; and the two moments go their own ways."""
    # Without a past, the first moment is the gradient, and the second one its square.
    scalars = (0.0, 1.0, 0.0, 1.0, EPS, LR, 1.0, 1.0)
    for grad in np.array([1 + 2.0**-9, -(1 + 2.0**-14), 1e-15 * np.pi, 2 - 2.0**-10], np.float32):
        found = []
        for step in range(401):
            values = np.full(50_000 if step == 0 else 64, grad)
            state = State.of(values, values, values, values, split=False).narrow()
            state.update(pool, [(0, len(values), 1.0)], scalars, rounding=(rounding_key(0, step, "unit"), 0))
            found.append([floats_of(moment).astype(np.float64) for moment in (state.exp_avg, state.exp_avg_sq)])
        for moments in (found[0], np.concatenate(found[1:], axis=1)):
            for values, exact in zip(moments, (float(grad), float(grad * grad)), strict=True):
                low, high = values.min(), values.max()
                assert low <= exact <= high
                assert high - low <= abs(exact) / 128
                assert abs(values.mean() - exact) <= 4.5 * (high - low) / 2 / len(values) ** 0.5
            varies = all(values.std() > 0 for values in moments)
            assert not varies or abs(np.corrcoef(*moments)[0, 1]) <= 4.5 / len(moments[0]) ** 0.5


@split_or_whole
def test_update_with_bf16_moments_keeps_padding_of_zeros(pool: _native.ThreadPool, split: bool) -> None:
    zeros = np.zeros(2048, np.float32)
    state = State.of(zeros, zeros, zeros, zeros, split).narrow()
    state.update(pool, [(0, 2048, DECAY)], scalars_of(1), rounding=(KEY, 0))
    assert not any(plane.any() for plane in (state.weight, state.remainder, state.exp_avg, state.exp_avg_sq))


@split_or_whole
def test_padding_of_zeros_stays_zero(pool: _native.ThreadPool, split: bool) -> None:
    zeros = np.zeros(2048, np.float32)
    state = State.of(zeros, zeros, zeros, zeros, split)
    state.update(pool, [(0, 2048, DECAY)], scalars_of(1))
    assert not any(plane.any() for plane in (state.weight, state.remainder, state.exp_avg, state.exp_avg_sq))


def reference_and_torch(master: Floats, grads: list[Floats]) -> tuple[npt.NDArray[np.float64], Floats]:
    """The weights after all steps, in fp64 and by torch's fused fp32 AdamW."""
    x, m, v = master.astype(np.float64), np.zeros(len(master)), np.zeros(len(master))
    weight = torch.nn.Parameter(torch.from_numpy(master.copy()))
    optimizer = torch.optim.AdamW([weight], lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)
    for step, grad in enumerate(grads, start=1):
        g = grad.astype(np.float64)
        m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
        denominator = np.sqrt(v) / (1 - BETA2**step) ** 0.5 + EPS
        x = x * (1 - LR * WEIGHT_DECAY) - LR / (1 - BETA1**step) * m / denominator
        weight.grad = torch.from_numpy(grad)
        optimizer.step()
    return x, weight.detach().numpy()


@split_or_whole
def test_update_over_200_steps_is_as_accurate_as_torch(pool: _native.ThreadPool, split: bool) -> None:
    random, num_elements = np.random.default_rng(7), 20_000
    master = random.standard_normal(num_elements).astype(np.float32)
    scale = 10.0 ** random.uniform(-6, 0, num_elements)  # parameters differ in the size of their gradients
    grads = [
        floats_of(bf16_bits((random.standard_normal(num_elements) * scale).astype(np.float32))) for _ in range(200)
    ]
    state = State.of(master, np.zeros_like(master), np.zeros_like(master), grads[0], split)
    for step, grad in enumerate(grads, start=1):
        state.grad[:] = bf16_bits(grad) if split else grad
        state.update(pool, [(0, num_elements, DECAY)], scalars_of(step))
    reference, by_torch = reference_and_torch(master, grads)
    ours, theirs = np.abs(state.master() - reference), np.abs(by_torch - reference)
    assert ours.max() <= 1.05 * theirs.max()
    assert np.sqrt((ours**2).mean()) <= 1.05 * np.sqrt((theirs**2).mean())


def test_worker_ignores_flush_denormal(pool: _native.ThreadPool) -> None:
    """Threads inherit the floating-point state of the one that starts them."""
    torch.set_flush_denormal(True)
    try:
        flushing = _native.ThreadPool(1, 4)
    finally:
        torch.set_flush_denormal(False)
    state, expected = (awkward_state(5000, True) for _ in range(2))
    state.update(flushing, [(0, 5000, DECAY)], scalars_of(1))
    expected.update(pool, [(0, 5000, DECAY)], scalars_of(1))
    flushing.close()
    assert state.same_bits(expected)


@pytest.mark.parametrize(
    ("planes", "split", "segment"),
    [
        ((64, 0, 64, 64, 64), True, (0, 0, 1.0)),
        ((64, 64, 64, 64, 64), False, (0, 0, 1.0)),
        ((66, 0, 64, 64, 64), False, (0, 0, 1.0)),
        ((64, 64, 66, 64, 64), True, (0, 0, 1.0)),
        ((64, 64, 64, 64, 64), True, (2, 1, 1.0)),
        ((64, 64, 64, 64, 64), True, (-1, 1, 1.0)),
    ],
)
def test_update_of_impossible_planes_is_refused(
    pool: _native.ThreadPool, planes: tuple[int, int, int, int, int], split: bool, segment: tuple[int, int, float]
) -> None:
    with pytest.raises(ValueError, match=r"remainder|aligned|segment|negative"):
        pool.submit_adamw(planes, split, [segment], scalars_of(1))


@pytest.mark.parametrize("before", [(65, 64, 64, 64), (64, 0, 64, 64), (64, 65, 64, 64), (64, 64, 64, 66)])
def test_update_from_impossible_planes_is_refused(pool: _native.ThreadPool, before: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"remainder|aligned"):
        pool.submit_adamw((64, 64, 64, 64, 64), True, [(0, 0, 1.0)], scalars_of(1), before=before)


@pytest.mark.parametrize(
    ("planes", "rounding"),
    [((64, 64, 65, 64, 64), (0, 0)), ((64, 64, 66, 64, 64), None), ((64, 64, 64, 64, 64), (0, -1))],
)
def test_update_of_impossible_moments_is_refused(
    pool: _native.ThreadPool, planes: tuple[int, int, int, int, int], rounding: tuple[int, int] | None
) -> None:
    with pytest.raises(ValueError, match=r"aligned|negative"):
        pool.submit_adamw(planes, True, [(0, 0, 1.0)], scalars_of(1), rounding=rounding)


def test_update_with_a_rounding_that_is_no_pair_is_refused(pool: _native.ThreadPool) -> None:
    for rounding in (7, (1,), (1, 2, 3), ("1", 2)):
        with pytest.raises(TypeError):
            pool.submit_adamw((64,) * 5, True, [(0, 0, 1.0)], scalars_of(1), rounding=rounding)  # type: ignore[arg-type]
