"""AdamW of the native core: its definition bit for bit, its accuracy, its independence of levels, threads and cuts."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from adamw_states import (
    BETA1,
    BETA2,
    DECAY,
    EPS,
    LR,
    NAN,
    WEIGHT_DECAY,
    Floats,
    State,
    awkward_state,
    bf16_bits,
    every_level,
    floats_of,
    ordinary_state,
    scalars_of,
    settle,
    split_or_whole,
    update_by_definition,
)

from megatier import _native
from megatier.optim.adamw import lion_scalars


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    yield
    _native.set_isa(_native.isa_levels()[0])


@pytest.fixture(scope="module")
def pool() -> Iterator[_native.ThreadPool]:
    pool = _native.ThreadPool(2, 64)
    yield pool
    pool.close()


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
        pool.submit_adamw(lion, False, [(0, 64, 1.0)], scalars, rounding=(2, 1, 0))
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


@every_level
@split_or_whole
@pytest.mark.parametrize(("offset", "border"), [(0, 1024), (0, 1000), (1, 1024)], ids=["lines", "cut", "shifted"])
def test_update_into_planes_past_the_caches_equals_one_in_place(
    pool: _native.ThreadPool, isa: str, split: bool, offset: int, border: int
) -> None:
    """Whole lines of 64 bytes go past the caches; what is cut or shifted does not."""
    _native.set_isa(isa)
    expected, old, new = (awkward_state(5000, split) for _ in range(3))
    beyond = {}
    for name in ("weight", "remainder", "exp_avg", "exp_avg_sq"):
        plane = getattr(new, name)
        room = np.full(plane.nbytes + 256, 0xFF, np.uint8)
        start = -room.ctypes.data % 64 + offset * plane.itemsize
        setattr(new, name, room[start : start + plane.nbytes].view(plane.dtype))
        beyond[name] = room[:start], room[start + plane.nbytes :]
    segments = [(0, border, DECAY), (border, 5000, 1.0)]
    expected.update(pool, segments, scalars_of(3))
    new.update(pool, segments, scalars_of(3), old.planes[:4])
    assert new.same_bits(expected)
    assert all((part == 0xFF).all() for parts in beyond.values() for part in parts)


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
