"""Split and join of the master, rounding, sums and checksums, at every instruction set level."""

import ctypes
import math
import mmap
from collections.abc import Iterator
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import pytest
import torch

from megatier import _native

Floats = npt.NDArray[np.float32]

LENGTHS = [0, 1, 7, 31, 255, 1000, 65_537, 200_003]
SPECIAL_BITS = [
    0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F808001,
    0x3F818000, 0xBF808000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000,
]  # fmt: skip
NAN_BITS = [0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFBFFFFF]


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    yield
    _native.set_isa(_native.isa_levels()[0])


every_level = pytest.mark.parametrize("isa", _native.isa_levels())


def address_of(array: npt.NDArray[Any]) -> int:
    return int(array.ctypes.data)


def random_floats(num_elements: int, seed: int = 0) -> Floats:
    """Random bit patterns of finite floats, the special ones first."""
    bits = np.random.default_rng(seed).integers(0, 1 << 32, num_elements, dtype=np.uint32)
    bits[(bits & 0x7F800000) == 0x7F800000] ^= 0x40000000
    special = np.array(SPECIAL_BITS, np.uint32)[:num_elements]
    bits[: len(special)] = special
    return bits.view(np.float32)


@every_level
@pytest.mark.parametrize("num_elements", LENGTHS)
def test_split_then_join_gives_the_master_back(isa: str, num_elements: int) -> None:
    _native.set_isa(isa)
    master = random_floats(num_elements + 1)[1:]  # an odd start
    weight, remainder = np.zeros(num_elements, np.uint16), np.zeros(num_elements, np.int16)
    _native.split(address_of(master), address_of(weight), address_of(remainder), num_elements)
    bits = master.view(np.uint32)
    assert np.array_equal(weight, ((bits.astype(np.uint64) + 0x8000) >> 16).astype(np.uint16))
    joined = np.zeros(num_elements, np.float32)
    _native.join(address_of(weight), address_of(remainder), address_of(joined), num_elements)
    assert np.array_equal(joined.view(np.uint32), bits)


@every_level
def test_split_of_nan_is_one_quiet_nan(isa: str) -> None:
    _native.set_isa(isa)
    master = np.array(NAN_BITS * 11, np.uint32)
    weight, remainder = np.zeros(len(master), np.uint16), np.ones(len(master), np.int16)
    _native.split(address_of(master), address_of(weight), address_of(remainder), len(master))
    assert (weight == 0x7FC0).all()
    assert (remainder == 0).all()


@every_level
@pytest.mark.parametrize("num_elements", LENGTHS)
@pytest.mark.parametrize("in_place", [False, True])
def test_round_bf16_equals_torch(isa: str, num_elements: int, in_place: bool) -> None:
    _native.set_isa(isa)
    source = random_floats(num_elements)
    expected = torch.from_numpy(source.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
    target = source.view(np.uint16) if in_place else np.zeros(num_elements, np.uint16)
    _native.round_bf16(address_of(source), address_of(target), num_elements)
    assert np.array_equal(target[:num_elements], expected)


@every_level
def test_round_bf16_of_nan_is_one_quiet_nan(isa: str) -> None:
    _native.set_isa(isa)
    source, target = np.array(NAN_BITS * 11, np.uint32), np.zeros(66, np.uint16)
    _native.round_bf16(address_of(source), address_of(target), 66)
    assert (target == 0x7FC0).all()


@every_level
def test_accumulate_adds_or_starts(isa: str) -> None:
    _native.set_isa(isa)
    random = np.random.default_rng(1)
    first, second = (random.standard_normal(10_007).astype(np.float32) for _ in range(2))
    total = np.full(10_007, np.nan, np.float32)
    _native.accumulate(address_of(total), address_of(first), 10_007, True)
    _native.accumulate(address_of(total), address_of(second), 10_007, False)
    assert np.array_equal(total, first + second)


def sum_squares_by_definition(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    partials = []
    for start in range(0, len(values), 65_536):
        tile = values[start : start + 65_536]
        lanes = np.zeros(256)
        for row in range(0, len(tile), 256):
            squares = tile[row : row + 256] ** 2
            lanes[: len(squares)] += squares
        for half in (128, 64, 32, 16, 8, 4, 2, 1):
            lanes[:half] += lanes[half : 2 * half]
        partials.append(lanes[0])
    return np.array(partials)


@every_level
@pytest.mark.parametrize("num_elements", LENGTHS)
@pytest.mark.parametrize("is_bf16", [False, True])
def test_sum_squares_follows_its_definition(isa: str, num_elements: int, is_bf16: bool) -> None:
    _native.set_isa(isa)
    values = torch.randn(num_elements + 1, generator=torch.Generator().manual_seed(3))
    values = values.to(torch.bfloat16 if is_bf16 else torch.float32)[1:]
    expected = sum_squares_by_definition(values.double().numpy())
    partials = np.full(len(expected) + 1, -1.0)
    _native.sum_squares(values.data_ptr(), num_elements, is_bf16, address_of(partials))
    assert np.array_equal(partials[:-1], expected)
    assert partials[-1] == -1.0


@pytest.mark.parametrize("is_bf16", [False, True])
def test_sum_squares_of_infinity_is_not_finite(is_bf16: bool) -> None:
    values = torch.full((300,), torch.inf, dtype=torch.bfloat16 if is_bf16 else torch.float32)
    partials = np.zeros(1)
    _native.sum_squares(values.data_ptr(), 300, is_bf16, address_of(partials))
    assert np.isinf(partials[0])


def test_numbers_ignore_flush_denormal_of_the_calling_thread() -> None:
    tiny, total = np.full(100, 1e-40, np.float32), np.zeros(100, np.float32)
    torch.set_flush_denormal(True)
    try:
        _native.accumulate(address_of(total), address_of(tiny), 100, False)
    finally:
        torch.set_flush_denormal(False)
    assert np.array_equal(total, tiny)


@pytest.mark.parametrize("num_bytes", [*range(66), 4095, 4096, 100_001])
def test_checksum_is_the_same_at_every_level(num_bytes: int) -> None:
    content = np.random.default_rng(num_bytes).integers(0, 256, num_bytes + 1, dtype=np.uint8)[1:]
    found = set()
    for isa in _native.isa_levels():
        _native.set_isa(isa)
        found.add(_native.checksum(address_of(content), num_bytes))
    assert len(found) == 1


def test_checksum_keeps_its_definition() -> None:
    """Stored checksums outlive a release: CRC32C by long division over lanes, tail and length."""

    def crc32c(content: bytes, crc: int = 0xFFFFFFFF) -> int:
        for byte in content:
            crc ^= byte
            for _ in range(8):
                crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        return crc

    assert crc32c(b"123456789") ^ 0xFFFFFFFF == 0xE3069283
    content = bytes(range(1, 110))
    lanes = [b"".join(content[i : i + 8] for i in range(8 * lane, 96, 32)) for lane in range(4)]
    end = b"".join(crc32c(lane).to_bytes(4, "little") for lane in lanes) + content[96:] + (109).to_bytes(8, "little")
    memory = np.frombuffer(content, np.uint8)
    assert _native.checksum(address_of(memory), len(content)) == crc32c(end) ^ 0xFFFFFFFF


@every_level
@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 9, 4096, 100_003])
def test_crc32c_is_that_of_other_libraries(isa: str, num_bytes: int) -> None:
    _native.set_isa(isa)
    content = np.random.default_rng(num_bytes).integers(0, 256, num_bytes + 1, dtype=np.uint8)[1:]
    assert _native.crc32c(address_of(content), num_bytes) == google_crc32c.value(content.tobytes())


@pytest.mark.parametrize("num_bytes", [1, 40, 4096])
def test_checksum_notices_every_flipped_bit(num_bytes: int) -> None:
    content = np.random.default_rng(5).integers(0, 256, num_bytes, dtype=np.uint8)
    whole = _native.checksum(address_of(content), num_bytes)
    for bit in range(0, 8 * num_bytes, 1 if num_bytes < 100 else 13):
        content[bit // 8] ^= 1 << bit % 8
        assert _native.checksum(address_of(content), num_bytes) != whole
        content[bit // 8] ^= 1 << bit % 8
    assert _native.checksum(address_of(content), num_bytes - 1) != whole


def test_copy_and_fill_touch_only_their_bytes() -> None:
    target, source = np.zeros(1000, np.uint8), np.arange(1000, dtype=np.uint32).astype(np.uint8)
    _native.copy(address_of(target) + 3, address_of(source), 500)
    assert np.array_equal(target[3:503], source[:500])
    assert not target[:3].any()
    assert not target[503:].any()
    _native.fill(address_of(target) + 10, 0xA5, 20)
    assert (target[10:30] == 0xA5).all()
    assert target[9] == source[6]
    assert target[30] == source[27]


def test_set_isa_of_unknown_level_is_refused() -> None:
    assert _native.isa_levels()[-1] == "portable"
    with pytest.raises(ValueError, match="does not support"):
        _native.set_isa("mmx")


@pytest.mark.parametrize("address", [-8, 1 << 70])
def test_impossible_address_is_refused(address: int) -> None:
    with pytest.raises((ValueError, OverflowError)):
        _native.copy(address, 0, 0)


def test_misaligned_plane_is_refused() -> None:
    with pytest.raises(ValueError, match="aligned"):
        _native.split(1, 0, 0, 0)


@every_level
def test_numbers_stay_inside_their_plane(isa: str) -> None:
    """The planes end where an unreadable page begins."""
    _native.set_isa(isa)
    page = mmap.PAGESIZE
    areas = [mmap.mmap(-1, 2 * page) for _ in range(3)]
    starts = [ctypes.addressof(ctypes.c_char.from_buffer(area)) for area in areas]
    libc = ctypes.CDLL(None)
    for start in starts:
        assert libc.mprotect(ctypes.c_void_p(start + page), page, 0) == 0
    master, weight, remainder = (start + page for start in starts)
    for n in (1, 5, 33, 500):
        _native.split(master - 4 * n, weight - 2 * n, remainder - 2 * n, n)
        _native.join(weight - 2 * n, remainder - 2 * n, master - 4 * n, n)
        _native.round_bf16(master - 4 * n, weight - 2 * n, n)
        _native.checksum(master - n, n)
        _native.sum_squares(weight - 2 * n, n, True, starts[2])


# ---- exact sums ----


def wide_numbers(count: int, seed: int) -> list[float]:
    """Numbers of many magnitudes, some of which cancel."""
    generator = np.random.default_rng(seed)
    numbers = generator.uniform(-1, 1, count) * 10.0 ** generator.integers(-290, 290, count)
    return [*numbers.tolist(), *(-numbers[: count // 2]).tolist()]


TIES = [[2.0**53, 1.0], [2.0**53, 1.0, 2.0**-60], [1e16, 1.0, -1e16], [1.0, 2.0**-53, 2.0**-110], [-1.0, -(2.0**-53)]]


@pytest.mark.parametrize("values", [[0.0], [0.1] * 10, *TIES, *(wide_numbers(1000, seed) for seed in range(20))])
def test_sum_exactly_of_any_numbers_is_that_of_fsum(values: list[float]) -> None:
    numbers = np.array(values)
    assert _native.sum_exactly(numbers.ctypes.data, numbers.size) == math.fsum(values)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_sum_exactly_of_what_is_not_finite_is_not_finite(value: float) -> None:
    numbers = np.array([1.0, value, 2.0])
    assert not math.isfinite(_native.sum_exactly(numbers.ctypes.data, numbers.size))


def test_sum_exactly_of_nothing_is_zero() -> None:
    assert _native.sum_exactly(np.zeros(1).ctypes.data, 0) == 0
