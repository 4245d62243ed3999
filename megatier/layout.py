"""Offsets of a unit's tensors inside its blocks, counted in elements, so that one layout serves every kind.

Element k of the weight plane, the remainder, both moments and the gradient belong together; a kind only differs in
bytes per element. Offsets are multiples of 128 elements (256 bytes in bf16): matrix libraries pick kernels by
alignment, and equal alignment on every tier keeps the bits equal. The whole is padded to 2,048 elements, so that
every plane is a multiple of 4 KiB. Padding stays 0 under AdamW.

Frozen parameters have a place in the weight plane alone, behind the trained ones: all other planes end where these do.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

ALIGN_ELEMENTS = 128
PAD_ELEMENTS = 2048
CHECKED_ELEMENTS = 32 << 10
"""Trained and frozen parameters of one unit share no chunk of bytes under one checksum: 64 KiB in bf16."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """One parameter inside its unit, or a run of its elements where several units share it."""

    name: str
    """Full parameter name in the model, such as `model.layers.0.mlp.up_proj.weight`."""
    shape: tuple[int, ...]
    start: int
    """First element inside the unit."""
    whole: tuple[int, ...] | None = None
    """Shape of the parameter, where the slice is a run of its elements only; None: the slice is all of it."""
    offset: int = 0
    """First element of the slice inside its parameter."""

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        return self.shape if self.whole is None else self.whole

    @property
    def num_elements(self) -> int:
        """Elements of the slice itself, without padding."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.num_elements

    @property
    def elements(self) -> tuple[int, int]:
        """The elements [start, stop) of the parameter that the slice holds."""
        return self.offset, self.offset + self.num_elements

    def place(self, element: int) -> int:
        """Where an element of the parameter lies in the unit."""
        return self.start + element - self.offset


@dataclass(frozen=True, slots=True)
class Layout:
    """All parameters of one unit, in order, without overlap."""

    tensors: tuple[TensorSlice, ...]
    num_elements: int
    """Padded size of the unit's weight plane, in elements."""
    num_trained: int
    """Padded size of every other plane: the elements of trained parameters, which come first."""

    @staticmethod
    def of(shapes: Iterable[tuple[str, tuple[int, ...]]], frozen: Collection[str] = ()) -> Layout:
        """Place (name, shape) pairs one after another, those named as frozen last."""
        pairs = list(shapes)
        trained, offset = _placed([pair for pair in pairs if pair[0] not in frozen], 0)
        if len(trained) == len(pairs):
            size = max(PAD_ELEMENTS, _padded(offset, PAD_ELEMENTS))
            return Layout(trained, size, size)
        num_trained = _padded(offset, CHECKED_ELEMENTS)
        others, offset = _placed([pair for pair in pairs if pair[0] in frozen], num_trained)
        return Layout((*trained, *others), _padded(offset, PAD_ELEMENTS), num_trained)

    @property
    def trained(self) -> Layout:
        """Of the trained parameters alone: what gradients and moments have."""
        if self.num_trained == self.num_elements:
            return self
        tensors = tuple(tensor for tensor in self.tensors if tensor.start < self.num_trained)
        return Layout(tensors, self.num_trained, self.num_trained)


def _placed(shapes: Iterable[tuple[str, tuple[int, ...]]], offset: int) -> tuple[tuple[TensorSlice, ...], int]:
    """Slices from an offset on, and the first aligned element behind them."""
    tensors = []
    for name, shape in shapes:
        tensors.append(TensorSlice(name, tuple(shape), offset))
        offset += _padded(math.prod(shape), ALIGN_ELEMENTS)
    return tuple(tensors), offset


def _padded(num_elements: int, multiple: int) -> int:
    return -(-num_elements // multiple) * multiple
