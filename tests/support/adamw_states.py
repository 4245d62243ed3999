"""States of one unit for tests of AdamW's native core, and what its definition makes of them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from megatier import _native
from megatier.optim.masters import narrow, widen
from megatier.tier import Kind

Floats = npt.NDArray[np.float32]
KernelScalars = tuple[float, float, float, float, float, float, float, float]

BETA1, BETA2, EPS, LR, WEIGHT_DECAY = 0.9, 0.999, 1e-8, 1e-3, 0.1
NAN = np.uint32(0x7FC00000).view(np.float32)

every_level = pytest.mark.parametrize("isa", _native.isa_levels())
split_or_whole = pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])


def scalars_of(step: int, grad_scale: float = 1.0) -> KernelScalars:
    step_size, sqrt_bias2 = LR / (1 - BETA1**step), (1 - BETA2**step) ** 0.5
    return (BETA1, 1 - BETA1, BETA2, 1 - BETA2, EPS, step_size, sqrt_bias2, grad_scale)


DECAY = 1 - LR * WEIGHT_DECAY


def address_of(array: npt.NDArray[Any]) -> int:
    return int(array.ctypes.data)


@dataclass
class State:
    """The planes of one unit. remainder is empty when not split; grad holds bf16 bits when split, else floats.

    Moments are floats, the bits of bf16, or codes of 8 bits.
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
        scalars: KernelScalars,
        before: tuple[int, int, int, int] | None = None,
        rounding: tuple[int, int, int] | None = None,
    ) -> None:
        sources = before or self.planes[:4]
        batch = pool.submit_adamw(self.planes, self.is_split, segments, scalars, before=sources, rounding=rounding)
        assert batch.wait()
        assert batch.error() is None

    def narrow(self, width: int) -> "State":
        """The same with moments of so many bytes, rounded to nearest."""
        first: npt.NDArray[Any] = bf16_bits(self.exp_avg)
        second: npt.NDArray[Any] = bf16_bits(self.exp_avg_sq)
        if width == 1:
            first, second = codes(Kind.EXP_AVG, self.exp_avg), codes(Kind.EXP_AVG_SQ, self.exp_avg_sq)
        return State(self.weight, self.remainder, first, second, self.grad)

    def moments(self) -> tuple[Floats, Floats]:
        """Both moments as floats."""
        if self.exp_avg.dtype == np.uint8:
            return numbers(Kind.EXP_AVG, self.exp_avg), numbers(Kind.EXP_AVG_SQ, self.exp_avg_sq)
        if self.exp_avg.dtype == np.uint16:
            return floats_of(self.exp_avg), floats_of(self.exp_avg_sq)
        return self.exp_avg, self.exp_avg_sq

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


def codes(kind: Kind, values: Floats) -> npt.NDArray[np.uint8]:
    """Of 8 bits, rounded to nearest."""
    plane = torch.empty(len(values), dtype=torch.uint8)
    narrow(kind, torch.from_numpy(values.copy()), plane)
    return plane.numpy()


def numbers(kind: Kind, plane: npt.NDArray[np.uint8]) -> Floats:
    """That codes of 8 bits stand for."""
    values = torch.empty(len(plane))
    widen(kind, torch.from_numpy(plane), values)
    return values.numpy()


def settle(moment: Floats) -> Floats:
    moment = np.where(np.abs(moment) < np.float32(2.0**-126), np.float32(0), moment)
    return np.where(np.isnan(moment), NAN, moment).astype(np.float32)


def update_by_definition(
    x: Floats, m: Floats, v: Floats, grad: Floats, decay: float, scalars: KernelScalars
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
