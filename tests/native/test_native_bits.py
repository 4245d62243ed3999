"""The bits that every kernel gives, which are the same on every processor: those of an x86-64 are noted here."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from adamw_states import DECAY, State, address_of, every_level, scalars_of

from megatier import _native

Bits = npt.NDArray[np.uint32]

COUNT = 70_003  # more than a tile, and no multiple of any vector
KEY = 0xFEDC_BA98_7654_3210
NOTED = {
    "split and join": "9bc61598fbc8af4b",
    "round_bf16": "503ee66133f35d54",
    "accumulate": "50c974b3ed5740d5",
    "sum_squares": "69cdc41c0c6ae290",
    "sum_exactly": "0x1.4c0529476b0b4p+37",
    "checksum and crc32c": "b4eea280ab172622",
    "adamw fp32 split": "2e0ae8ef86458807",
    "adamw fp32 whole": "7cfc351925ae494a",
    "adamw bf16 split": "93138d9076135551",
    "adamw bf16 whole": "c761de18e748b77f",
    "adamw 8 bits split": "6aab011df5741534",
    "adamw 8 bits whole": "c949842153663a03",
    "lion split": "d1f4e535209c8cf3",
    "lion whole": "d5c95dd389c65215",
}
"""Digests. Those of checksums and splits are formats on disk, and all others are what a run goes on from."""


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    yield
    _native.set_isa(_native.isa_levels()[0])


def drawn(seed: int) -> Bits:
    """Any bits: fp32 of every size, subnormals, infinities and NaN among them."""
    return np.random.default_rng(seed).integers(0, 1 << 32, COUNT, dtype=np.uint32)


def near_one(seed: int) -> npt.NDArray[np.float32]:
    """Finite fp32 from 2^-20 to 2^12, made of bits alone: a library's own draws are of its own roundings."""
    bits = drawn(seed)
    exponents = (bits >> 23 & 31) + 107
    return (bits & np.uint32(0x807F_FFFF) | exponents << 23).view(np.float32)


def mixed(seed: int) -> npt.NDArray[np.float32]:
    """Numbers of both kinds in turn."""
    numbers = near_one(seed)
    numbers[::3] = drawn(seed + 100)[::3].view(np.float32)
    return numbers


def digest(*arrays: npt.NDArray[Any]) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]


def split_and_join() -> str:
    master, joined = drawn(1), np.zeros(COUNT, np.uint32)
    weight, remainder = np.zeros(COUNT, np.uint16), np.zeros(COUNT, np.int16)
    _native.split(address_of(master), address_of(weight), address_of(remainder), COUNT)
    _native.join(address_of(weight), address_of(remainder), address_of(joined), COUNT)
    return digest(weight, remainder, joined)


def round_bf16() -> str:
    source, target = drawn(2), np.zeros(COUNT, np.uint16)
    _native.round_bf16(address_of(source), address_of(target), COUNT)
    return digest(target)


def accumulate() -> str:
    total, parts = near_one(3), [near_one(4), near_one(5)]
    for part in parts:
        _native.accumulate(address_of(total), address_of(part), COUNT, False)
    return digest(total)


def sum_squares() -> str:
    values, sums = near_one(6), np.zeros(4)
    rounded = (values.view(np.uint32) >> 16).astype(np.uint16)
    _native.sum_squares(address_of(values), COUNT, False, address_of(sums))
    _native.sum_squares(address_of(rounded), COUNT, True, address_of(sums) + 16)
    return digest(sums)


def sum_exactly() -> str:
    values = near_one(7).astype(np.float64)
    values *= values * values  # products are rounded alike everywhere, and powers are not
    return _native.sum_exactly(address_of(values), COUNT).hex()


def checksum_and_crc32c() -> str:
    content = drawn(8)
    address, num_bytes = address_of(content) + 1, 4 * COUNT - 2
    return f"{_native.checksum(address, num_bytes):08x}{_native.crc32c(address, num_bytes):08x}"


def update(name: str) -> str:
    """Three steps of AdamW or Lion, with moments and weights as the name says."""
    is_split, width = name.endswith("split"), 1 if "8 bits" in name else 2 if "bf16" in name else 4
    state = State.of(mixed(9), mixed(10), np.abs(mixed(11)), mixed(12), is_split)
    if width < 4:
        state = state.narrow(width)
    if name.startswith("lion"):
        state.exp_avg_sq = np.zeros(0, np.float32)
    second = address_of(state.exp_avg_sq) if len(state.exp_avg_sq) else 0
    planes = (*state.planes[:3], second, state.planes[4])

    pool = _native.ThreadPool(2, 64)
    for step in (1, 2, 3):
        rounding = None if width == 4 else (width, KEY + step, 5)
        segments = [(0, 12_345, 1.0), (12_345, COUNT, DECAY)]
        batch = pool.submit_adamw(planes, is_split, segments, scalars_of(step, 0.37), rounding=rounding)
        assert batch.wait()
    pool.close()
    return digest(state.weight, state.remainder, state.exp_avg, state.exp_avg_sq)


KERNELS: dict[str, Callable[[], str]] = {
    "split and join": split_and_join,
    "round_bf16": round_bf16,
    "accumulate": accumulate,
    "sum_squares": sum_squares,
    "sum_exactly": sum_exactly,
    "checksum and crc32c": checksum_and_crc32c,
}


@every_level
@pytest.mark.parametrize("name", NOTED)
def test_kernel_gives_the_bits_of_other_processors(isa: str, name: str) -> None:
    _native.set_isa(isa)
    found = KERNELS[name]() if name in KERNELS else update(name)
    assert found == NOTED[name]
