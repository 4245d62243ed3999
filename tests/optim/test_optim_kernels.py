"""The Triton kernels against the C definitions, bit for bit.

Without a GPU, Triton's interpreter shows the order of operations and the integer logic, not what the compiler does:
`TRITON_INTERPRET=1 pytest -m gpu -W ignore tests/optim/test_optim_kernels.py`.
"""

import importlib
import os
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from megatier import _native
from megatier.optim.adamw import lion_scalars

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
LARGE = 100_003 if INTERPRETED else 5_000_003

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device"),
]
split_or_whole = pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
bf16_or_fp32 = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])

KernelPlanes = tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor]
Segments = list[tuple[int, int, float]]
KernelScalars = tuple[float, float, float, float, float, float, float, float]

BETA1, BETA2, EPS, LR = 0.9, 0.999, 1e-8, 1e-3
DECAY = 1 - LR * 0.1
SPECIAL = [
    0.0, -0.0, 1e-45, -1e-40, 1.1754942e-38, 1.1754944e-38, -2e-38, 1e-30, 1e-20, -1e-10, 1.0, -3.5, 1e19, -1e30,
    3.4028235e38, -3.4028235e38, float("inf"), -float("inf"), float("nan"), -float("nan"),
]  # fmt: skip


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return importlib.import_module("megatier.optim.kernels")


@pytest.fixture(scope="module")
def pool() -> Iterator[_native.ThreadPool]:
    pool = _native.ThreadPool(2, 4096)
    yield pool
    pool.close()


def scalars_of(step: int, grad_scale: float = 1.0) -> KernelScalars:
    step_size, sqrt_bias2 = LR / (1 - BETA1**step), (1 - BETA2**step) ** 0.5
    return (BETA1, 1 - BETA1, BETA2, 1 - BETA2, EPS, step_size, sqrt_bias2, grad_scale)


def random_bits(num_elements: int, bits: int, seed: int) -> Tensor:
    """Every pattern alike: all exponents, signs and NaN payloads. Uint8 [num_elements * bits / 8]."""
    shape = (num_elements * bits // 8,)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def random_choice(num_elements: int, seed: int) -> Tensor:
    chosen = torch.randint(0, len(SPECIAL), (num_elements,), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(SPECIAL, dtype=torch.float32)[chosen]


def planes_of(master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, split: bool) -> KernelPlanes:
    """Uint8 planes of fp32 tensors; grad is rounded to bf16 when split."""
    moments = exp_avg.clone().view(torch.uint8), exp_avg_sq.clone().view(torch.uint8)
    if not split:
        return (master.clone().view(torch.uint8), None, *moments, grad.clone().view(torch.uint8))
    weight, remainder = (torch.empty(2 * len(master), dtype=torch.uint8) for _ in range(2))
    _native.split(master.data_ptr(), weight.data_ptr(), remainder.data_ptr(), len(master))
    return (weight, remainder, *moments, grad.bfloat16().view(torch.uint8))


def ordinary_planes(num_elements: int, split: bool) -> KernelPlanes:
    random = torch.Generator().manual_seed(1)
    x, m, v, g = (torch.randn(num_elements, generator=random) for _ in range(4))
    return planes_of(x, m, v * v, g, split)


def awkward_planes(num_elements: int, split: bool) -> KernelPlanes:
    """Every meeting of zeros, subnormals, extremes, infinities and NaN."""
    x, m, v, g = (random_choice(num_elements, seed) for seed in range(4))
    return planes_of(x, m, v.abs(), g, split)


def arbitrary_planes(num_elements: int, split: bool) -> KernelPlanes:
    """Planes that no update would leave behind, too: negative second moments, any remainder."""
    number = 16 if split else 32
    weight, m, v, g = (random_bits(num_elements, bits, bits + i) for i, bits in enumerate((number, 32, 32, number)))
    return weight, random_bits(num_elements, 16, 5) if split else None, m, v, g


def narrow(planes: KernelPlanes, width: int) -> KernelPlanes:
    """The same with the upper bits of moments: of bf16, or any codes of 8 bits."""
    weight, remainder, exp_avg, exp_avg_sq, grad = planes
    assert exp_avg_sq is not None
    number = {2: torch.int16, 1: torch.uint8}[width]
    moments = (moment.view(torch.int32) >> {2: 16, 1: 20}[width] for moment in (exp_avg, exp_avg_sq))
    first, second = (bits.to(number).view(torch.uint8) for bits in moments)
    return weight, remainder, first, second, grad


def arena_of(planes: KernelPlanes) -> KernelPlanes:
    """A copy on the device: each plane a view of one allocation, 256 bytes aligned."""
    offsets, end = [], 256
    for plane in planes:
        offsets.append(end)
        end += 0 if plane is None else -(-plane.numel() // 256) * 256
    arena = torch.full((end,), 0xA5, dtype=torch.uint8, device=DEVICE)

    def place(plane: Tensor, offset: int) -> Tensor:
        return arena[offset : offset + plane.numel()].copy_(plane)

    weight, remainder, exp_avg, exp_avg_sq, grad = planes
    return (
        place(weight, offsets[0]),
        None if remainder is None else place(remainder, offsets[1]),
        place(exp_avg, offsets[2]),
        None if exp_avg_sq is None else place(exp_avg_sq, offsets[3]),
        place(grad, offsets[4]),
    )


def update_on_cpu(
    pool: _native.ThreadPool,
    planes: KernelPlanes,
    segments: Segments,
    scalars: KernelScalars,
    rounding: tuple[int, int, int] | None = None,
) -> None:
    weight, remainder, exp_avg, exp_avg_sq, grad = planes
    addresses = (
        weight.data_ptr(),
        0 if remainder is None else remainder.data_ptr(),
        exp_avg.data_ptr(),
        0 if exp_avg_sq is None else exp_avg_sq.data_ptr(),
        grad.data_ptr(),
    )
    batch = pool.submit_adamw(addresses, remainder is not None, segments, scalars, rounding=rounding)
    assert batch.wait()
    assert batch.error() is None


def assert_same_planes(found: KernelPlanes, expected: KernelPlanes) -> None:
    for name, got, want in zip(("weight", "remainder", "exp_avg", "exp_avg_sq", "grad"), found, expected, strict=True):
        assert (got is None) == (want is None)
        if got is not None and want is not None:
            wrong = (got.cpu() != want).nonzero().flatten()
            assert not len(wrong), f"{len(wrong)} bytes of {name} differ, the first at byte {int(wrong[0])}"


@split_or_whole
@pytest.mark.parametrize("make", [ordinary_planes, awkward_planes, arbitrary_planes])
def test_update_equals_the_c_kernel(
    kernels: ModuleType, pool: _native.ThreadPool, split: bool, make: Callable[[int, bool], KernelPlanes]
) -> None:
    expected = make(LARGE, split)
    found = arena_of(expected)
    for step, grad_scale in ((1, 1.0), (2, 0.37)):
        kernels.adamw(found, [(0, LARGE, DECAY)], scalars_of(step, grad_scale))
        update_on_cpu(pool, expected, [(0, LARGE, DECAY)], scalars_of(step, grad_scale))
        assert_same_planes(found, expected)


@split_or_whole
def test_update_over_20_steps_of_several_segments_equals_the_c_kernel(
    kernels: ModuleType, pool: _native.ThreadPool, split: bool
) -> None:
    num_elements = 9_001
    segments = [(0, 896, DECAY), (896, 2_565, 1.0), (2_688, 6_000, DECAY), (6_013, num_elements, 0.5)]
    x = torch.randn(num_elements, generator=torch.Generator().manual_seed(2))
    expected = planes_of(x, torch.zeros_like(x), torch.zeros_like(x), x, split)
    found = arena_of(expected)
    for step in range(1, 21):
        random = torch.Generator().manual_seed(step)
        size = 10.0 ** -torch.randint(0, 23, (num_elements,), generator=random)  # squares down to subnormal ones
        grad = torch.randn(num_elements, generator=random) * size
        grad = (grad.bfloat16() if split else grad).view(torch.uint8)
        expected[4].copy_(grad)
        found[4].copy_(grad)
        kernels.adamw(found, segments, scalars_of(step, 1 / step))
        update_on_cpu(pool, expected, segments, scalars_of(step, 1 / step))
        assert_same_planes(found, expected)


@split_or_whole
@pytest.mark.parametrize("width", [2, 1], ids=["bf16", "8 bits"])
@pytest.mark.parametrize("make", [ordinary_planes, awkward_planes, arbitrary_planes])
@pytest.mark.parametrize(
    ("key", "first"), [(0x0123_4567_89AB_CDEF, 0), (0xFEDC_BA98_7654_3210, (1 << 32) - 2_000), (1, 1 << 40)]
)
def test_update_with_rounded_moments_equals_the_c_kernel(
    kernels: ModuleType,
    pool: _native.ThreadPool,
    split: bool,
    width: int,
    make: Callable[[int, bool], KernelPlanes],
    key: int,
    first: int,
) -> None:
    expected = narrow(make(LARGE, split), width)
    found = arena_of(expected)
    segments = [(0, 896, DECAY), (896, 2_565, 1.0), (2_688, LARGE - 1, DECAY)]
    for step, grad_scale in ((1, 1.0), (2, 0.37)):
        kernels.adamw(found, segments, scalars_of(step, grad_scale), (width, key, first))
        update_on_cpu(pool, expected, segments, scalars_of(step, grad_scale), (width, key, first))
        assert_same_planes(found, expected)


@split_or_whole
@pytest.mark.parametrize("make", [ordinary_planes, awkward_planes, arbitrary_planes])
def test_update_of_lion_equals_the_c_kernel(
    kernels: ModuleType, pool: _native.ThreadPool, split: bool, make: Callable[[int, bool], KernelPlanes]
) -> None:
    weight, remainder, momentum, _, grad = make(LARGE, split)
    expected = weight, remainder, momentum, None, grad
    found = arena_of(expected)
    segments = [(0, 896, DECAY), (896, 2_565, 1.0), (2_688, LARGE - 1, DECAY)]
    for scale in (1.0, 0.37):
        scalars = (*lion_scalars(LR, (BETA1, 0.99)), scale)
        kernels.adamw(found, segments, scalars)
        update_on_cpu(pool, expected, segments, scalars)
        assert_same_planes(found, expected)


@split_or_whole
@pytest.mark.parametrize("num_elements", [1, 3, 127, 128, 1023, 1024, 1025, 4097])
def test_update_of_any_length_stays_inside(
    kernels: ModuleType, pool: _native.ThreadPool, split: bool, num_elements: int
) -> None:
    expected = ordinary_planes(num_elements + 256, split)
    found = arena_of(expected)
    segment = (128, 128 + num_elements, DECAY)
    kernels.adamw(found, [segment], scalars_of(1))
    update_on_cpu(pool, expected, [segment], scalars_of(1))
    assert_same_planes(found, expected)


@split_or_whole
def test_update_of_no_segment_changes_nothing(kernels: ModuleType, split: bool) -> None:
    expected = ordinary_planes(256, split)
    found = arena_of(expected)
    kernels.adamw(found, [], scalars_of(1))
    kernels.adamw(found, [(128, 128, DECAY)], scalars_of(1))
    assert_same_planes(found, expected)


def needs_gpu_memory(num_bytes: int) -> None:
    if INTERPRETED or torch.cuda.mem_get_info()[0] < num_bytes:
        pytest.skip(f"needs {num_bytes / 1e9:.0f} GB of GPU memory")


def test_update_beyond_2_to_the_31_elements_reaches_the_end(kernels: ModuleType, pool: _native.ThreadPool) -> None:
    num_elements, tail = (1 << 31) + 3_001, 5_000
    needs_gpu_memory(15 * num_elements)
    expected = ordinary_planes(tail, split=True)
    found: list[Tensor] = []
    for plane in expected:
        assert plane is not None
        found.append(torch.zeros(plane.numel() // tail * num_elements, dtype=torch.uint8, device=DEVICE))
        found[-1][-plane.numel() :].copy_(plane)
    kernels.adamw(tuple(found), [(0, num_elements, DECAY)], scalars_of(1))
    update_on_cpu(pool, expected, [(0, tail, DECAY)], scalars_of(1))
    for got, want in zip(found, expected, strict=True):
        assert want is not None
        assert torch.equal(got[-want.numel() :].cpu(), want)
        assert not got[: -want.numel()].any()


def sum_on_cpu(values: Tensor, first: int = 0) -> Tensor:
    """Of a piece whose first element has this number: up to the next tile, then tile by tile."""
    parts = []
    for piece in (values[: -first % 65_536], values[-first % 65_536 :]):
        parts.append(torch.empty(-(-piece.numel() // 65_536), dtype=torch.float64))
        _native.sum_squares(piece.data_ptr(), piece.numel(), piece.dtype is torch.bfloat16, parts[-1].data_ptr())
    return torch.cat(parts)


def assert_same_sums(found: Tensor, expected: Tensor) -> None:
    assert found.dtype is torch.float64
    assert found.device.type == DEVICE
    nan = expected.isnan()
    assert torch.equal(found.cpu().isnan(), nan)
    assert torch.equal(found.cpu()[~nan].view(torch.int64), expected[~nan].view(torch.int64))


@bf16_or_fp32
@pytest.mark.parametrize("num_elements", [0, 1, 255, 256, 257, 4_096, 65_535, 65_536, 65_537, 200_003, 1_000_003])
def test_sum_squares_equals_the_c_sum(kernels: ModuleType, dtype: torch.dtype, num_elements: int) -> None:
    random = torch.Generator().manual_seed(num_elements)
    values = torch.randn(num_elements, generator=random)
    values *= 10.0 ** -torch.randint(0, 8, (num_elements,), generator=random)  # so that the order shows
    values = values.to(dtype)
    assert_same_sums(kernels.sum_squares_on_gpu(values.to(DEVICE)), sum_on_cpu(values))


@bf16_or_fp32
@pytest.mark.parametrize("first", [1, 128, 65_408, 65_535, 131_072, (1 << 31) + 200_000])
@pytest.mark.parametrize("num_elements", [0, 1, 128, 65_537, 200_003])
def test_sum_squares_of_a_piece_counts_tiles_from_where_it_lies(
    kernels: ModuleType, dtype: torch.dtype, first: int, num_elements: int
) -> None:
    values = torch.randn(num_elements, generator=torch.Generator().manual_seed(5)).to(dtype)
    assert_same_sums(kernels.sum_squares_on_gpu(values.to(DEVICE), first), sum_on_cpu(values, first))


@bf16_or_fp32
@pytest.mark.parametrize("start", [1, 128])
def test_sum_squares_of_a_piece_leaves_out_its_neighbours(kernels: ModuleType, dtype: torch.dtype, start: int) -> None:
    values = torch.full((80_000,), torch.nan, dtype=dtype)
    values[start:70_001] = torch.randn(70_001 - start, generator=torch.Generator().manual_seed(4)).to(dtype)
    assert_same_sums(kernels.sum_squares_on_gpu(values.to(DEVICE)[start:70_001]), sum_on_cpu(values[start:70_001]))


@bf16_or_fp32
@pytest.mark.parametrize("starts", [(0, 64, 70_000), (1, 77, 70_001)])
def test_sum_runs_equals_the_c_sum_of_each_run(
    kernels: ModuleType, dtype: torch.dtype, starts: tuple[int, ...]
) -> None:
    values = torch.randn(200_003, generator=torch.Generator().manual_seed(8)).to(dtype)
    runs = list(zip(starts, (13, 65_536, 60_000), strict=True))
    aligned = all(start % 16 == 0 for start in starts)
    found = kernels.sum_runs(values.to(DEVICE), torch.tensor(runs, device=DEVICE), aligned=aligned)
    assert_same_sums(found, torch.cat([sum_on_cpu(values[start : start + count]) for start, count in runs]))


@bf16_or_fp32
@pytest.mark.parametrize("special", SPECIAL)
def test_sum_squares_of_special_numbers_equals_the_c_sum(
    kernels: ModuleType, dtype: torch.dtype, special: float
) -> None:
    values = torch.tensor([special, 0.0, 1.0]).repeat(22_000).to(dtype)
    assert_same_sums(kernels.sum_squares_on_gpu(values.to(DEVICE)), sum_on_cpu(values))


@bf16_or_fp32
def test_sum_squares_of_arbitrary_bits_equals_the_c_sum(kernels: ModuleType, dtype: torch.dtype) -> None:
    values = random_bits(LARGE, torch.finfo(dtype).bits, 6).view(dtype)
    values = torch.where(values.isfinite(), values, torch.ones_like(values))
    assert_same_sums(kernels.sum_squares_on_gpu(values.to(DEVICE)), sum_on_cpu(values))


def test_sum_squares_beyond_2_to_the_31_elements_reaches_the_end(kernels: ModuleType) -> None:
    num_elements, tail = (1 << 31) + 65_536 + 7, 65_536 + 7
    needs_gpu_memory(3 * num_elements)
    values = torch.zeros(num_elements, dtype=torch.bfloat16, device=DEVICE)
    values[-tail:] = torch.randn(tail, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    found = kernels.sum_squares_on_gpu(values)
    assert_same_sums(found[-2:], sum_on_cpu(values[-tail:].cpu()))
    assert not found[:-2].any()
